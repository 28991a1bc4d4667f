/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/packed/layout.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define LANES 16

void OWN(sum_rows)(int64_t n, int count, const float *const *row, const float *w, float *out)
{
	int64_t at = 0;

	for (; at + LANES <= n; at += LANES) {
		float sum[LANES] = { 0 };

		for (int j = 0; j < count; j++) {
			const float *from = row[j] + at;
			float weight = w ? w[j] : 1.0f;

			for (int l = 0; l < LANES; l++)
				sum[l] += weight * from[l];
		}
		memcpy(out + at, sum, sizeof sum);
	}
	for (; at < n; at++) {
		float sum = 0;

		for (int j = 0; j < count; j++)
			sum += (w ? w[j] : 1.0f) * row[j][at];
		out[at] = sum;
	}
}

/* To nearest, ties to even; NaN stays NaN. */
static uint16_t half_of(uint32_t bits)
{
	uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
	bool nan = (bits & 0x7fffffffu) > 0x7f800000u;

	return (uint16_t)(nan ? (bits >> 16) | 0x40u : rounded);
}

void OWN(to_bf16)(int m, int64_t n, const float *x, int64_t ldx, uint16_t *dst, int64_t ld16)
{
	for (int i = 0; i < m; i++, x += ldx, dst += ld16) {
		for (int64_t j = 0; j < n; j++) {
			uint32_t bits;

			memcpy(&bits, x + j, sizeof bits);
			dst[j] = half_of(bits);
		}
		memset(dst + n, 0, (size_t)(ld16 - n) * sizeof *dst);
	}
}

#define RUN 64 /* columns of a row taken at a time: rows are often a power of two apart, in one cache set */

/* `width` columns (a multiple of 16) of one row of a panel */
#ifdef __AVX512BF16__
static void pack_run(int64_t block, int width, const float *src, float scale, uint16_t *dst)
{
	__m512 factor = _mm512_set1_ps(scale);

	for (int k = 0; k < width; k += 16) {
		__m512 v = _mm512_mul_ps(factor, _mm512_loadu_ps(src + k));
		__m256i half = (__m256i)_mm512_cvtneps_pbh(v); /* subnormals are 0, as in products */
		uint16_t *to = dst + k / block * 16 * block + k % block;

		_mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(half));
		_mm_storeu_si128((__m128i *)(to + (block == 8 ? 16 * 8 : 8)),
				 _mm256_extracti128_si256(half, 1));
	}
}
#else
static void pack_run(int64_t block, int width, const float *restrict src, float scale,
		     uint16_t *restrict dst)
{
	for (int k = 0; k < width; k += 8) {
		uint16_t *restrict to = dst + k / block * 16 * block + k % block;

		for (int j = 0; j < 8; j++) {
			float v = scale * src[k + j];
			uint32_t bits;

			memcpy(&bits, &v, sizeof bits);
			to[j] = half_of(bits);
		}
	}
}
#endif

void OWN(pack_rows)(enum moe_layout layout, int rows, int64_t k, int64_t kp, const float *src,
		    int64_t ld, float scale, uint16_t *dst)
{
	int64_t block = moe_layout_k(layout);

	for (int64_t k0 = 0; k0 < kp; k0 += RUN) {
		int width = (int)MOE_MIN(RUN, kp - k0);

		for (int n = 0; n < 16; n++) {
			float tail[RUN] = { 0 };
			const float *from = src + n * ld + k0;

			/* the next panel: its rows may lie pages apart, which no hardware foresees */
			for (int c = 0; c < width; c += 16)
				__builtin_prefetch(from + 16 * ld + c);
			if (n >= rows || k0 + width > k) {
				if (n < rows && k0 < k)
					memcpy(tail, from, (size_t)(k - k0) * sizeof *tail);
				from = tail;
			}
			pack_run(block, width, from, scale, dst + k0 * 16 + n * block);
		}
		if (layout == MOE_LAYOUT_PAIRS16)
			moe_pair_rows(dst + k0 * 16, 16 * width);
	}
}
