/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of codelets that work on tokens t0..t1 of a MoE layer or dense FFN. */
#ifndef MOE_CODELETS_TOKEN_ARGS_H
#define MOE_CODELETS_TOKEN_ARGS_H

#include "codelets/moe.h"

struct moe_codelet;

/* Epilogue of a backward that ends at a normalised input: grad = residual + through rmsnorm(x). */
struct moe_norm_bwd {
	const float *x, *w;    /* w NULL: no norm, the gradient is stored as it is */
	float eps;
	const float *residual; /* [T, H] or NULL */
	float *part;	       /* [token blocks, H] what w's gradient gets from each block; NULL: not wanted */
};

struct moe_token_args {
	const struct moe_experts *layer;
	struct moe_experts_state *state;
	const struct moe_ffn *ffn;
	struct moe_ffn_state *ffn_state;
	int t0, t1;
	int part, c0, c1;	/* combine_part: chunks of H of this part */
	bool weighted;		/* combine_part: by the routing weights (forward) */
	bool first;		/* gradients: clear first */
	struct moe_drop_pass drop; /* of the layer's LoRA in this pass; plan passes it on to the experts */
	enum moe_ffn_matrix matrix; /* ffn_lora_grad */
	const float *residual, *shared; /* [T, H] added by combine; or NULL */
	float *out;		/* [T, H] */
	struct moe_norm_bwd norm;
	struct moe_router_result *result; /* plan: NULL where nobody asks */
	double share;		/* route_bwd: this micro-batch's share of the step's tokens */
};

/* A pass's masks of one of an MLP's matrices, into *d; NULL: none. */
const struct moe_dropout *moe_ffn_dropout(const struct moe_token_args *a, enum moe_ffn_matrix which,
					  struct moe_dropout *d);
/* LoRA of a matrix for rows from token on, as the kernels take it: NULL where it has none. */
struct moe_ffn_lora {
	struct moe_lora lora;
	struct moe_dropout drop;
};
const struct moe_lora *moe_ffn_lora(const struct moe_token_args *a, enum moe_ffn_matrix which, int64_t token,
				    struct moe_ffn_lora *out);

/* out[t0..t1] from dx, the gradient with respect to the normalised input. */
void moe_norm_bwd_apply(const struct moe_norm_bwd *n, int t0, int t1, int H, const float *dx, float *out);

#endif
