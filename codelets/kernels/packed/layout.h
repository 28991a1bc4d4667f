/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses inside a packed weight (packed/tiles.h says what the layout is). */
#ifndef MOE_CODELETS_KERNELS_PACKED_LAYOUT_H
#define MOE_CODELETS_KERNELS_PACKED_LAYOUT_H

#include "codelets/kernels/packed/tiles.h"

#include <string.h>

/*
 * 192 bytes between panels whose stride is a multiple of 2 KB, which would put all panels of a
 * column in a half of the L1's sets or fewer. With 128 bytes and k = 2048 the 96 panels of a slice
 * share too few sets of an L2 of 1 MB with the next slice; from 256 bytes on the forward of a few
 * rows loses (Zen 4; measured in docs/kernels.md). Narrower or odd panels have no gap: one costs
 * 4 % where k is 96, a Qwen3-30B expert's share of 8 parts.
 */
#define MOE_PACK_GAP 96

static inline int64_t moe_round_up(int64_t n, int64_t to)
{
	return (n + to - 1) / to * to;
}

/* Elements from one panel to the next; kp is the padded k. */
static inline int64_t moe_packed_stride(int64_t kp)
{
	return MOE_PACK_N * kp + (kp % 64 == 0 ? MOE_PACK_GAP : 0);
}

static inline int64_t moe_packed_panels(int64_t n)
{
	return (n + MOE_PACK_N - 1) / MOE_PACK_N;
}

/* k of a block */
static inline int64_t moe_layout_k(enum moe_layout layout)
{
	return layout == MOE_LAYOUT_BLOCKS32 ? 32 : layout == MOE_LAYOUT_PAIRS16 ? 16 : 8;
}

/* Element (n, k) of a panel, n below MOE_PACK_N */
static inline int64_t moe_panel_at(enum moe_layout layout, int64_t n, int64_t k)
{
	int64_t block = moe_layout_k(layout);

	if (layout == MOE_LAYOUT_PAIRS16)
		return k / 16 * 16 * MOE_PACK_N + n / 2 * 32 + k % 16 * 2 + n % 2;
	return k / block * block * MOE_PACK_N + n * block + k % block;
}

typedef uint16_t moe_run8 __attribute__((vector_size(16))); /* 8 columns of a row */

/* 8 columns of two rows become what PAIRS16 has of them, side by side. */
static inline void moe_pair(moe_run8 *a, moe_run8 *b)
{
	moe_run8 low = __builtin_shuffle(*a, *b, (moe_run8){ 0, 8, 1, 9, 2, 10, 3, 11 });

	*b = __builtin_shuffle(*a, *b, (moe_run8){ 4, 12, 5, 13, 6, 14, 7, 15 });
	*a = low;
}

/* Blocks of 16 columns, row by row, to PAIRS16 in place */
static inline void moe_pair_rows(uint16_t *block, int64_t elements)
{
	for (; elements > 0; elements -= 32, block += 32) {
		moe_run8 row[2][2], pair[2][2];

		memcpy(row, block, sizeof row);
		for (int half = 0; half < 2; half++) {
			pair[half][0] = row[0][half];
			pair[half][1] = row[1][half];
			moe_pair(&pair[half][0], &pair[half][1]);
		}
		memcpy(block, pair, sizeof pair);
	}
}

static inline size_t moe_packed_bytes(int64_t n, int64_t kp)
{
	return (size_t)(moe_packed_panels(n) * moe_packed_stride(kp)) * sizeof(uint16_t);
}

#endif
