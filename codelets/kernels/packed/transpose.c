/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transposed copies for the backward: W^T of a packed W, and packed A^T and B^T of LoRA masters. In
 * every block layout a square of 8 n x 8 k is 8 runs of 16 bytes, so that both sides are moved in
 * such squares.
 */
#include "codelets/kernels/packed/packed.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define SIDE 8	 /* rows and columns of a square */
#define STRIP 64 /* columns of LoRA matrices at a time; a multiple of MOE_PACK_K */

typedef uint16_t vec8 __attribute__((vector_size(16)));
typedef uint32_t vec4 __attribute__((vector_size(16)));
typedef uint64_t vec2 __attribute__((vector_size(16)));

static int64_t block_k(const struct moe_tiles *t)
{
	return t->layout == MOE_LAYOUT_BLOCKS32 ? 32 : 8;
}

/* Element (n, k) of a panel, both multiples of SIDE; rows of the square are `block` apart. */
static int64_t square_at(int64_t block, int64_t n, int64_t k)
{
	return k / block * block * MOE_PACK_N + n * block + k % block;
}

static inline void put(uint16_t *to, vec2 v, bool stream)
{
#ifdef __SSE2__
	if (stream) {
		_mm_stream_si128((__m128i *)(void *)to, (__m128i)v);
		return;
	}
#endif
	memcpy(to, &v, sizeof v);
}

/* Three rounds of interleaving: elements, pairs, fours. */
static inline void transpose(const uint16_t *src, int64_t ld, uint16_t *dst, int64_t ld_dst,
			     bool stream)
{
	vec8 r[SIDE], a[SIDE];
	vec4 b[SIDE];

#pragma GCC unroll 8
	for (int i = 0; i < SIDE; i++)
		memcpy(&r[i], src + i * ld, sizeof r[i]);
#pragma GCC unroll 4
	for (int i = 0; i < SIDE; i += 2) { /* rows i, i + 1: pairs of columns 0-3, 4-7 */
		a[i] = __builtin_shuffle(r[i], r[i + 1], (vec8){ 0, 8, 1, 9, 2, 10, 3, 11 });
		a[i + 1] = __builtin_shuffle(r[i], r[i + 1], (vec8){ 4, 12, 5, 13, 6, 14, 7, 15 });
	}
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

		put(dst + 2 * i * ld_dst, __builtin_shuffle(low, high, (vec2){ 0, 2 }), stream);
		put(dst + (2 * i + 1) * ld_dst, __builtin_shuffle(low, high, (vec2){ 1, 3 }),
		    stream);
	}
}

/* 16 rows n of 16 columns k, rows ld apart, into columns n.. of 16 rows k of a panel */
static inline void transpose16(const uint16_t *src, int64_t ld, int64_t step, uint16_t *dst,
			       int64_t block, int64_t n, bool stream)
{
#pragma GCC unroll 2
	for (int i = 0; i < MOE_PACK_N; i += SIDE)
#pragma GCC unroll 2
		for (int j = 0; j < MOE_PACK_N; j += SIDE)
			transpose(src + i * ld + j / SIDE * step, ld,
				  dst + square_at(block, j, n + i), block, stream);
}

/* Columns from..to of a panel of rows; both multiples of 16. */
static void clear_columns(int64_t block, uint16_t *panel, int64_t from, int64_t to)
{
	for (int64_t k = from; k < to; k += SIDE)
		for (int n = 0; n < MOE_PACK_N; n++)
			memset(panel + square_at(block, n, k), 0, SIDE * sizeof *panel);
}

/*
 * One panel of W after the other: it is read in order, and each square of 16 goes to another panel
 * of W^T, by whole cache lines where blocks have 8 columns.
 */
static inline void transpose_weight(int64_t block, const struct moe_weight *W, uint16_t *to)
{
	int64_t kp = moe_round_up(W->k, MOE_PACK_K), np = moe_round_up(W->n, MOE_PACK_K);
	int64_t rows = moe_round_up(W->n, MOE_PACK_N), cols = moe_round_up(W->k, MOE_PACK_N);
	int64_t stride = moe_packed_stride(np), step = block == SIDE ? SIDE * MOE_PACK_N : SIDE;
	const uint16_t *panel = W->data;

	for (int64_t n = 0; n < rows; n += MOE_PACK_N, panel += moe_packed_stride(kp))
		for (int64_t k = 0; k < cols; k += MOE_PACK_N)
			transpose16(panel + square_at(block, 0, k), block, step,
				    to + k / MOE_PACK_N * stride, block, n, block == SIDE);
	for (int64_t k = 0; k < cols && rows < np; k += MOE_PACK_N)
		clear_columns(block, to + k / MOE_PACK_N * stride, rows, np);
#ifdef __SSE2__
	_mm_sfence();
#endif
}

void moe_packed_weight_transpose(const struct moe_tiles *t, const struct moe_weight *W, void *dst)
{
	MOE_ASSERT(W->layout == t->layout);
	if (block_k(t) == SIDE)
		transpose_weight(SIDE, W, dst);
	else
		transpose_weight(32, W, dst);
}

void moe_packed_lora_pack_t(const struct moe_tiles *t, moe_pack_rows *pack, enum moe_lora_side side,
			    const float *src, int64_t n, int64_t k, int64_t n0, int64_t n1,
			    float scale, void *dst)
{
	int64_t block = block_k(t), end = MOE_MIN(n1, n), cols = moe_round_up(k, MOE_PACK_N);
	int64_t width = moe_round_up(n, side == MOE_LORA_B ? MOE_PACK_K : t->lora_pad);
	int64_t stride = moe_packed_stride(width), step = block == SIDE ? SIDE * MOE_PACK_N : SIDE;

	MOE_ASSERT(n0 % MOE_PACK_N == 0);
	for (int64_t first = n0; first < end; first += MOE_PACK_N)
		for (int64_t k0 = 0; k0 < cols; k0 += STRIP) {
			uint16_t strip[MOE_PACK_N * STRIP]; /* packed as they stand */

			pack(block, (int)MOE_MIN(MOE_PACK_N, n - first), MOE_MIN(STRIP, k - k0),
			     STRIP, src + first * k + k0, k, scale, strip);
			for (int64_t j = 0; j < MOE_MIN(STRIP, cols - k0); j += MOE_PACK_N)
				transpose16(strip + square_at(block, 0, j), block, step,
					    (uint16_t *)dst + (k0 + j) / MOE_PACK_N * stride, block,
					    first, false);
		}
}
