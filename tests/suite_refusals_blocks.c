/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks: a router and experts, or experts alone. */
#include "tests/refusals.h"

const char moe_suite_name[] = "refusals_blocks";

static float data[2 * 16 * 16];

static enum moe_status with_block(struct refusal *r, enum moe_status (*call)(struct moe_block *))
{
	struct moe_block *b = NULL;
	enum moe_status st;

	CU_ASSERT_EQUAL_FATAL(moe_block_create(r->engine, &r->b, &b), MOE_OK);
	st = call(b);
	moe_block_destroy(b);
	return st;
}

static enum moe_status block_info(struct moe_block *b)
{
	struct moe_block_info info = { .struct_size = 8 };

	return moe_block_get_info(b, &info);
}
static enum moe_status block_set(struct moe_block *b)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };

	return moe_block_set(b, MOE_BLOCK_GATE_PROJ, &a);
}
static enum moe_status block_run(struct moe_block *b)
{
	static float x[4 * 16], out[4 * 16], weights[4] = { 1, 1, 1, 1 };
	static int32_t chosen[4];
	struct moe_array a = { .data = x, .dtype = MOE_F32, .ndim = 2, .shape = { 4, 16 } }, o = a;
	struct moe_array i = { .data = chosen, .dtype = MOE_I32, .ndim = 2, .shape = { 4, 1 } };
	struct moe_array p = { .data = weights, .dtype = MOE_F32, .ndim = 2, .shape = { 4, 1 } };

	o.data = out;
	return moe_block_forward(b, &a, &i, &p, 0, &o);
}
/* The chosen experts as floats, which they are not. */
static enum moe_status block_ids(struct moe_block *b)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 2, .shape = { 0, 1 } }; /* of no tokens yet */

	return moe_block_get(b, MOE_BLOCK_TOPK_IDS, &a);
}
static enum moe_status block_update(struct moe_block *b)
{
	struct moe_adamw_params p = { .struct_size = sizeof p, .learning_rate = 1e-3 };

	return moe_block_update(b, &p);
}
static enum moe_status block_codes_unsized(struct moe_block *b)
{
	struct moe_quantised_arrays q = { .struct_size = 8 };

	return moe_block_set_quantised(b, MOE_BLOCK_GATE_PROJ, &q);
}
static enum moe_status block_codes(struct moe_block *b)
{
	static int8_t codes[2 * 16 * 16];
	struct moe_quantised_arrays q = {
		.struct_size = sizeof q,
		.codes = { .data = codes, .dtype = MOE_I8, .ndim = 3, .shape = { 2, 16, 16 } },
		.scale = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 2 } },
	};

	for (size_t i = 0; i < 2 * 16 * 2; i++)
		data[i] = 1;
	return moe_block_set_quantised(b, MOE_BLOCK_GATE_PROJ, &q);
}

/* Of frozen weights, after a backward. */
static enum moe_status block_gradient(struct moe_block *b)
{
	static float x[16], y[16], weights[1] = { 1 };
	static int32_t chosen[1];
	struct moe_array w = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };
	struct moe_array a = { .data = x, .dtype = MOE_F32, .ndim = 2, .shape = { 1, 16 } }, o = a;
	struct moe_array i = { .data = chosen, .dtype = MOE_I32, .ndim = 2, .shape = { 1, 1 } };
	struct moe_array p = { .data = weights, .dtype = MOE_F32, .ndim = 2, .shape = { 1, 1 } };

	o.data = y;
	for (int k = MOE_BLOCK_GATE_PROJ; k <= MOE_BLOCK_DOWN_PROJ; k++)
		CU_ASSERT_EQUAL_FATAL(moe_block_set(b, (enum moe_block_array)k, &w), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_block_forward(b, &a, &i, &p, 1, &o), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_block_backward(b, &o, &a, NULL), MOE_OK);
	return moe_block_get_gradient(b, MOE_BLOCK_GATE_PROJ, &w);
}

#define OF_BLOCK(name, function, change)                                                           \
	CALL(name)                                                                                 \
	{                                                                                          \
		r->b.change;                                                                       \
		return with_block(r, function);                                                    \
	}
OF_BLOCK(b_info, block_info, router = NULL)
OF_BLOCK(b_wide, block_set, weight_dtype = MOE_BF16)
OF_BLOCK(b_coded, block_set, weight_format = "int8")
OF_BLOCK(b_router, block_run, router = "softmax_topk")
OF_BLOCK(b_ids, block_ids, router = NULL)
CALL(b_gradient)
{
	r->b.lora_rank = 2;
	r->b.lora_alpha = 2;
	return with_block(r, block_gradient);
}
OF_BLOCK(b_update, block_update, lora_rank = 0)
OF_BLOCK(b_unsized, block_codes_unsized, weight_format = "int8")
OF_BLOCK(b_plain, block_codes, weight_format = NULL)
OF_BLOCK(b_group, block_codes, weight_format = "int8")

/* More than any machine has: mapping it goes, writing it would end the process. */
CALL(block_too_much)
{
	struct moe_block *b = NULL;
	enum moe_status st;

	r->b.hidden = 512;
	r->b.lora_rank = 1 << 29;
	r->b.lora_alpha = 1;
	st = moe_block_create(r->engine, &r->b, &b);
	moe_block_destroy(b);
	return st;
}
static const struct row blocks[] = {
	{ b_info, MOE_ERR_ARG, "block info: struct_size is not set" },
	{ b_wide, MOE_ERR_ARG, "gate_proj is F32, wider than the block's weight_dtype BF16" },
	{ b_coded, MOE_ERR_STATE, "gate_proj: weight_format is int8; moe_block_set_quantised sets it" },
	{ b_router, MOE_ERR_ARG, "ids and weights are given, but the block has a router" },
	{ b_ids, MOE_ERR_ARG, "topk_ids are I32" },
	{ b_gradient, MOE_ERR_STATE, "gate_proj has no gradient in this block" },
	{ b_update, MOE_ERR_STATE, "the block has nothing to update: no LoRA, no train_base" },
	{ b_unsized, MOE_ERR_ARG, "quantised arrays: struct_size is not set" },
	{ b_plain, MOE_ERR_STATE, "the block has no weight_format" },
	{ b_group, MOE_ERR_ARG, "gate_proj has a scale for 8 columns; weight_group is" },
	{ block_too_much, MOE_ERR_NOFIT, "block: " },
};

static void refused(void)
{
	struct refusal r = { .engine = refusals_engine() };

	CHECK(&r, blocks);
	CU_ASSERT_EQUAL(moe_engine_close(r.engine), MOE_OK);
}

const struct moe_test moe_suite_tests[] = {
	{ "rows", refused },
	{ NULL, NULL },
};
