/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = x W^T on blocks of 16 n x 8 k. A vector of weights holds 4 (AVX2: 2) rows n x 8 k: its even
 * and its odd elements, widened, are lanes of n x 4 k. The activation operand is a broadcast of the
 * 4 even or 4 odd k, so a forward panel's tile is [k/8][row][4 even, 4 odd]. Each n has 4 partial
 * sums, added up once at the end.
 *
 * With 16 registers an AVX2 tile covers part of the 16 n only and goes over the panel in passes;
 * k is then cut so that what the passes read again stays in L1.
 */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_FWD_H
#define MOE_CODELETS_KERNELS_FMA_FMA_FWD_H

#include "codelets/kernels/fma/fma_rows.h"

#define FWD_ROWS 6
#define FWD_BLOCK 128		 /* elements of 16 n x 8 k */
#define FWD_VECS (4 * VEC_PANEL) /* accumulators of one row: 16 n x 4 partial sums */
#define FWD_AHEAD (VEC_PANEL > 1 ? 16384 : 8192)
#define FWD_K (VEC_PANEL > 1 ? 512 : 1 << 30) /* k of one run where there are passes */

/*
 * `lines` cache lines at `ahead` are prefetched into L2 per block, and where there are passes one
 * of the x that is read next: with a long k or many rows x comes from L3 for every panel.
 */
struct fwd_run {
	const float *x;
	const uint16_t *w;
	int blocks, lines;
	const char *ahead;
	const float *x_ahead; /* NULL: nothing */
	bool first;	      /* accumulators start from zero */
};

typedef void fwd_kernel(const struct fwd_run *run, float *acc);

/* The even or the odd k of a block. Weights are held as registers allow, and activations are
 * broadcast again for the next group. */
VEC_INLINE void fwd_half(const int rows, const int vecs, const int odd, const float *x,
			 const uint16_t *w, vec c[FWD_ROWS][FWD_VECS])
{
	const int held = rows <= 2 ? 1 : VEC_HELD;
	vec b[VEC_HELD], a;

#pragma GCC unroll 8
	for (int j = 0; j < vecs; j += held) {
#pragma GCC unroll 4
		for (int l = 0; l < held; l++, w += 2 * VEC_LANES)
			b[l] = odd ? vec_odd(w) : vec_even(w);
#pragma GCC unroll 6
		for (int i = 0; i < rows; i++) {
			a = vec_broadcast4(x + 8 * i + 4 * odd);
#pragma GCC unroll 4
			for (int l = 0; l < held; l++)
				VEC_FMA(c[i][j + l], b[l], a);
		}
		if (held > 1)
			VEC_RELOAD();
	}
}

/* acc: [rows][FWD_VECS] vectors, this pass's first */
VEC_INLINE void fwd_body(const int rows, const int vecs, const struct fwd_run *run, float *acc)
{
	vec c[FWD_ROWS][FWD_VECS];
	const float *x = run->x;
	const uint16_t *w = run->w;
	const char *ahead = run->ahead;
	const float *x_ahead = run->x_ahead;
	int lines = run->lines;

#pragma GCC unroll 6
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
		for (int j = 0; j < vecs; j++)
			c[i][j] = vec_zero();
	if (!run->first)
#pragma GCC unroll 6
		for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
			for (int j = 0; j < vecs; j++)
				c[i][j] = vec_load(acc + (i * FWD_VECS + j) * VEC_LANES);
	for (int k = run->blocks; k > 0; k--) {
		for (int l = 0; l < lines; l++, ahead += 64)
			vec_prefetch_l2(ahead);
		if (VEC_PANEL > 1 && x_ahead) {
			vec_prefetch_l2((const char *)x_ahead);
			x_ahead += 8 * rows;
		}
		fwd_half(rows, vecs, 0, x, w, c);
		VEC_RELOAD();
		fwd_half(rows, vecs, 1, x, w, c);
		x += 8 * rows;
		w += FWD_BLOCK;
	}
#pragma GCC unroll 6
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
		for (int j = 0; j < vecs; j++)
			vec_store(acc + (i * FWD_VECS + j) * VEC_LANES, c[i][j]);
}

#define FWD_KERNEL(rows, vecs)                                                                     \
	static __attribute__((noinline)) void fwd_##rows(const struct fwd_run *run, float *acc)    \
	{                                                                                          \
		fwd_body(rows, vecs, run, acc);                                                    \
	}

/* Vectors of one pass: as many as the accumulators allow, so that weights are widened rarely. */
#if VEC_LANES == 16
#define FWD_PASS(rows) 4
FWD_KERNEL(1, 4)
FWD_KERNEL(2, 4)
FWD_KERNEL(3, 4)
FWD_KERNEL(4, 4)
FWD_KERNEL(5, 4)
FWD_KERNEL(6, 4)
#else
#define FWD_PASS(rows) ((rows) == 1 ? 8 : (rows) == 2 ? 4 : 2)
FWD_KERNEL(1, 8)
FWD_KERNEL(2, 4)
FWD_KERNEL(3, 2)
FWD_KERNEL(4, 2)
FWD_KERNEL(5, 2)
FWD_KERNEL(6, 2)
#endif

static fwd_kernel *const fwd_kernels[FWD_ROWS + 1] = { NULL,  fwd_1, fwd_2, fwd_3,
						       fwd_4, fwd_5, fwd_6 };

/* All of one segment for one tile; `lines` of each block's 4 are prefetched, by all passes
 * together. */
static void fwd_segment(const struct fma_tile *t, const struct moe_fwd_seg *seg, bool first,
			const char *ahead, int lines, float *acc)
{
	const float *x = (const float *)seg->x + t->row * seg->width + (int64_t)seg->col * t->rows;
	int vecs = FWD_PASS(t->rows), passes = FWD_VECS / vecs;

	for (int k = 0; k < seg->k; k += FWD_K) {
		int width = MOE_MIN(FWD_K, seg->k - k);
		struct fwd_run run = { x + (int64_t)k * t->rows,
				       seg->w + (int64_t)16 * k,
				       width / 8,
				       0,
				       ahead,
				       NULL,
				       first };

		for (int p = 0; p < passes; p++) {
			run.lines = (p + 1) * lines / passes - p * lines / passes;
			/* a block of x has rows / 2 lines: one a pass */
			if (VEC_PANEL > 1)
				run.x_ahead =
					2 * p < t->rows ? run.x + FWD_K * t->rows + 16 * p : NULL;
			fwd_kernels[t->rows](&run, acc + p * vecs * VEC_LANES);
			run.w += 2 * VEC_LANES * vecs;
			run.ahead += (int64_t)run.lines * 64 * run.blocks;
		}
		ahead = run.ahead;
		first = false;
	}
}

/*
 * A single tile prefetches its own weights: 8 KB ahead, or the next run where there are passes. Of
 * more tiles the first two prefetch half of what comes next each, into L2: the panel at hand was
 * fetched in the same way.
 */
static void fma_fwd(int m, const struct moe_fwd_seg *seg, int nseg, const uint16_t *next, float *y,
		    int64_t ldy, enum moe_out out)
{
	float acc[FWD_ROWS * FWD_VECS * VEC_LANES] __attribute__((aligned(64)));

	out = fma_out(out, y, ldy);
	FMA_EACH_TILE(t, m, FWD_ROWS)
	{
		const char *ahead = (const char *)seg->w + FWD_AHEAD;
		int lines = 4;
		bool first = true;

		if (t.count > 1) {
			ahead = (const char *)next + (int64_t)t.index * 16 * seg->k;
			lines = next && t.index < 2 ? 2 : 0;
		}
		for (int s = 0; s < nseg; s++) {
			if (!seg[s].k)
				continue;
			fwd_segment(&t, seg + s, first, ahead, s ? 0 : lines, acc);
			first = false;
		}
		if (first)
			memset(acc, 0, sizeof acc);
		for (int i = 0; i < t.rows; i++) {
			vec v[FWD_VECS], sum[VEC_PANEL];

			for (int j = 0; j < FWD_VECS; j++)
				v[j] = vec_load(acc + (i * FWD_VECS + j) * VEC_LANES);
			vec_fold16(v, sum);
			for (int j = 0; j < VEC_PANEL; j++)
				fma_put(y + (t.row + i) * ldy + j * VEC_LANES, sum[j], out);
		}
	}
}

#endif
