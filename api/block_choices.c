/* SPDX-License-Identifier: Apache-2.0 */
/* What a block decides from the machine's rates, and what it says about it. */
#include "api/block.h"

static struct moe_load load_of(const struct moe_block *b, int tokens)
{
	const struct moe_block_params *p = &b->params;
	double bytes = moe_kernels()->tiles ? 0 : (double)moe_dtype_size(p->weight_dtype);

	if (p->weight_format)
		bytes = moe_format_find(p->weight_format)->bits / 8.0;
	return (struct moe_load){
		.E = p->experts,
		.k = p->experts_per_token,
		.H = p->hidden,
		.P = moe_engine_parts(b->engine),
		.I = p->intermediate,
		.T = tokens,
		.workers = moe_engine_workers(b->engine),
		.weight_bytes = bytes,
	};
}

int moe_block_group_size(const struct moe_block *b, int tokens)
{
	struct moe_load load = load_of(b, tokens);

	return b->params.group_size ? b->params.group_size
				    : moe_group_size_choose(&load, moe_machine());
}

enum moe_status moe_block_choose_backward(struct moe_block *b, int tokens)
{
	struct moe_backward_params p = {
		.load = load_of(b, tokens), .layers = 1, .ring = 1, .refilled = true, .memory = -1
	};

	if (b->params.weight_format)
		b->params.backward_weights = "direct";
	MOE_TRY(moe_backward_select(b->params.backward_weights, &p, moe_machine(), &b->backward));
	b->params.backward_weights =
		moe_backward_text(&b->backward, b->backward_text, sizeof b->backward_text);
	moe_backward_explain(&b->backward, b->backward_costs, sizeof b->backward_costs);
	return MOE_OK;
}

enum moe_status moe_block_get_info(struct moe_block *b, struct moe_block_info *info)
{
	if (!b || !info || info->struct_size < sizeof *info)
		return moe_fail(MOE_ERR_ARG, "block info: struct_size is not set");
	*info = (struct moe_block_info){
		.struct_size = sizeof *info,
		.backward_weights = b->backward_text,
		.backward_costs = b->backward_costs,
		.touched_bytes = b->touched.bytes,
		.touch_seconds = b->touched.seconds,
		.groups = b->layer.G,
		.slices_i = b->cut.slices_i,
		.slices_h = b->cut.slices_h,
	};
	return MOE_OK;
}
