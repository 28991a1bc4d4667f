/* SPDX-License-Identifier: Apache-2.0 */
/* Pair arrays: f32 rows. */
#include "codelets/kernels/c/c.h"

void c_pairs(int m, const float *src, int64_t ld, const int32_t *token, const float *scale,
	     int cols, void *dst)
{
	float *to = dst;

	for (int i = 0; i < m; i++, to += cols) {
		const float *restrict from = src + (token ? token[i] : i) * ld;
		float s = scale ? scale[i] : 1.0f;

		for (int j = 0; j < cols; j++)
			to[j] = s * from[j];
	}
	if (m % 2)
		memset(to, 0, (size_t)cols * sizeof *to);
}

void c_pairs_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols, void *dst)
{
	float *to = dst;

	for (int i = 0; i < m; i++, to += cols) {
		const uint16_t *restrict from = src + (token ? token[i] : i) * ld;

		for (int j = 0; j < cols; j++)
			to[j] = moe_bf16_to_f32(from[j]);
	}
	if (m % 2)
		memset(to, 0, (size_t)cols * sizeof *to);
}
