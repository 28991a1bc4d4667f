/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of a worker's scratch, and pair arrays of strips whose width is not a multiple of 16. */
#ifndef MOE_CODELETS_KERNELS_PACKED_SCRATCH_H
#define MOE_CODELETS_KERNELS_PACKED_SCRATCH_H

#include "codelets/kernels/packed/layout.h"

/* base NULL: only counts. The scratch itself need not be aligned: the first piece is. */
struct moe_carver {
	char *base;
	size_t used;
};

static inline void *moe_carve(struct moe_carver *c, size_t bytes)
{
	size_t skip = c->used || !c->base ? 0 : (size_t)(-(uintptr_t)c->base & 63);
	char *p;

	if (!c->base && !c->used)
		c->used = 64; /* for aligning the first one */
	else if (c->base && !c->used)
		c->used = skip;
	p = c->base ? c->base + c->used : NULL;
	c->used += (bytes + 63) & ~(size_t)63;
	return p;
}

/*
 * Pair array of `width` columns of rows token[i] of src; where width is not a multiple of 16 the
 * rows go through `rows` ([m, width up to the next multiple of 16]) first.
 */
void moe_pair_strip(const struct moe_tiles *t, int m, const float *src, int64_t ld,
		    const int32_t *token, int width, float *rows, void *dst);

#endif
