/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repack: packed weights of one group and part, and their transposed copies, from f32 masters that have
 * changed, or from arrays of the caller (which the masters, where there are any, take over). Quantised weights are
 * quantised again.
 */
#ifndef MOE_CODELETS_REPACK_H
#define MOE_CODELETS_REPACK_H

#include "codelets/moe.h"

struct moe_codelet;

struct moe_repack_args {
	const struct moe_experts *layer;
	int part, group; /* part -1: all of them, where quantised weights are trained */
	/* per matrix where each expert's [I, H], [I, H], [H, I] begins, contiguous, any alignment, all of one dtype;
	 * NULL: from the masters */
	const void *const *source[MOE_EXPERT_MATRICES];
	enum moe_dtype dtype;
	const struct moe_quantised *coded[MOE_EXPERT_MATRICES]; /* or this: [E] quantised ones, */
	int64_t first_row[MOE_EXPERT_MATRICES]; /* from this row on */
};

extern struct moe_codelet moe_cl_repack;

#endif
