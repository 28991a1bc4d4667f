/* SPDX-License-Identifier: Apache-2.0 */
/* The block object behind include/moesaic.h. Private to api/. */
#ifndef MOE_API_BLOCK_H
#define MOE_API_BLOCK_H

#include "codelets/ffn_bwd.h"
#include "graphs/moe_graph.h"
#include "graphs/moe_state.h"

#include <stdatomic.h>

enum { MOE_BLOCK_X, MOE_BLOCK_OUT, MOE_BLOCK_GRAD_OUT, MOE_BLOCK_GRAD_X, MOE_BLOCK_STREAMS };

struct moe_block {
	struct moe_engine *engine;
	struct moe_block_params params;
	struct moe_ticket *ticket;
	atomic_flag busy;
	struct moe_experts layer;
	struct moe_ffn ffn;
	struct moe_tensor **ffn_ready; /* [MOE_FFN_MATRICES] of shared experts that are trained, or NULL */
	struct moe_trained_tensors ffn_trained[MOE_FFN_MATRICES];
	struct moe_cut cut;
	struct moe_backward_choice backward;
	char backward_text[32], backward_costs[512];
	struct moe_backward_ring ring;
	struct moe_layer_tensors layer_tensors;
	/* for up to `capacity` tokens, now `tokens`; -1: none yet */
	int capacity, tokens;
	struct moe_experts_state state;
	struct moe_experts_scratch scratch;
	struct moe_ffn_state ffn_state;
	struct moe_slot_tensors slot;
	struct moe_tensor *plan;
	struct moe_stream stream[MOE_BLOCK_STREAMS];
	struct moe_touched touched;
	unsigned set;	 /* bit per array that moe_block_set has filled */
	bool saved;	 /* a forward is kept for backward */
	bool grads_open; /* gradients hold something: the next backward adds */
	int64_t steps;
};

/* One thread at a time: MOE_ERR_BUSY for the second. */
enum moe_status moe_block_enter(struct moe_block *b);
void moe_block_leave(struct moe_block *b);
/* MOE_ERR_STATE naming the first weight that was never set. */
enum moe_status moe_block_check_set(const struct moe_block *b);
/* Before there is memory for weights: experts per group, and what the backward multiplies by. */
int moe_block_group_size(const struct moe_block *b, int tokens);
enum moe_status moe_block_choose_backward(struct moe_block *b, int tokens);
/* weight_format and what it excludes. */
enum moe_status moe_block_check_format(const struct moe_block_params *p);

#endif
