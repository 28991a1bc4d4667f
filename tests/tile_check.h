/* SPDX-License-Identifier: Apache-2.0 */
/* For the suites of struct moe_tiles: every supported table that has them, and packed weights. */
#ifndef MOE_TESTS_TILE_CHECK_H
#define MOE_TESTS_TILE_CHECK_H

#include "codelets/kernels/packed/layout.h"
#include "tests/kernel_check.h"

static const struct moe_tiles *T; /* tiles under test */

static double gemm_tolerance = F32_TOLERANCE; /* operands of references are rounded as the tiles do */
static void (*tile_cases)(void);

static inline void run_tile_cases(void)
{
	T = K->tiles;
	if (T)
		tile_cases();
}

static inline void each_tiles(void (*run)(void))
{
	tile_cases = run;
	check_tables(run_tile_cases);
}

/* Columns of fwd come in multiples of this. */
static inline int unit(void)
{
	return T->layout == MOE_LAYOUT_BLOCKS32 ? 32 : 16;
}

static inline double as_bf16(float v)
{
	return (double)moe_bf16_to_f32(moe_f32_to_bf16(v));
}

/* What an element of a panel or of a pair array holds of v. */
static inline double operand(float v, int bytes)
{
	return bytes == 2 ? as_bf16(v) : (double)v;
}

/* A packed [n, k] weight, n and k in whole panels and blocks, and its values. */
struct packed {
	uint16_t *data;
	double *w; /* [n, k] */
	int64_t n, k, stride;
};

static inline size_t packed_at(const struct packed *p, int64_t row, int64_t col)
{
	int64_t block = T->layout == MOE_LAYOUT_BLOCKS32 ? 32 : T->layout == MOE_LAYOUT_PAIRS16 ? 16 : 8, in = row % MOE_PACK_N;
	int64_t at = row / MOE_PACK_N * p->stride + col / block * MOE_PACK_N * block;

	if (T->layout == MOE_LAYOUT_PAIRS16)
		return (size_t)(at + in / 2 * 32 + col % 16 * 2 + in % 2);
	return (size_t)(at + in * block + col % block);
}

/* The gap between panels is NaN: not to be multiplied by. */
static inline struct packed random_packed(int64_t n, int64_t k)
{
	struct packed p = { .n = n, .k = k, .stride = moe_packed_stride(k) };

	p.data = mem((size_t)(n / MOE_PACK_N * p.stride) * sizeof *p.data);
	p.w = doubles(n * k);
	for (int64_t i = 0; i < n; i++)
		for (int64_t j = 0; j < k; j++) {
			uint16_t v = moe_f32_to_bf16((float)uniform());

			p.data[packed_at(&p, i, j)] = v;
			p.w[i * k + j] = (double)moe_bf16_to_f32(v);
		}
	return p;
}

/* Every row count up to 70, which covers all tile shapes, and some beyond. */
static const int larger_m[] = { 71, 97, 128, 169, 255, 256 };

static inline int m_count(void)
{
	return 70 + (int)MOE_COUNT(larger_m);
}

static inline int m_at(int i)
{
	return i < 70 ? i + 1 : larger_m[i - 70];
}

/* Rows in some order, some of them twice. */
static inline int32_t *random_tokens(int m, int rows)
{
	int32_t *token = mem((size_t)m * sizeof *token);

	for (int i = 0; i < m; i++)
		token[i] = (int32_t)((uniform() + 1) / 2 * rows);
	return token;
}

#endif
