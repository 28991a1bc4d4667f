/* SPDX-License-Identifier: Apache-2.0 */
/* Backward panels: per tile [width/2][rows] pairs of columns, one 32-bit word each. */
#include "codelets/kernels/avx512_bf16/bf16.h"

#define GROUP 8 /* rows and pairs of one transpose */

/* v[i] holds 8 words of row i; afterwards word i of every row. */
INLINE void transpose(__m256i v[GROUP])
{
	__m256i a[GROUP], b[GROUP];

	for (int i = 0; i < GROUP; i += 2) {
		a[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
		a[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
	}
	for (int i = 0; i < GROUP; i += 4)
		for (int j = 0; j < 2; j++) {
			b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + 2 + j]);
			b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + 2 + j]);
		}
	for (int i = 0; i < 4; i++) {
		v[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
		v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
	}
}

/* 16 columns of 8 rows: 8 words to each of 8 places that are `rows` words apart */
INLINE void pack_group(const float *const from[GROUP], int64_t c, __mmask16 live, int rows,
		       __mmask8 keep, uint32_t *dst)
{
	__m256i v[GROUP];

	for (int i = 0; i < GROUP; i++)
		v[i] = to_bf16(_mm512_maskz_loadu_ps(live, from[i] + c));
	transpose(v);
	for (int i = 0; i < GROUP; i++)
		if (keep == 0xff)
			_mm256_storeu_si256((__m256i *)(dst + i * rows), v[i]);
		else
			_mm256_mask_storeu_epi32(dst + i * rows, keep, v[i]);
}

/*
 * Rows of a tile are taken 8 at a time; the last group overlaps the one before it, so that whole
 * vectors are stored. Tiles of fewer than 8 rows repeat their last one and store what is theirs.
 */
static void pack_tile(const float *const from[16], int rows, int64_t k, int64_t kp, uint32_t *dst)
{
	__mmask8 keep = rows >= GROUP ? 0xff : (__mmask8)((1 << rows) - 1);

	for (int64_t c = 0; c < kp; c += 16, dst += 8 * rows) {
		__mmask16 live = c + 16 <= k ? 0xffff : c < k ? (__mmask16)((1 << (k - c)) - 1) : 0;

		if (keep != 0xff) {
			pack_group(from, c, live, rows, keep, dst);
			continue;
		}
		pack_group(from, c, live, rows, 0xff, dst);
		if (rows > GROUP)
			pack_group(from + rows - GROUP, c, live, rows, 0xff, dst + rows - GROUP);
	}
}

void avx512_bf16_pack_bwd(int m, const float *src, int64_t ld, const int32_t *token, int64_t k,
			  int64_t kp, void *panel, int64_t width, int64_t col)
{
	struct tiles tiles = bwd_tiles(m);

	for (int t = 0, row = 0, rows; t < tiles.count; t++, row += rows) {
		const float *from[16];

		rows = tile_rows(&tiles, t);
		for (int i = 0; i < MOE_MAX(rows, GROUP); i++) {
			int at = row + MOE_MIN(i, rows - 1);

			from[i] = src + (token ? token[at] : at) * ld;
		}
		pack_tile(from, rows, k, kp, (uint32_t *)panel + (row * width + col * rows) / 2);
	}
}

void avx512_bf16_unpack_bwd(int m, const void *panel, int64_t width, int64_t col, int64_t k,
			    float *dst, int64_t ld)
{
	struct tiles tiles = bwd_tiles(m);

	for (int t = 0, row = 0, rows; t < tiles.count; t++, row += rows) {
		const uint16_t *src;

		rows = tile_rows(&tiles, t);
		src = (const uint16_t *)panel + row * width + col * rows;
		for (int i = 0; i < rows; i++)
			for (int64_t c = 0; c < k; c++)
				dst[(row + i) * ld + c] =
					moe_bf16_to_f32(src[2 * (c / 2 * rows + i) + c % 2]);
	}
}
