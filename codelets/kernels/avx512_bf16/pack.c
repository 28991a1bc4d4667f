/* SPDX-License-Identifier: Apache-2.0 */
/* Weight panels from f32; forward panels: per tile [width/8][rows][8], so a row's 16 columns are two runs of 16 bytes. */
#include "codelets/kernels/avx512_bf16/bf16.h"

/* Row pointers of one tile: rows token[row + i], or row + i. */
#define ROW_POINTERS(type)                                                                         \
	static void rows_##type(const type *src, int64_t ld, const int32_t *token, int row,        \
				int rows, const type *out[FWD_ROWS])                               \
	{                                                                                          \
		for (int i = 0; i < rows; i++)                                                     \
			out[i] = src + (token ? token[row + i] : row + i) * ld;                    \
	}
ROW_POINTERS(uint16_t)
ROW_POINTERS(float)

void avx512_bf16_pack_fwd_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token,
			       int64_t k, int64_t kp, void *panel, int64_t width, int64_t col)
{
	struct tiles tiles = fwd_tiles(m);

	for (int t = 0, row = 0, rows; t < tiles.count; t++, row += rows) {
		const uint16_t *from[FWD_ROWS];
		uint16_t *dst = (uint16_t *)panel + row * width;

		rows = tile_rows(&tiles, t);
		dst += col * rows;
		rows_uint16_t(src, ld, token, row, rows, from);
		for (int64_t c = 0; c < kp; c += 8) {
			/* nothing is read beyond column k */
			__mmask8 live = c + 8 <= k ? 0xff
					: c < k	   ? (__mmask8)((1 << (k - c)) - 1)
						   : 0;

			for (int i = 0; i < rows; i++, dst += 8) {
				__m128i v =
					live == 0xff
						? _mm_loadu_si128((const __m128i *)(from[i] + c))
						: _mm_maskz_loadu_epi16(live, from[i] + c);

				_mm_storeu_si128((__m128i *)dst, v);
			}
		}
	}
}

void avx512_bf16_pack_fwd(int m, const float *src, int64_t ld, const int32_t *token, int64_t k,
			  int64_t kp, void *panel, int64_t width, int64_t col)
{
	struct tiles tiles = fwd_tiles(m);

	for (int t = 0, row = 0, rows; t < tiles.count; t++, row += rows) {
		const float *from[FWD_ROWS];
		uint16_t *dst = (uint16_t *)panel + row * width;

		rows = tile_rows(&tiles, t);
		dst += col * rows;
		rows_float(src, ld, token, row, rows, from);
		for (int64_t c = 0; c < kp; c += 16, dst += 16 * rows) {
			__mmask16 live = c + 16 <= k ? 0xffff
					 : c < k     ? (__mmask16)((1 << (k - c)) - 1)
						     : 0;

			for (int i = 0; i < rows; i++) {
				__m256i v = to_bf16(_mm512_maskz_loadu_ps(live, from[i] + c));

				_mm_storeu_si128((__m128i *)(dst + 8 * i),
						 _mm256_castsi256_si128(v));
				_mm_storeu_si128((__m128i *)(dst + 8 * (rows + i)),
						 _mm256_extracti128_si256(v, 1));
			}
		}
	}
}

void avx512_bf16_unpack_fwd(int m, const void *panel, int64_t width, int64_t col, int64_t k,
			    float *dst, int64_t ld)
{
	struct tiles tiles = fwd_tiles(m);

	for (int t = 0, row = 0, rows; t < tiles.count; t++, row += rows) {
		const uint16_t *src = (const uint16_t *)panel + row * width;

		rows = tile_rows(&tiles, t);
		src += col * rows;
		for (int64_t c = 0; c < k; c += 8)
			for (int i = 0; i < rows; i++, src += 8) {
				int live = (int)MOE_MIN(8, k - c);
				__m256i v = _mm256_cvtepu16_epi32(
					_mm_loadu_si128((const __m128i *)src));

				_mm256_mask_storeu_epi32(dst + (row + i) * ld + c,
							 (__mmask8)((1 << live) - 1),
							 _mm256_slli_epi32(v, 16));
			}
	}
}

/* 16 columns of 4 rows into their cache line of each of two blocks */
INLINE void stream_rows(const float *src, int64_t k, uint16_t *dst)
{
	__m512i ab = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(src + k), _mm512_loadu_ps(src));
	__m512i cd = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(src + 3 * k),
						  _mm512_loadu_ps(src + 2 * k));

	_mm512_stream_si512((__m512i *)(void *)dst, _mm512_shuffle_i64x2(ab, cd, 0x88));
	_mm512_stream_si512((__m512i *)(void *)(dst + 16 * 8), _mm512_shuffle_i64x2(ab, cd, 0xdd));
}

void avx512_bf16_stream_panel(const float *src, int64_t k, uint16_t *dst)
{
	for (int64_t c = 0; c < k; c += 16, dst += 16 * 16)
		for (int row = 0; row < 16; row += 4)
			stream_rows(src + row * k + c, k, dst + row * 8);
}
