/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/packed/scratch.h"

void moe_pair_strip(const struct moe_tiles *t, int m, const float *src, int64_t ld,
		    const int32_t *token, int width, float *rows, void *dst)
{
	int wide = (int)moe_round_up(width, 16);

	if (width == wide) {
		t->pairs(m, src, ld, token, NULL, wide, dst);
		return;
	}
	for (int i = 0; i < m; i++) {
		const float *from = src + (token ? token[i] : i) * ld;

		memcpy(rows + i * wide, from, (size_t)width * sizeof *rows);
		memset(rows + i * wide + width, 0, (size_t)(wide - width) * sizeof *rows);
	}
	t->pairs(m, rows, wide, NULL, NULL, wide, dst);
}
