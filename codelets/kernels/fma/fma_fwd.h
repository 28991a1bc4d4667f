/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = x W^T on blocks of 16 n x 8 k (AVX2: 16 k); the halves of a vector of weights, its even and its odd
 * elements, are widened by one instruction each.
 *
 * AVX-512 (BLOCKS8): a vector holds 4 rows n, its halves are lanes of n x 4 k. The activation
 * operand is a broadcast of the 4 even or 4 odd k, so a forward panel's tile is [k/8][row][4 even,
 * 4 odd]. Each n has 4 partial sums, added up once at the end.
 *
 * AVX2 (PAIRS16): a vector holds two rows n side by side, its halves are 8 k of one n each. The
 * activation operand is 8 k as they are; tiles are [k/8][row][8]. Each n has 8 partial sums. With
 * 16 registers a tile covers part of the 16 n only and goes over the panel in passes; k is then cut
 * so that what the passes read again stays in L1.
 */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_FWD_H
#define MOE_CODELETS_KERNELS_FMA_FMA_FWD_H

#include "codelets/kernels/fma/fma_rows.h"

#define FWD_ROWS 6
#define FWD_BLOCK (VEC_LANES == 16 ? 128 : 256) /* elements */
#define FWD_VECS (VEC_LANES == 16 ? 4 : 16) /* accumulators of one row: 16 n x 4 or 8 partial sums */
#define FWD_AHEAD 8192		 /* bytes */
/* Blocks from a pass's line to its prefetch into L1, where it has one of a block's 8 only (Zen 4: 1 %) */
#define FWD_PASS_AHEAD(vecs) ((vecs) == 2 ? 4 : 0)
/* k of one run where there are passes */
#define FWD_K(rows) (VEC_PANEL == 1 ? 1 << 30 : (rows) == 1 ? 256 : (rows) <= 3 ? 512 : 1024)
#define FWD_HALVES (VEC_PANEL > 1 ? 2 : 1) /* a block is 8 k, or two halves of 8 k */
#define FWD_FAR (1 << 19)		    /* bytes of x beyond which it is prefetched */

/*
 * `lines` cache lines at `ahead` are prefetched into L2 per block, and where there are
 * passes one of the x that is read next, if all of x is too large for L2: then it comes from far
 * for every panel.
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

#if VEC_LANES == 16
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

VEC_INLINE void fwd_block(const int rows, const int vecs, const float *x, const uint16_t *w,
			  vec c[FWD_ROWS][FWD_VECS])
{
	fwd_half(rows, vecs, 0, x, w, c);
	VEC_RELOAD();
	fwd_half(rows, vecs, 1, x, w, c);
}
#else
VEC_INLINE void fwd_block(const int rows, const int vecs, const float *x, const uint16_t *w,
			  vec c[FWD_ROWS][FWD_VECS])
{
#pragma GCC unroll 8
	for (int j = 0; j < vecs; j += 2, w += 4 * VEC_LANES) {
		vec b[2] = { vec_even(w), vec_odd(w) };

#pragma GCC unroll 6
		for (int i = 0; i < rows; i++) {
			if (rows > 2) {
				VEC_FMA2("vmovups", *(const vec *)(const void *)(x + 8 * i), b, c[i] + j);
				continue;
			}
			VEC_FMA(c[i][j], b[0], vec_load(x + 8 * i));
			VEC_FMA(c[i][j + 1], b[1], vec_load(x + 8 * i));
		}
		if (rows > 1)
			VEC_RELOAD();
	}
}
#endif

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
			x_ahead += 8 * FWD_HALVES * rows;
		}
#pragma GCC unroll 2
		for (int half = 0; half < FWD_HALVES; half++) {
			fwd_block(rows, vecs, x, w + 2 * VEC_LANES * half, c);
			x += 8 * rows;
			if (FWD_HALVES > 1)
				VEC_RELOAD();
		}
		if (FWD_PASS_AHEAD(vecs))
			vec_prefetch_l1(w + FWD_PASS_AHEAD(vecs) * FWD_BLOCK);
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

/*
 * Accumulators of a row in one pass, as many as registers allow, so that weights are widened and
 * activations loaded rarely; FWD_PASSES: the logarithm of how many passes a panel takes.
 */
#if VEC_LANES == 16
#define FWD_PASSES(rows) 0
FWD_KERNEL(1, 4)
FWD_KERNEL(2, 4)
FWD_KERNEL(3, 4)
FWD_KERNEL(4, 4)
FWD_KERNEL(5, 4)
FWD_KERNEL(6, 4)
#else
#define FWD_PASSES(rows) ((rows) == 1 ? 1 : (rows) <= 3 ? 2 : 3)
FWD_KERNEL(1, 8)
FWD_KERNEL(2, 4)
FWD_KERNEL(3, 4)
FWD_KERNEL(4, 2)
FWD_KERNEL(5, 2)
FWD_KERNEL(6, 2)
#endif

static fwd_kernel *const fwd_kernels[FWD_ROWS + 1] = { NULL,  fwd_1, fwd_2, fwd_3,
						       fwd_4, fwd_5, fwd_6 };

/*
 * All of one segment for one tile; `lines` of 4 per 8 k are prefetched, by all passes together.
 * There is no division between kernels: it would delay the next one's first loads.
 */
static void fwd_segment(const struct fma_tile *t, const struct moe_fwd_seg *seg, bool first,
			const char *ahead, int lines, bool far, float *acc)
{
	const float *x = (const float *)seg->x + t->row * seg->width + (int64_t)seg->col * t->rows;
	const int log = FWD_PASSES(t->rows), vecs = FWD_VECS >> log, most = FWD_K(t->rows);

	lines *= FWD_HALVES;
	for (int k = 0; k < seg->k; k += most) {
		int width = MOE_MIN(most, seg->k - k);
		struct fwd_run run = { x + (int64_t)k * t->rows,
				       seg->w + (int64_t)16 * k,
				       width / (8 * FWD_HALVES),
				       0,
				       ahead,
				       NULL,
				       first };

		for (int p = 0; p < 1 << log; p++) {
			run.lines = ((p + 1) * lines >> log) - (p * lines >> log);
			/* a block of x has as many lines as rows: one a pass */
			if (far && p < t->rows)
				run.x_ahead = run.x + most * t->rows + 16 * p;
			else
				run.x_ahead = NULL;
			fwd_kernels[t->rows](&run, acc + p * vecs * VEC_LANES);
			run.w += FWD_BLOCK / FWD_VECS * vecs;
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
	bool far = VEC_PANEL > 1 && m * seg->width * (int64_t)sizeof(float) > FWD_FAR;

	out = fma_out(out, y, ldy);
	FMA_EACH_TILE(t, m, FWD_ROWS)
	{
		const char *ahead = (const char *)seg->w +
				    (VEC_PANEL == 1 ? FWD_AHEAD : 32 * FWD_K(t.rows));
		int lines = 4;
		bool first = true;

		if (t.count > 1) {
			ahead = (const char *)next + (int64_t)t.index * 16 * seg->k;
			lines = next && t.index < 2 ? 2 : 0;
		}
		for (int s = 0; s < nseg; s++) {
			if (!seg[s].k)
				continue;
			fwd_segment(&t, seg + s, first, ahead, s ? 0 : lines, far, acc);
			first = false;
		}
		if (first)
			memset(acc, 0, sizeof acc);
		for (int i = 0; i < t.rows; i++) {
			vec sum[VEC_PANEL];

			vec_fold16(acc + i * FWD_VECS * VEC_LANES, sum);
			for (int j = 0; j < VEC_PANEL; j++)
				fma_put(y + (t.row + i) * ldy + j * VEC_LANES, sum[j], out);
		}
	}
}

#endif
