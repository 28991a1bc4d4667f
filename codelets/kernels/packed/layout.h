/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses inside a packed weight (packed/tiles.h says what the layout is). */
#ifndef MOE_CODELETS_KERNELS_PACKED_LAYOUT_H
#define MOE_CODELETS_KERNELS_PACKED_LAYOUT_H

#include "codelets/kernels/packed/tiles.h"

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

static inline size_t moe_packed_bytes(int64_t n, int64_t kp)
{
	return (size_t)(moe_packed_panels(n) * moe_packed_stride(kp)) * sizeof(uint16_t);
}

#endif
