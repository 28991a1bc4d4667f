/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"

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

/* 8 values of one row of a block */
static void pack8(const float *restrict src, float scale, uint16_t *restrict dst)
{
	for (int j = 0; j < 8; j++) {
		float v = scale * src[j];
		uint32_t bits;

		memcpy(&bits, &v, sizeof bits);
		dst[j] = half_of(bits);
	}
}

void OWN(pack_rows)(int64_t block, int rows, int64_t k, int64_t kp, const float *src, int64_t ld,
		    float scale, uint16_t *dst)
{
	for (int64_t k0 = 0; k0 < kp; k0 += 8) {
		uint16_t *to = dst + k0 / block * 16 * block + k0 % block;

		for (int n = 0; n < 16; n++, to += block) {
			float tail[8] = { 0 };
			const float *from = src + n * ld + k0;

			if (n < rows && k0 + 8 > k && k0 < k)
				memcpy(tail, from, (size_t)(k - k0) * sizeof *tail);
			pack8(n < rows && k0 + 8 <= k ? from : tail, scale, to);
		}
	}
}
