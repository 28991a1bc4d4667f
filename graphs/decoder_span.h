/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run of consecutive blocks as few tensors, however long documents are: joins over 8, 64, 512 ...
 * blocks. Any run takes at most MOE_SPAN_MAX tensors.
 */
#ifndef MOE_GRAPHS_DECODER_SPAN_H
#define MOE_GRAPHS_DECODER_SPAN_H

#include "tasks/moe_tasks.h"

#define MOE_SPAN_LEVELS 4
#define MOE_SPAN_MAX 56

struct moe_span {
	int max_blocks, n; /* n: blocks of the coming pass */
	int levels;
	struct moe_tensor **level[MOE_SPAN_LEVELS]; /* [max_blocks / 8^(i + 1)] */
};

enum moe_status moe_span_create(struct moe_engine *e, const char *name, int max_blocks,
				struct moe_span *s);
void moe_span_destroy(struct moe_span *s);
/* Submits the joins over block[0..n), if runs of n blocks need them. */
enum moe_status moe_span_submit(const struct moe_context *c, struct moe_span *s,
				struct moe_tensor *const *block, int n);
/* Tensors that stand for blocks b0..b1 into out[MOE_SPAN_MAX]; returns how many. */
int moe_span_collect(const struct moe_span *s, struct moe_tensor *const *block, int b0, int b1,
		     struct moe_tensor **out);

#endif
