/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stream: an activation [T, n] written and read in blocks of MOE_TOKEN_BLOCK tokens, with one
 * handle per block. Readers that do not name blocks (LoRA gradients, which come late) hold `users`
 * instead; whoever overwrites the stream first calls moe_stream_begin, and each block's writer
 * reads `users`.
 */
#ifndef MOE_GRAPHS_STREAM_H
#define MOE_GRAPHS_STREAM_H

#include "tasks/moe_tasks.h"

struct moe_stream {
	int T, T_max, n, n_blocks, max_blocks;
	float *data;
	struct moe_tensor **block; /* [max_blocks] */
	struct moe_tensor *users;
	bool owned;
};

/* Memory for T_max tokens of n floats. */
enum moe_status moe_stream_create(struct moe_engine *e, const char *name, int T_max, int n,
				  struct moe_stream *s);
/* The same without memory: for tables that read an activation elsewhere (x16). data stays NULL. */
enum moe_status moe_stream_create_order(struct moe_engine *e, const char *name, int T_max, int n,
					struct moe_stream *s);
void moe_stream_destroy(struct moe_engine *e, struct moe_stream *s);
/* The coming pass has T tokens. Only where no unsubmitted reader of the old T is left. */
void moe_stream_resize(struct moe_stream *s, int T);
/* Orders the coming writers after all late readers of what is there now. */
enum moe_status moe_stream_begin(const struct moe_context *c, struct moe_stream *s);

/* Tokens of a block. */
static inline int moe_block_begin(int b)
{
	return b * MOE_TOKEN_BLOCK;
}
static inline int moe_block_end(int b, int T)
{
	return MOE_MIN((b + 1) * MOE_TOKEN_BLOCK, T);
}

/* A tree of join tasks for any number of inputs. */
struct moe_join {
	struct moe_tensor *out, **mid;
	int n_mid;
};
enum moe_status moe_join_create(struct moe_engine *e, const char *name, int max_inputs,
				struct moe_join *j);
void moe_join_destroy(struct moe_join *j);
/* Tensors of a join, at most: for the memory plan. */
static inline int64_t moe_join_tensors(int64_t max_inputs)
{
	return 1 + max_inputs / 50; /* one for each 60 inputs of a level */
}
/* out is written when all inputs are there and `also` (may be NULL) was held read-write. */
enum moe_status moe_join_submit(const struct moe_context *c, struct moe_join *j,
				struct moe_tensor *const *in, int n, struct moe_tensor *also);

/* Creates n tensors; on failure those made are destroyed and the array is left NULL. */
enum moe_status moe_tensors_create(struct moe_engine *e, const char *name, int n, bool initialised,
				   struct moe_tensor ***out);
void moe_tensors_destroy(struct moe_tensor **t, int n);

#endif
