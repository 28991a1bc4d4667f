/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an instruction set brings to the packed kernels: packing, the two GEMM directions, gradient
 * GEMMs and the SwiGLU epilogues. The drivers in this folder (experts.c, linear.c, ...) walk panels
 * and slices and know no instruction set; codelets/kernels/<isa>/ fills in one struct moe_tiles.
 *
 * Packed weight [n, k] (bf16, moe_packed_* in layout.h): n in panels of 16 rows, k padded to
 * MOE_PACK_K; a panel is blocks of 16 n x 8 k (MOE_LAYOUT_BLOCKS8: [k/8][16 n][8 k];
 * MOE_LAYOUT_PAIRS16: [k/16][8 pairs of n][16 k][2 n]) or of 16 n x 32 k (MOE_LAYOUT_BLOCKS32:
 * [k/32][16 n][32 k]). In all, columns k.. of a panel (k a multiple of the block's) begin at
 * element 16 k, and panels are moe_packed_stride(k) elements apart, not a multiple of 2 KB. Pad
 * rows and columns are zero. One layout serves y = x W^T (fwd) and dx = dy W (bwd).
 *
 * Activations come in panels: tiles of up to fwd_rows or bwd_rows(m) rows, in the order that the
 * micro-kernel reads them, elements of panel_bytes. A panel of m rows and width w (a multiple of
 * 16) takes m * w elements; its inside belongs to the instruction set, but rows stay in tiles that
 * depend on m only, and columns in multiples of 16 can be written and read independently of the
 * others (`col`). A forward panel is read by fwd, a backward panel by bwd; they may differ.
 *
 * All sums are f32 in an order that depends on (m, k, n) only: never on which columns a call takes.
 * Nothing here allocates; functions return void. Panels, packed weights, pair arrays and scratch
 * are 64-byte aligned at their base; rows that come from or go to the caller (src, dst, y, dh, c)
 * only as their type needs, and ld is arbitrary: MOE_OUT_STREAM streams where it can and stores
 * elsewhere. Non-temporal stores are ordered by fence(), called by the drivers at the end of an op.
 * A segment may be empty (k or n 0: a part without columns of I): it adds nothing, and y is
 * written.
 */
#ifndef MOE_CODELETS_KERNELS_PACKED_TILES_H
#define MOE_CODELETS_KERNELS_PACKED_TILES_H

#include "codelets/kernels/kernels.h"

#define MOE_PACK_N 16 /* rows of a weight panel */
#define MOE_PACK_K 32 /* k of weights and widths of panels are padded to multiples of this */

enum moe_out {
	MOE_OUT_STORE,
	MOE_OUT_ADD,	/* y += */
	MOE_OUT_STREAM, /* non-temporal where y and ld allow it */
};

/*
 * How m rows that the next task reads are written. Few stay in a cache; and while weights come from
 * memory as fast as it can, non-temporal stores take buffers from the reads (Zen 4, m = 8: 2 %).
 */
#define MOE_CACHED_ROWS 15
static inline enum moe_out moe_rows_out(int m)
{
	return m <= MOE_CACHED_ROWS ? MOE_OUT_STORE : MOE_OUT_STREAM;
}

struct moe_coded_panel;
struct moe_coded_slice;
struct moe_int_rows;

/* One run of columns of x times the same columns of one weight panel. */
struct moe_fwd_seg {
	const void *x;	   /* forward panel [m, width] */
	int64_t width;	   /* of the whole panel, elements */
	int col, k;	   /* columns col..col+k; multiples of 16 (BLOCKS32: 32) */
	const uint16_t *w; /* the weight panel at column `col` of x, i.e. panel + 16 * its own first
			      column */
};

/*
 * Panels that few rows are multiplied by in one call. fwd_ints_run: MOE_RUN at once, a short piece of each in turn. A
 * single stream gives what DRAM has only to loops that do little but read (Zen 4, m = 1, int4: 24 GB/s of one panel at
 * a time, 26 of eight). fwd_coded_run: one after another.
 */
#define MOE_RUN 8
struct moe_panel_run {
	int64_t stride;	     /* bytes between panels */
	int64_t lora_stride; /* elements between their seg[1].w */
	const char *next;    /* the panel that is read after the run, or NULL */
	float *y;
	int64_t step, ldy; /* elements of y between panels, and between rows */
	enum moe_out out;
};

/* n rows (columns col..col+n of g) of a weight, at one column range. */
struct moe_bwd_seg {
	const void *g; /* backward panel [m, width] */
	int64_t width;
	int col, n;	   /* multiples of 16 */
	const uint16_t *w; /* first weight panel, at the first wanted column: panel + 16 * column */
	int64_t stride;	   /* elements between panels */
	const uint16_t *after; /* of the same n and stride, read next: prefetched while there are rows
				  enough. NULL: the following columns */
	const struct moe_coded_slice *coded; /* quantised, instead of w (where bwd_takes says so); NULL: plain */
};
#define MOE_MAX_SEGS 4
#define MOE_LONG_ROWS 3
#define MOE_ALL_COLUMNS (1 << 24) /* a multiple of MOE_CHUNK beyond any width */

struct moe_swiglu_rows {
	int m;
	int64_t ld;	     /* elements between rows of gate and up, kept as packed/keep.h says */
	uint16_t *gate, *up; /* 16 columns of each row; 32-byte aligned */
	const float *weight; /* [m] routing weight (backward) */
	struct moe_glu glu;
};

struct moe_tiles {
	const char *name;
	enum moe_layout layout;
	int panel_bytes; /* of an element of a panel: 2 (bf16) or 4 (f32) */
	int pair_bytes;	 /* of an element of a pair array: 2 or 4 */
	int lora_pad;	 /* ranks are padded to a multiple of this: 16, or 32 */

	/* Columns of a quantised panel as bf16 of the plain layout: moe_coded_decode (packed/coded.h), or its
	 * bits faster. */
	void (*decode)(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst);

	/*
	 * fwd on a quantised panel that it decodes itself: seg[0].w is not read, later segments are plain; buffer: 16 kp
	 * elements that it may use. false: not done (another coding). The bits are those of decode and fwd. NULL: never.
	 */
	bool (*fwd_coded)(int m, const struct moe_coded_panel *p, const struct moe_fwd_seg *seg,
			  int nseg, const uint16_t *next, float *y, int64_t ldy, enum moe_out out,
			  uint16_t *buffer);
	/*
	 * The same of up to `count` panels of a run, p and y being those of the first. Returns how many are done: those
	 * before the first that it does not take. NULL: never.
	 */
	int64_t (*fwd_coded_run)(int m, const struct moe_coded_panel *p, const struct moe_fwd_seg *seg, int nseg,
				 int64_t count, const struct moe_panel_run *run);

	/*
	 * Integer dot products (packed/ints.h); NULL: none. ints: the CPU has what they take; NULL: it has. All tables
	 * have the bits of moe_int_block_plain and moe_int_forward_plain.
	 *
	 * int_block: `rows` rows of x, n columns (32 or 64), as integers of one block: sum [rows * planes], scale [rows].
	 * fwd_ints: y[m, 16] of one panel; next: what is read then, or NULL.
	 */
	bool (*ints)(void);
	int int16_tile;	   /* rows times planes of a tile of two planes; 0: MOE_INT_ROWS */
	int int16_rows[2]; /* up to so many rows two planes are faster than decoding 4, 8 bits; 0: MOE_INT16_ROWS */
	void (*int_block)(int rows, int planes, int n, const float *x, int64_t ld, int8_t *q,
			  int32_t *sum, float *scale);
	void (*fwd_ints)(const struct moe_int_rows *x, const struct moe_coded_panel *p,
			 const char *next, float *y, int64_t ldy, enum moe_out out);
	/*
	 * fwd_ints of MOE_RUN panels at once, for a few rows. false: not done (other rows or codings). Same bits. NULL: never.
	 */
	bool (*fwd_ints_run)(const struct moe_int_rows *x, const struct moe_coded_panel *p,
			     const struct moe_panel_run *run);

	/*
	 * A weight panel from 16 f32 rows of k columns (a multiple of MOE_PACK_K), k apart and in the cache, past the
	 * caches. NULL: pack_rows and a copy. Same bits.
	 */
	void (*stream_panel)(const float *src, int64_t k, uint16_t *dst);

	/* ---- panels ---- */
	/*
	 * Packs rows token[i] (NULL: i) of src [., k], ld elements apart, as columns col..col+kp of
	 * a forward panel of the given width; columns k..kp are zero. kp a multiple of 16. src may
	 * be unaligned.
	 */
	void (*pack_fwd_bf16)(int m, const uint16_t *src, int64_t ld, const int32_t *token,
			      int64_t k, int64_t kp, void *panel, int64_t width, int64_t col);
	void (*pack_fwd)(int m, const float *src, int64_t ld, const int32_t *token, int64_t k,
			 int64_t kp, void *panel, int64_t width, int64_t col);
	/* The same for a backward panel. */
	void (*pack_bwd)(int m, const float *src, int64_t ld, const int32_t *token, int64_t k,
			 int64_t kp, void *panel, int64_t width, int64_t col);
	/* Columns col..col+k of a panel as f32 rows dst [m, k], ld apart (for weight gradients,
	 * tests). */
	void (*unpack_fwd)(int m, const void *panel, int64_t width, int64_t col, int64_t k,
			   float *dst, int64_t ld);
	void (*unpack_bwd)(int m, const void *panel, int64_t width, int64_t col, int64_t k,
			   float *dst, int64_t ld);

	/* ---- GEMM ---- */
	/*
	 * y[m, 16] = sum over segments of x W^T for one weight panel each (f32, rows ldy apart).
	 * Accumulators run on from one segment to the next. `next`: what will be read next, to be
	 * prefetched while there are rows enough, or NULL.
	 */
	void (*fwd)(int m, const struct moe_fwd_seg *seg, int nseg, const uint16_t *next, float *y,
		    int64_t ldy, enum moe_out out);
	/* How many columns one call of bwd should take for m rows so that its result stays in L1:
	 * 32, or up to MOE_CHUNK where the weights are walked in memory order: a divisor of
	 * MOE_CHUNK. Up to MOE_LONG_ROWS rows it may be MOE_ALL_COLUMNS: all that the caller has,
	 * for the CPU prefetches best where whole panels follow each other. */
	int (*bwd_columns)(int m);
	/* Bytes of scratch that bwd needs for up to m rows and `columns` columns of segments with n
	 * rows in all. */
	size_t (*bwd_scratch)(int m, int64_t n, int columns);
	/* y[m, columns] = sum over segments of g W; columns a multiple of 16 */
	void (*bwd)(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
		    int64_t ldy, enum moe_out out, void *scratch);

	/* bwd of m rows decodes such panels itself, with the bits of decode. NULL: never. */
	bool (*bwd_takes)(int m, const struct moe_coded_panel *p);

	/* ---- gradients: sums over the m rows ---- */
	/*
	 * Rows token[i] (NULL: i) of src, `cols` columns (a multiple of 16), times scale[i] (NULL:
	 * 1), in the order that grad reads: a pair array [ceil(m/2)][cols][2] (pair_bytes 2; a
	 * missing last row is zero) or [m rounded up to 2][cols] (pair_bytes 4): (m + m % 2) * cols
	 * elements.
	 */
	void (*pairs)(int m, const float *src, int64_t ld, const int32_t *token, const float *scale,
		      int cols, void *dst);
	void (*pairs_bf16)(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols,
			   void *dst);
	/*
	 * c[na, nb] (+)= scale * a^T b; a and b are pair arrays of lda and ldb columns at their
	 * first wanted column; na, nb arbitrary (pair arrays have columns up to the next multiple
	 * of 16), ldc in elements, c 4-byte aligned. ADD accumulates.
	 */
	void (*grad)(int m, const void *a, int64_t lda, int na, const void *b, int64_t ldb, int nb,
		     float scale, float *c, int64_t ldc, enum moe_out out);

	/* ---- SwiGLU on 16 columns of m rows; f32 arrays [m, 16] ---- */
	/* keeps gate and up (packed/keep.h) and leaves h = silu(gate) up, computed from f32, in g
	 */
	void (*swiglu)(const struct moe_swiglu_rows *r, float *g, const float *u);
	/*
	 * From gate and up as kept and dh (rows ld_dh apart, without the routing weight): dgate and
	 * dup with the routing weight, h, and dgw[i, 16] += dh * h by lanes
	 */
	void (*swiglu_bwd)(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh,
			   float *dgate, float *dup, float *h, float *dgw);
	/* The same with h as r->glu says, which is not plain. What was cut is kept as an infinity. */
	void (*glu)(const struct moe_swiglu_rows *r, float *g, const float *u);
	void (*glu_bwd)(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh, float *dgate,
			float *dup, float *h, float *dgw);

	/* orders non-temporal stores before what follows */
	void (*fence)(void);
	/* Runs the fastest multiply-add loop this instruction set has, registers only; returns its
	 * flops. */
	double (*peak)(int64_t iterations);
};

#endif
