/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between a caller's arrays and one (part, group) of a layer: publish (gradients out), give (values out), take
 * (LoRA values in, packed). rescale: gradients times a factor.
 */
#ifndef MOE_CODELETS_EXCHANGE_H
#define MOE_CODELETS_EXCHANGE_H

#include "codelets/moe.h"

struct moe_codelet;

enum moe_exchange { MOE_PUBLISH, MOE_GIVE, MOE_TAKE };

/* A contiguous array of all experts; data NULL: none. */
struct moe_caller_array {
	void *data;
	enum moe_dtype dtype;
};

struct moe_exchange_args {
	const struct moe_experts *layer;
	int part, group;
	enum moe_exchange what;
	float scale;	    /* publish: multiplies; one rounding to the array's dtype */
	const int64_t *map; /* [E] row of base arrays for each expert, or NULL: the same */
	struct moe_caller_array lora[MOE_LORA_ARRAYS], base[MOE_EXPERT_MATRICES];
};

/* Of one row, for the worker that runs it. */
size_t moe_exchange_scratch(const struct moe_experts *l);

extern struct moe_codelet moe_cl_exchange, moe_cl_rescale;

#endif
