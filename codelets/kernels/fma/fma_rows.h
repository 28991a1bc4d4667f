/* SPDX-License-Identifier: Apache-2.0 */
/* How m rows are cut into tiles, and how finished sums leave. */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_ROWS_H
#define MOE_CODELETS_KERNELS_FMA_FMA_ROWS_H

#include "codelets/kernels/fma/vec.h"
#include "codelets/kernels/packed/layout.h"

/* Rows row..row+rows of tile `index` of `count`: tiles are as equal as can be, larger ones first.
 */
struct fma_tile {
	int index, count, row, rows;
};

static inline struct fma_tile fma_tile_first(int m, int limit)
{
	struct fma_tile t = { 0, (m + limit - 1) / limit, 0, 0 };

	t.rows = t.count ? m / t.count + (m % t.count > 0) : 0;
	return t;
}

static inline void fma_tile_next(struct fma_tile *t, int m)
{
	t->row += t->rows;
	if (++t->index < t->count)
		t->rows = m / t->count + (t->index < m % t->count);
}

#define FMA_EACH_TILE(t, m, limit)                                                                 \
	for (struct fma_tile t = fma_tile_first(m, limit); t.index < t.count; fma_tile_next(&t, m))

/* Streaming is for rows that fill whole cache lines. */
static inline enum moe_out fma_out(enum moe_out out, const float *y, int64_t ldy)
{
	bool lines = (((uintptr_t)y | (uintptr_t)ldy * sizeof *y) & 63) == 0;

	return out == MOE_OUT_STREAM && !lines ? MOE_OUT_STORE : out;
}

VEC_INLINE void fma_put(float *y, vec v, enum moe_out out)
{
	if (out == MOE_OUT_STREAM)
		vec_stream(y, v);
	else
		vec_store(y, out == MOE_OUT_ADD ? vec_add(vec_load(y), v) : v);
}

#endif
