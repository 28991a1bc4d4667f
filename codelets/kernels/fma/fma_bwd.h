/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dx = dy W from the same panels, by the classic kernel: 8 neighbouring columns of a row of a block
 * are lanes, dy is broadcast. AVX-512 (BLOCKS8) widens two such runs to f32 by zero extension and a
 * shift. (A byte shuffle would be one instruction less, but takes the ports of the multiply-adds: 80
 * instead of 95 GFLOP/s on Zen 4.) AVX2 (PAIRS16) widens a run by a shift or a mask alone. A backward
 * panel's tile is [n][row]. Every sum runs over n in order.
 *
 * Few rows walk the panels in memory order, MOE_CHUNK columns of one after the other, with sums in
 * scratch; more rows keep the sums of a slice of 32 columns in registers over all of n. There
 * AVX-512's first tile leaves the widened slice in scratch for the others (BWD_WIDE): widening
 * costs it 10 %. AVX2 widens for next to nothing.
 */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_BWD_H
#define MOE_CODELETS_KERNELS_FMA_FMA_BWD_H

#include "codelets/kernels/fma/fma_rows.h"

#define BWD_ROWS (VEC_LANES == 16 ? 12 : 6)
/* Up to this many rows walk the weights in memory order. */
#define BWD_FEW (VEC_LANES == 16 ? 6 : 3)
#define BWD_SLICE 32 /* columns of a call for more rows */
#define BWD_BLOCK 128 /* elements of 16 n x 8 k */
#define BWD_PAIR (VEC_LANES == 16 ? 16 : 32) /* elements of a block's two n */
#define BWD_G_AHEAD 512 /* elements of dy: with 512 rows its panel comes from L3 */
#define BWD_WIDE (VEC_LANES == 16)
/*
 * A longer reduction is cut into parts, so that a part of the slice, its dy and what is prefetched
 * fit into L2 together. Sums wait in scratch, which changes no bit of them.
 */
#define BWD_PART 2176 /* longest part where there are several */
#define BWD_LONG 2304 /* longest reduction that is not cut: a part and LoRA's rows */

/*
 * Per two n, `lines` cache lines at `ahead` are prefetched into L2. `near`: the next panel is
 * prefetched from there into L1 (from memory that would run at half the rate).
 */
struct bwd_run {
	const float *g;
	const uint16_t *w;
	int64_t stride; /* elements between panels */
	int panels, lines;
	const char *ahead;
	bool near;
	bool first; /* sums start from zero */
	float *c;
	int64_t ldc;
	float *wide; /* [n][32] weights as f32: written, or read; NULL: neither */
};

typedef void bwd_kernel(const struct bwd_run *run);

/* The weights of one n of a pair, the first of whose rows in the first of the blocks is at w. */
VEC_INLINE vec bwd_weights(const int read, const bool tight, const uint16_t *w, const int odd,
			   const float *wide, int j)
{
	if (read)
		return vec_load(wide + j * VEC_LANES);
#if VEC_LANES == 16
	(void)tight;
	return vec_widen(w + 2 * BWD_BLOCK * j + 8 * odd, BWD_BLOCK);
#else
	w += BWD_BLOCK * (j / 2 * 2) + 16 * (j % 2);
	return !odd ? vec_even(w) : tight ? vec_odd_tight(w) : vec_odd(w);
#endif
}

VEC_INLINE void bwd_step(const int rows, const int vecs, const int read, const float *g,
			 const uint16_t *w, const int odd, float *wide, vec c[12][8])
{
	const int held = rows <= 2 ? 1 : MOE_MIN(vecs, VEC_HELD);
	vec b[VEC_HELD], a;

#pragma GCC unroll 8
	for (int j = 0; j < vecs; j += held) {
#pragma GCC unroll 4
		for (int l = 0; l < held; l++)
			b[l] = bwd_weights(read, rows > 2 && vecs > held, w, odd, wide, j + l);
		if (BWD_WIDE && !read && wide)
#pragma GCC unroll 4
			for (int l = 0; l < held; l++)
				vec_store(wide + (j + l) * VEC_LANES, b[l]);
#pragma GCC unroll 12
		for (int i = 0; i < rows; i++) {
			if (VEC_LANES == 8 && held == 2) {
				VEC_FMA2("vbroadcastss", g[i], b, c[i] + j);
				continue;
			}
			a = vec_set1(g[i]);
#pragma GCC unroll 4
			for (int l = 0; l < held; l++)
				VEC_FMA(c[i][j + l], b[l], a);
		}
		if (vecs > held)
			VEC_RELOAD();
	}
}

/*
 * The same for two vectors b that the step before has widened; this one widens those of the next n
 * (at `then`), which would be late for its own multiply-adds.
 */
VEC_INLINE void bwd_step_early(const int rows, const float *g, const uint16_t *then, float *wide,
			       vec b[2], vec c[12][8])
{
	vec next[2] = { bwd_weights(0, false, then, 0, NULL, 0),
			bwd_weights(0, false, then, 0, NULL, 1) }, a;

	VEC_RELOAD();
	if (wide) {
		vec_store(wide, b[0]);
		vec_store(wide + VEC_LANES, b[1]);
	}
#pragma GCC unroll 12
	for (int i = 0; i < rows; i++) {
		a = vec_set1(g[i]);
		VEC_FMA(c[i][0], b[0], a);
		VEC_FMA(c[i][1], b[1], a);
	}
	b[0] = next[0];
	b[1] = next[1];
}

VEC_INLINE void bwd_body(const int rows, const int vecs, const int read, const struct bwd_run *run)
{
	const int early = BWD_WIDE && rows > 6 && vecs == 2 && !read;
	vec c[12][8], b[2];
	const float *g = run->g;
	const uint16_t *w = run->w;
	const char *ahead = run->ahead;
	float *wide = run->wide;
	int lines = run->lines;
	const int each = vecs / VEC_PANEL; /* lines of a panel per two n */

#pragma GCC unroll 12
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
		for (int j = 0; j < vecs; j++)
			c[i][j] = vec_zero();
	if (!run->first)
#pragma GCC unroll 12
		for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
			for (int j = 0; j < vecs; j++)
				c[i][j] = vec_load(run->c + i * run->ldc + j * VEC_LANES);
	if (early && run->panels) {
		b[0] = bwd_weights(0, false, w, 0, NULL, 0);
		b[1] = bwd_weights(0, false, w, 0, NULL, 1);
	}
	for (int p = run->panels; p > 0; p--) {
		const uint16_t *pair = w, *after = p > 1 ? w + run->stride : w;
		const char *line = ahead;
		const char *near = run->near ? (const char *)(w + run->stride) : NULL;

		for (int n = 0; n < 16; n += 2) {
			for (int l = 0; l < lines; l++)
				vec_prefetch_l2(line + 64 * l);
			line += 64 * lines;
			if (near) {
#pragma GCC unroll 4
				for (int l = 0; l < each; l++)
					vec_prefetch_l1(near + 64 * l);
				near += 64 * each;
			}
			if (early)
				bwd_step_early(rows, g, pair + 8, wide, b, c);
			else
				bwd_step(rows, vecs, read, g, pair, 0, wide, c);
			if (VEC_LANES == 8)
				VEC_RELOAD();
			if (BWD_WIDE && wide)
				wide += BWD_SLICE;
			if (early)
				bwd_step_early(rows, g + rows, n < 14 ? pair + BWD_PAIR : after,
					       wide, b, c);
			else
				bwd_step(rows, vecs, read, g + rows, pair, 1, wide, c);
			if (BWD_WIDE && wide)
				wide += BWD_SLICE;
			vec_prefetch_l1(g + BWD_G_AHEAD);
			g += 2 * rows;
			pair += BWD_PAIR;
		}
		w += run->stride;
		ahead += run->stride * (int64_t)sizeof *w;
	}
#pragma GCC unroll 12
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
		for (int j = 0; j < vecs; j++)
			vec_store(run->c + i * run->ldc + j * VEC_LANES, c[i][j]);
}

#define BWD_KERNEL(rows, vecs)                                                                     \
	static __attribute__((noinline)) void bwd_##rows##_##vecs(const struct bwd_run *run)       \
	{                                                                                          \
		bwd_body(rows, vecs, 0, run);                                                      \
	}
#define BWD_READER(rows)                                                                           \
	static __attribute__((noinline)) void bwd_##rows##_read(const struct bwd_run *run)         \
	{                                                                                          \
		bwd_body(rows, 2, 1, run);                                                         \
	}

/* bwd_kernels[rows][v] takes 16 << v columns; NULL: too many accumulators. */
#if VEC_LANES == 16
#define BWD_KERNELS(rows)                                                                          \
	BWD_KERNEL(rows, 1)                                                                        \
	BWD_KERNEL(rows, 2)                                                                        \
	BWD_KERNEL(rows, 4)
BWD_KERNELS(1)
BWD_KERNELS(2)
BWD_KERNELS(3)
BWD_KERNELS(4)
BWD_KERNELS(5)
BWD_KERNELS(6)
BWD_READER(6)
BWD_KERNEL(7, 1)
BWD_KERNEL(7, 2)
BWD_READER(7)
BWD_KERNEL(8, 1)
BWD_KERNEL(8, 2)
BWD_READER(8)
BWD_KERNEL(9, 1)
BWD_KERNEL(9, 2)
BWD_READER(9)
BWD_KERNEL(10, 1)
BWD_KERNEL(10, 2)
BWD_READER(10)
BWD_KERNEL(11, 1)
BWD_KERNEL(11, 2)
BWD_READER(11)
BWD_KERNEL(12, 1)
BWD_KERNEL(12, 2)
BWD_READER(12)
static bwd_kernel *const bwd_kernels[13][3] = {
	{ NULL },
	{ bwd_1_1, bwd_1_2, bwd_1_4 },
	{ bwd_2_1, bwd_2_2, bwd_2_4 },
	{ bwd_3_1, bwd_3_2, bwd_3_4 },
	{ bwd_4_1, bwd_4_2, bwd_4_4 },
	{ bwd_5_1, bwd_5_2, bwd_5_4 },
	{ bwd_6_1, bwd_6_2, bwd_6_4 },
	{ bwd_7_1, bwd_7_2 },
	{ bwd_8_1, bwd_8_2 },
	{ bwd_9_1, bwd_9_2 },
	{ bwd_10_1, bwd_10_2 },
	{ bwd_11_1, bwd_11_2 },
	{ bwd_12_1, bwd_12_2 },
};
static bwd_kernel *const bwd_readers[13] = {
	[6] = bwd_6_read,   [7] = bwd_7_read,	[8] = bwd_8_read,   [9] = bwd_9_read,
	[10] = bwd_10_read, [11] = bwd_11_read, [12] = bwd_12_read,
};
#else
BWD_KERNEL(1, 2)
BWD_KERNEL(1, 4)
BWD_KERNEL(1, 8)
BWD_KERNEL(2, 2)
BWD_KERNEL(2, 4)
BWD_KERNEL(3, 2)
BWD_KERNEL(3, 4)
BWD_KERNEL(4, 2)
BWD_KERNEL(5, 2)
BWD_KERNEL(6, 2)
static bwd_kernel *const bwd_kernels[7][3] = {
	{ NULL },
	{ bwd_1_2, bwd_1_4, bwd_1_8 },
	{ bwd_2_2, bwd_2_4 },
	{ bwd_3_2, bwd_3_4 },
	{ bwd_4_2 },
	{ bwd_5_2 },
	{ bwd_6_2 },
};
static bwd_kernel *const bwd_readers[7];
#endif

/* The widest kernel for columns col..columns; returns its columns. */
static int bwd_pick(int rows, int left, bwd_kernel **kernel)
{
	for (int v = 2; v > 0; v--)
		if (left >= 16 << v && bwd_kernels[rows][v]) {
			*kernel = bwd_kernels[rows][v];
			return 16 << v;
		}
	*kernel = bwd_kernels[rows][0];
	return 16;
}

static int fma_bwd_columns(int m)
{
	return m <= BWD_FEW ? MOE_CHUNK : BWD_SLICE;
}

/* Floats of the widened weights of a part, in front of the sums. */
static size_t bwd_wide(int m, int64_t n)
{
	return BWD_WIDE && m > BWD_ROWS ? (size_t)MOE_MIN(n, BWD_LONG) * BWD_SLICE : 0;
}

static size_t fma_bwd_scratch(int m, int64_t n, int columns)
{
	size_t sums = n > BWD_LONG ? (size_t)m * BWD_SLICE : 0;

	if (m <= BWD_FEW)
		return (size_t)m * (size_t)columns * sizeof(float);
	return (bwd_wide(m, n) + sums) * sizeof(float);
}

/* Sums into scratch [m, columns]. What is prefetched is the same columns some panels on: 8 KB of
 * weights away. */
static void bwd_few(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *sum)
{
	int away = MOE_MAX(1, 8192 / (16 * 2 * columns));
	bool first = true;

	for (int s = 0; s < nseg; s++, seg++)
		for (int n = 0; n < seg->n; n += 16) {
			struct bwd_run run = {
				.g = (const float *)seg->g + (int64_t)(seg->col + n) * m,
				.panels = 1,
				.first = first,
				.ldc = columns,
			};
			const uint16_t *w = seg->w + n / 16 * seg->stride;
			bwd_kernel *kernel;

			for (int col = 0, width; col < columns; col += width) {
				width = bwd_pick(m, columns - col, &kernel);
				run.w = w + 16 * col;
				run.ahead = (const char *)(run.w + away * seg->stride);
				run.lines = width / 16;
				run.c = sum + col;
				kernel(&run);
			}
			first = false;
		}
	if (first) /* no n at all */
		memset(sum, 0, (size_t)m * (size_t)columns * sizeof *sum);
}

/* What is summed at once: some n of all segments, or of one. */
struct bwd_part {
	struct moe_bwd_seg seg[MOE_MAX_SEGS]; /* w at the slice's first column */
	const uint16_t *next[MOE_MAX_SEGS];   /* read afterwards */
	int nseg;
	bool first, last;
};

/*
 * Sums of one tile's slice, at most BWD_SLICE columns. The first two of `calls` kernel calls
 * prefetch half of what is next each.
 */
static void bwd_slice(const struct fma_tile *t, const struct bwd_part *part, int columns,
		      float *wide, float *sum)
{
	bwd_kernel *kernel;
	int width = bwd_pick(t->rows, columns, &kernel), passes = columns / width;
	int calls = t->count * passes;

	for (int s = 0; s < part->nseg; s++)
		for (int p = 0; p < passes; p++) {
			const struct moe_bwd_seg *seg = part->seg + s;
			int call = t->index * passes + p;
			struct bwd_run run = {
				(const float *)seg->g + t->row * seg->width +
					(int64_t)seg->col * t->rows,
				seg->w + 16 * p * width,
				seg->stride,
				seg->n / 16,
				calls == 1 ? 2 : call < 2,
				(const char *)part->next[s] + call % 2 * 16 * columns,
				true,
				part->first && s == 0,
				sum + p * width,
				columns,
				wide,
			};

			if (wide && t->index)
				bwd_readers[t->rows](&run);
			else
				kernel(&run);
			if (wide)
				wide += seg->n * BWD_SLICE;
		}
}

/* All rows of one part; sums: [m, columns] where there are several parts. */
static void bwd_part_rows(int m, const struct bwd_part *part, int columns, float *y, int64_t ldy,
			  enum moe_out out, float *wide, float *sums)
{
	float local[12 * BWD_SLICE] __attribute__((aligned(64)));

	FMA_EACH_TILE(t, m, BWD_ROWS)
	{
		float *sum = part->first && part->last ? local : sums + (int64_t)t.row * columns;

		bwd_slice(&t, part, columns,
			  BWD_WIDE && t.count > 1 && columns == BWD_SLICE ? wide : NULL, sum);
		for (int i = 0; part->last && i < t.rows; i++)
			for (int j = 0; j < columns; j += VEC_LANES)
				fma_put(y + (t.row + i) * ldy + j, vec_load(sum + i * columns + j),
					out);
	}
}

/* Weights of a segment from a column on; the next ones' where the call ends before. */
static const uint16_t *bwd_at(const struct moe_bwd_seg *seg, int col, int columns)
{
	return col >= columns && seg->after ? seg->after : seg->w + 16 * col;
}

/* Columns col..col+width of `columns`, all segments in one part */
static void bwd_whole(int m, const struct moe_bwd_seg *seg, int nseg, int col, int width,
		      int columns, float *y, int64_t ldy, enum moe_out out, float *scratch)
{
	struct bwd_part part = { .nseg = nseg, .first = true, .last = true };

	for (int s = 0; s < nseg; s++) {
		part.seg[s] = seg[s];
		part.seg[s].w += 16 * col;
		part.next[s] = bwd_at(seg + s, col + width, columns);
	}
	bwd_part_rows(m, &part, width, y, ldy, out, scratch, NULL);
}

static int bwd_part_length(const struct moe_bwd_seg *seg)
{
	int parts = MOE_MAX(1, (seg->n + BWD_PART - 1) / BWD_PART);

	return (int)moe_round_up((seg->n + parts - 1) / parts, 16);
}

/* The same, a part of one segment after the other */
static void bwd_parts(int m, const struct moe_bwd_seg *seg, int nseg, int col, int width,
		      int columns, float *y, int64_t ldy, enum moe_out out, float *scratch)
{
	float *sums = scratch + bwd_wide(m, BWD_LONG);

	for (int s = 0; s < nseg; s++) {
		int length = bwd_part_length(seg + s), n = 0;

		do {
			int rest = seg[s].n - n;
			struct bwd_part part = { .seg = { seg[s] },
						 .nseg = 1,
						 .first = !s && !n,
						 .last = s + 1 == nseg && rest <= length };
			struct moe_bwd_seg *p = &part.seg[0];

			p->n = MOE_MIN(length, rest);
			p->col += n;
			p->w += 16 * col + n / 16 * p->stride;
			n += length;
			part.next[0] = n < seg[s].n   ? p->w + length / 16 * p->stride
				       : s + 1 < nseg ? seg[s + 1].w + 16 * col
						      : bwd_at(seg, col + width, columns);
			bwd_part_rows(m, &part, width, y, ldy, out, scratch, sums);
		} while (n < seg[s].n);
	}
}

static void fma_bwd(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
		    int64_t ldy, enum moe_out out, void *scratch)
{
	int64_t n = 0;

	out = fma_out(out, y, ldy);
	if (m <= BWD_FEW) {
		bwd_few(m, seg, nseg, columns, scratch);
		for (int i = 0; i < m; i++)
			for (int j = 0; j < columns; j += VEC_LANES)
				fma_put(y + i * ldy + j,
					vec_load((const float *)scratch + i * columns + j), out);
		return;
	}
	for (int s = 0; s < nseg; s++)
		n += seg[s].n;
	for (int col = 0; col < columns; col += BWD_SLICE)
		(n > BWD_LONG ? bwd_parts : bwd_whole)(m, seg, nseg, col,
						       MOE_MIN(BWD_SLICE, columns - col), columns,
						       y + col, ldy, out, scratch);
}

#endif
