/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transposed copies for the backward: W^T of a packed W, and packed A^T and B^T of LoRA masters. In
 * every block layout a square of 8 n x 8 k is 8 runs of 16 bytes (PAIRS16: of 2 rows x 4 k), so that
 * both sides are moved in such squares.
 */
#include "codelets/kernels/packed/packed.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define SIDE 8	 /* rows and columns of a square */
#define STRIP 64 /* columns of LoRA matrices at a time; a multiple of MOE_PACK_K */

typedef uint32_t vec4 __attribute__((vector_size(16)));
typedef uint64_t vec2 __attribute__((vector_size(16)));

static inline void put(uint16_t *to, moe_run8 v, bool stream)
{
#ifdef __SSE2__
	if (stream) {
		_mm_stream_si128((__m128i *)(void *)to, (__m128i)v);
		return;
	}
#endif
	memcpy(to, &v, sizeof v);
}

/* Run i of a square whose rows lie `ld` apart */
static inline int64_t run_at(const bool pairs, int64_t ld, int i)
{
	return pairs ? i / 2 * 2 * ld + i % 2 * 8 : i * ld;
}

/*
 * Three rounds of interleaving: elements, pairs, fours. Rows lie `ld` apart on both sides. Pairs of rows are
 * what the first round makes, and come out of a fourth.
 */
static inline void transpose(const bool pairs, const uint16_t *src, int64_t ld, uint16_t *dst,
			     bool stream)
{
	moe_run8 a[SIDE];
	vec4 b[SIDE];

#pragma GCC unroll 8
	for (int i = 0; i < SIDE; i++)
		memcpy(&a[i], src + run_at(pairs, ld, i), sizeof a[i]);
#pragma GCC unroll 4
	for (int i = 0; i < SIDE && !pairs; i += 2) /* rows i, i + 1: pairs of columns 0-3, 4-7 */
		moe_pair(&a[i], &a[i + 1]);
#pragma GCC unroll 2
	for (int i = 0; i < SIDE; i += 4)
#pragma GCC unroll 2
		for (int j = 0; j < 2;
		     j++) { /* rows i to i + 3: columns 4 j, 4 j + 1, then the other two */
			vec4 low = (vec4)a[i + j], high = (vec4)a[i + 2 + j];

			b[i + 2 * j] = __builtin_shuffle(low, high, (vec4){ 0, 4, 1, 5 });
			b[i + 2 * j + 1] = __builtin_shuffle(low, high, (vec4){ 2, 6, 3, 7 });
		}
#pragma GCC unroll 4
	for (int i = 0; i < SIDE / 2; i++) {
		vec2 low = (vec2)b[i], high = (vec2)b[i + 4];
		moe_run8 first = (moe_run8)__builtin_shuffle(low, high, (vec2){ 0, 2 });
		moe_run8 second = (moe_run8)__builtin_shuffle(low, high, (vec2){ 1, 3 });

		if (pairs)
			moe_pair(&first, &second);
		put(dst + run_at(pairs, ld, 2 * i), first, stream);
		put(dst + run_at(pairs, ld, 2 * i + 1), second, stream);
	}
}

/* 16 rows n of 16 columns k into columns n.. of 16 rows k of a panel */
static inline void transpose16(enum moe_layout layout, const uint16_t *src, uint16_t *dst, int64_t n,
			       bool stream)
{
	const int64_t ld = moe_layout_k(layout);

#pragma GCC unroll 2
	for (int i = 0; i < MOE_PACK_N; i += SIDE)
#pragma GCC unroll 2
		for (int j = 0; j < MOE_PACK_N; j += SIDE)
			transpose(layout == MOE_LAYOUT_PAIRS16, src + moe_panel_at(layout, i, j), ld,
				  dst + moe_panel_at(layout, j, n + i), stream);
}

/* Columns from..to of a panel of rows; both multiples of 16. */
static void clear_columns(enum moe_layout layout, uint16_t *panel, int64_t from, int64_t to)
{
	for (int64_t k = from; k < to; k += SIDE)
		for (int n = 0; n < MOE_PACK_N; n++)
			for (int i = 0; i < SIDE; i++)
				panel[moe_panel_at(layout, n, k + i)] = 0;
}

/*
 * One panel of W after the other: it is read in order, and each square of 16 goes to another panel
 * of W^T, by whole cache lines where blocks have at most 16 columns.
 */
static inline void transpose_weight(enum moe_layout layout, const struct moe_weight *W, uint16_t *to)
{
	int64_t kp = moe_round_up(W->k, MOE_PACK_K), np = moe_round_up(W->n, MOE_PACK_K);
	int64_t rows = moe_round_up(W->n, MOE_PACK_N), cols = moe_round_up(W->k, MOE_PACK_N);
	int64_t stride = moe_packed_stride(np);
	const uint16_t *panel = W->data;

	for (int64_t n = 0; n < rows; n += MOE_PACK_N, panel += moe_packed_stride(kp))
		for (int64_t k = 0; k < cols; k += MOE_PACK_N)
			transpose16(layout, panel + moe_panel_at(layout, 0, k), to + k / MOE_PACK_N * stride, n,
				    moe_layout_k(layout) <= MOE_PACK_N);
	for (int64_t k = 0; k < cols && rows < np; k += MOE_PACK_N)
		clear_columns(layout, to + k / MOE_PACK_N * stride, rows, np);
#ifdef __SSE2__
	_mm_sfence();
#endif
}

void moe_packed_weight_transpose(const struct moe_tiles *t, const struct moe_weight *W, void *dst)
{
	MOE_ASSERT(W->layout == t->layout);
	switch (t->layout) { /* a constant for each */
	case MOE_LAYOUT_BLOCKS8:
		transpose_weight(MOE_LAYOUT_BLOCKS8, W, dst);
		break;
	case MOE_LAYOUT_PAIRS16:
		transpose_weight(MOE_LAYOUT_PAIRS16, W, dst);
		break;
	default:
		transpose_weight(MOE_LAYOUT_BLOCKS32, W, dst);
	}
}

void moe_packed_lora_pack_t(const struct moe_tiles *t, moe_pack_rows *pack, enum moe_lora_side side,
			    const float *src, int64_t n, int64_t k, int64_t n0, int64_t n1,
			    float scale, void *dst)
{
	int64_t end = MOE_MIN(n1, n), cols = moe_round_up(k, MOE_PACK_N);
	int64_t width = moe_round_up(n, side == MOE_LORA_B ? MOE_PACK_K : t->lora_pad);
	int64_t stride = moe_packed_stride(width);

	MOE_ASSERT(n0 % MOE_PACK_N == 0);
	for (int64_t first = n0; first < end; first += MOE_PACK_N)
		for (int64_t k0 = 0; k0 < cols; k0 += STRIP) {
			uint16_t strip[MOE_PACK_N * STRIP]; /* packed as they stand */

			pack(t->layout, (int)MOE_MIN(MOE_PACK_N, n - first), MOE_MIN(STRIP, k - k0),
			     STRIP, src + first * k + k0, k, scale, strip);
			for (int64_t j = 0; j < MOE_MIN(STRIP, cols - k0); j += MOE_PACK_N)
				transpose16(t->layout, strip + moe_panel_at(t->layout, 0, j),
					    (uint16_t *)dst + (k0 + j) / MOE_PACK_N * stride, first, false);
		}
}
