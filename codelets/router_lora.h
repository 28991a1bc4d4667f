/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LoRA of a router, whose weight is W = base + scale B A, kept whole in f32: the gradients of A and
 * B follow from that of W, and W from A and B after an update.
 */
#ifndef MOE_CODELETS_ROUTER_LORA_H
#define MOE_CODELETS_ROUTER_LORA_H

#include "codelets/moe.h"

struct moe_codelet;

struct moe_router_lora {
	int r;
	float scale;
	struct moe_param a, b; /* one piece each: [r, H], [E, r] */
	const float *base;     /* [E, H] */
};

struct moe_router_lora_args {
	const struct moe_experts *layer;
};

/* W into layer's router_weight, which must have been packed from F32. */
void moe_router_fold(const struct moe_experts *layer);

/* router_lora_grad: of A and B, from grad_router; router_fold: moe_router_fold. */
extern struct moe_codelet moe_cl_router_lora_grad, moe_cl_router_fold;

#endif
