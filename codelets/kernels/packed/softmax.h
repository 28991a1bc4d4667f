/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What attention does between its GEMMs, on tiles of at most MOE_TOKEN_BLOCK rows and columns of
 * f32; compiled per instruction set (elementwise/softmax.c).
 */
#ifndef MOE_CODELETS_KERNELS_PACKED_SOFTMAX_H
#define MOE_CODELETS_KERNELS_PACKED_SOFTMAX_H

#include "codelets/kernels/kernels.h"

#define MOE_TILE_LD MOE_TOKEN_BLOCK /* elements between rows of a tile */

/* Which part of a tile [m, n] counts: columns lo[i]..hi[i] of row i, none where lo >= hi. */
struct moe_score_tile {
	int m, n;    /* n a multiple of 16 */
	float scale; /* of the products that the tile begins with */
	int lo[MOE_TOKEN_BLOCK], hi[MOE_TOKEN_BLOCK];
};

/* The running softmax of m rows and what they have summed up so far: o [m, dim], rows ldo apart. */
struct moe_softmax_state {
	float max[MOE_TOKEN_BLOCK], sum[MOE_TOKEN_BLOCK];
	float *o;
	int64_t ldo;
	int dim;
};

struct moe_softmax_ops {
	/*
	 * Products q k^T to weights relative to the rows' new maxima; sums are updated, and o is
	 * rescaled unless it is yet to be written (first). What doesn't count becomes 0.
	 */
	void (*weights)(const struct moe_score_tile *t, bool first, float *s,
			struct moe_softmax_state *state);
	/* out [m, dim] (rows ld apart) = o / sum, and lse[m] = max + log(sum) */
	void (*finish)(int m, const struct moe_softmax_state *state, float *out, int64_t ld,
		       float *lse);
	/* sum of a b over n elements */
	float (*dot)(int n, const float *a, const float *b);
	/*
	 * Products p = q k^T and d = grad_o v^T to the softmax's weights and to the gradients of
	 * q k^T. lse and centre belong to the queries: to rows, or to columns by_column.
	 */
	void (*backward)(const struct moe_score_tile *t, bool by_column, const float *lse,
			 const float *centre, float *p, float *d);
};

#endif
