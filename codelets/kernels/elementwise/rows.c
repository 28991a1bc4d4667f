/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"

#define BLOCK 512 /* columns that stay in L1 while all rows are added */

static void add_row(int64_t n, float w, const float *restrict row, float *restrict out)
{
	for (int64_t i = 0; i < n; i++)
		out[i] += w * row[i];
}

void OWN(sum_rows)(int64_t n, int count, const float *const *row, const float *w, float *out)
{
	for (int64_t at = 0; at < n; at += BLOCK) {
		int64_t width = MOE_MIN(BLOCK, n - at);

		memset(out + at, 0, (size_t)width * sizeof *out);
		for (int j = 0; j < count; j++)
			add_row(width, w ? w[j] : 1.0f, row[j] + at, out + at);
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
