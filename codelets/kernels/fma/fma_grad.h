/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients c (+)= scale a^T b over plain rows of f32: a broadcast, columns of b in lanes. */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_GRAD_H
#define MOE_CODELETS_KERNELS_FMA_FMA_GRAD_H

#include "codelets/kernels/fma/fma_pack.h"

#define GRAD_ROWS (VEC_LANES == 16 ? 8 : 6) /* of c, i.e. columns of a */

static void fma_pairs(int m, const float *src, int64_t ld, const int32_t *token, const float *scale,
		      int cols, void *dst)
{
	float *to = dst;

	for (int i = 0; i < m; i++, to += cols) {
		const float *row = src + source_row(token, i) * ld;
		vec by = vec_set1(scale ? scale[i] : 1.0f);

		for (int j = 0; j < cols; j += VEC_LANES)
			vec_store(to + j, vec_mul(by, vec_load(row + j)));
	}
	if (m % 2)
		memset(to, 0, (size_t)cols * sizeof *to);
}

static void fma_pairs_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols,
			   void *dst)
{
	float *to = dst;

	for (int i = 0; i < m; i++, to += cols) {
		const uint16_t *row = src + source_row(token, i) * ld;

		for (int j = 0; j < cols; j++)
			to[j] = moe_bf16_to_f32(row[j]);
	}
	if (m % 2)
		memset(to, 0, (size_t)cols * sizeof *to);
}

struct grad_tile {
	int m;
	const float *a, *b;
	int64_t lda, ldb;
	float scale;
	float *c;
	int64_t ldc;
	int rows, columns; /* inside c */
	enum moe_out out;
};

/* One row of a finished tile. The array c is filled in by constant indices only. */
VEC_INLINE void grad_put(const int vecs, const struct grad_tile *t, float *c, const vec *sum)
{
	vec scale = vec_set1(t->scale);

#pragma GCC unroll 2
	for (int j = 0; j < vecs; j++) {
		vec v = vec_mul(scale, sum[j]);
		int left = t->columns - j * VEC_LANES;

		if (left >= VEC_LANES) {
			fma_put(c + j * VEC_LANES, v, t->out);
		} else if (left > 0) {
			if (t->out == MOE_OUT_ADD)
				v = vec_add(vec_load_part(c + j * VEC_LANES, left), v);
			vec_store_part(c + j * VEC_LANES, left, v);
		}
	}
}

/* Reads `rows` columns of a even where c has fewer rows: they are there up to a multiple of 16. */
VEC_INLINE void grad_body(const int rows, const int vecs, const struct grad_tile *t)
{
	vec c[GRAD_ROWS][2], b[2], one;
	const float *pa = t->a, *pb = t->b;

#pragma GCC unroll 8
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
		for (int j = 0; j < vecs; j++)
			c[i][j] = vec_zero();
	for (int k = t->m; k > 0; k--) {
#pragma GCC unroll 2
		for (int j = 0; j < vecs; j++)
			b[j] = vec_load(pb + j * VEC_LANES);
#pragma GCC unroll 8
		for (int i = 0; i < rows; i++) {
			if (VEC_LANES == 8 && vecs == 2) {
				VEC_FMA2("vbroadcastss", pa[i], b, c[i]);
				continue;
			}
			one = vec_set1(pa[i]);
#pragma GCC unroll 2
			for (int j = 0; j < vecs; j++)
				VEC_FMA(c[i][j], b[j], one);
		}
		pa += t->lda;
		pb += t->ldb;
	}
#pragma GCC unroll 8
	for (int i = 0; i < rows; i++)
		if (i < t->rows)
			grad_put(vecs, t, t->c + i * t->ldc, c[i]);
}

typedef void grad_kernel(const struct grad_tile *t);

#define GRAD_KERNEL(rows)                                                                          \
	static __attribute__((noinline)) void grad_##rows##_1(const struct grad_tile *t)           \
	{                                                                                          \
		grad_body(rows, 1, t);                                                             \
	}                                                                                          \
	static __attribute__((noinline)) void grad_##rows##_2(const struct grad_tile *t)           \
	{                                                                                          \
		grad_body(rows, 2, t);                                                             \
	}

/* grad_kernels[rows / 2 - 1][vecs - 1] */
GRAD_KERNEL(2)
GRAD_KERNEL(4)
GRAD_KERNEL(6)
#if VEC_LANES == 16
GRAD_KERNEL(8)
#endif
static grad_kernel *const grad_kernels[GRAD_ROWS / 2][2] = {
	{ grad_2_1, grad_2_2 },
	{ grad_4_1, grad_4_2 },
	{ grad_6_1, grad_6_2 },
#if VEC_LANES == 16
	{ grad_8_1, grad_8_2 },
#endif
};

static void fma_grad(int m, const void *a, int64_t lda, int na, const void *b, int64_t ldb, int nb,
		     float scale, float *c, int64_t ldc, enum moe_out out)
{
	struct grad_tile t = { .m = m, .lda = lda, .ldb = ldb, .scale = scale, .ldc = ldc };

	t.out = fma_out(out, c, ldc);
	for (int j = 0; j < nb; j += 2 * VEC_LANES)
		for (int i = 0; i < na; i += GRAD_ROWS) {
			int rows = MOE_MIN(GRAD_ROWS, (na - i + 1) / 2 * 2);

			t.a = (const float *)a + i;
			t.b = (const float *)b + j;
			t.c = c + i * ldc + j;
			t.rows = na - i;
			t.columns = nb - j;
			grad_kernels[rows / 2 - 1][t.columns > VEC_LANES](&t);
		}
}

#endif
