/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The three GEMMs. Forward and backward widen a run of DEPTH weights times 16 columns to f32 on
 * the stack and pass all rows over it, so that a weight is widened once per call; y holds the sums
 * between runs.
 */
#include "codelets/kernels/c/c.h"

#define LANES 16
#define BLOCK_K 8
#define DEPTH 128 /* 8 KB of f32: leaves most of L1 to the rows */

/*
 * Sums in vectors, which compilers have for every target: of nested loops over arrays GCC makes products along the depth
 * and shuffles, four times as long. The order of the additions is that of the loops.
 */
typedef float quad __attribute__((vector_size(16)));
#define QUADS (LANES / 4)

/* y[16] (+)= x[depth] w[depth, 16] */
static inline void row(int depth, const float *restrict x, const float (*restrict w)[LANES],
		       float *restrict y, bool add)
{
	quad sum[QUADS] = { 0 }, v[QUADS];

	for (int d = 0; d < depth; d++) {
		memcpy(v, w[d], sizeof v);
		for (int q = 0; q < QUADS; q++)
			sum[q] += x[d] * v[q];
	}
	if (add) {
		memcpy(v, y, sizeof v);
		for (int q = 0; q < QUADS; q++)
			sum[q] += v[q];
	}
	memcpy(y, sum, sizeof sum);
}

static void clear(int m, float *y, int64_t ldy)
{
	for (int i = 0; i < m; i++)
		memset(y + i * ldy, 0, LANES * sizeof *y);
}

/* dst [depth of k][16 n] from blocks [k/8][16 n][8 k] */
static void widen_fwd(int depth, const uint16_t *restrict w, float (*restrict dst)[LANES])
{
	for (int k = 0; k < depth; k += BLOCK_K, w += LANES * BLOCK_K)
		for (int i = 0; i < BLOCK_K; i++)
			for (int j = 0; j < LANES; j++)
				dst[k + i][j] = moe_bf16_to_f32(w[j * BLOCK_K + i]);
}

void c_fwd(int m, const struct moe_fwd_seg *seg, int nseg, const uint16_t *next, float *y,
	   int64_t ldy, enum moe_out out)
{
	float w[DEPTH][LANES];
	bool add = out == MOE_OUT_ADD;

	(void)next;
	for (; nseg > 0; nseg--, seg++) {
		const float *x = (const float *)seg->x + seg->col;

		for (int k = 0; k < seg->k; k += DEPTH) {
			int depth = MOE_MIN(DEPTH, seg->k - k);

			widen_fwd(depth, seg->w + (int64_t)k * LANES, w);
			for (int i = 0; i < m; i++)
				row(depth, x + i * seg->width + k, w, y + i * ldy, add);
			add = true;
		}
	}
	if (!add)
		clear(m, y, ldy);
}

/* dst [depth of n][16 k] from depth/16 panels at one block pair of columns */
static void widen_bwd(int depth, const uint16_t *restrict w, int64_t stride,
		      float (*restrict dst)[LANES])
{
	for (int n = 0; n < depth; n += MOE_PACK_N, w += stride)
		for (int i = 0; i < MOE_PACK_N; i++)
			for (int j = 0; j < BLOCK_K; j++) {
				const uint16_t *at = w + i * BLOCK_K + j;

				dst[n + i][j] = moe_bf16_to_f32(at[0]);
				dst[n + i][BLOCK_K + j] = moe_bf16_to_f32(at[LANES * BLOCK_K]);
			}
}

void c_bwd(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y, int64_t ldy,
	   enum moe_out out, void *scratch)
{
	float w[DEPTH][LANES];

	(void)scratch;
	for (int c = 0; c < columns; c += LANES) {
		bool add = out == MOE_OUT_ADD;

		for (int s = 0; s < nseg; s++) {
			const float *g = (const float *)seg[s].g + seg[s].col;

			for (int n = 0; n < seg[s].n; n += DEPTH) {
				int depth = MOE_MIN(DEPTH, seg[s].n - n);

				widen_bwd(depth,
					  seg[s].w + n / MOE_PACK_N * seg[s].stride +
						  (int64_t)c * MOE_PACK_N,
					  seg[s].stride, w);
				for (int i = 0; i < m; i++)
					row(depth, g + i * seg[s].width + n, w, y + i * ldy + c,
					    add);
				add = true;
			}
		}
		if (!add)
			clear(m, y + c, ldy);
	}
}

/* c[na <= 2, nb <= 16]: columns of a and b that c lacks are computed and dropped. */
static void grad_tile(int m, const float *restrict a, int64_t lda, int na, const float *restrict b,
		      int64_t ldb, int nb, float scale, float *restrict c, int64_t ldc, bool add)
{
	quad sum[2][QUADS] = { { { 0 } } }, v[QUADS];
	float row[2][LANES];

	for (int i = 0; i < m; i++, a += lda, b += ldb) {
		memcpy(v, b, sizeof v);
		for (int q = 0; q < QUADS; q++) {
			sum[0][q] += a[0] * v[q];
			sum[1][q] += a[1] * v[q];
		}
	}
	memcpy(row, sum, sizeof row);
	for (int i = 0; i < na; i++, c += ldc)
		for (int j = 0; j < nb; j++)
			c[j] = (add ? c[j] : 0.0f) + scale * row[i][j];
}

void c_grad(int m, const void *a, int64_t lda, int na, const void *b, int64_t ldb, int nb,
	    float scale, float *c, int64_t ldc, enum moe_out out)
{
	const float *fa = a, *fb = b;

	for (int j = 0; j < nb; j += LANES)
		for (int i = 0; i < na; i += 2)
			grad_tile(m, fa + i, lda, MOE_MIN(2, na - i), fb + j, ldb,
				  MOE_MIN(LANES, nb - j), scale, c + i * ldc + j, ldc,
				  out == MOE_OUT_ADD);
}
