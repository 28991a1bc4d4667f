/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"

static void rotate(int half, float *restrict lo, float *restrict hi, const float *restrict cos,
		   const float *restrict sin, float sign)
{
	for (int i = 0; i < half; i++) {
		float a = lo[i], b = hi[i], s = sign * sin[i];

		lo[i] = a * cos[i] - b * s;
		hi[i] = b * cos[i] + a * s;
	}
}

void OWN(rope)(int m, int heads, int dim, float *x, int64_t ld, const int32_t *position,
	       const float *cs, int direction)
{
	int half = dim / 2;

	for (int64_t i = 0; i < m; i++) {
		const float *row = cs + (int64_t)position[i] * dim;
		float *head = x + i * ld;

		for (int h = 0; h < heads; h++, head += dim)
			rotate(half, head, head + half, row, row + half,
			       direction < 0 ? -1.0f : 1.0f);
	}
}
