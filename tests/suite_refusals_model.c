/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a model, calls of an open one, adapters of others. */
#include "tests/refusals.h"

#include <math.h>

const char moe_suite_name[] = "refusals_model";

/* ---- opening a model ---- */

static enum moe_status open_spoilt(struct refusal *r)
{
	struct moe_model *m = NULL;
	enum moe_status st = moe_model_open(r->engine, &r->m, &m);

	CU_ASSERT_PTR_NULL(m);
	return st;
}

#define OPENING(name, change)                                                                      \
	CALL(name)                                                                                 \
	{                                                                                          \
		r->m.change;                                                                       \
		return open_spoilt(r);                                                             \
	}
OPENING(open_unsized, struct_size = 8)
OPENING(open_nothing, dir = NULL)
OPENING(open_negative, max_tokens = -1)
OPENING(open_slots, slots = 4096)
OPENING(open_alpha, lora_alpha = -1)
OPENING(open_recompute, recompute = 7)
OPENING(open_dropout, lora_dropout = 1)
OPENING(open_aux, aux_coef = -1)
OPENING(open_z, z_coef = NAN)
OPENING(open_keep_text, keep_text = 1)
OPENING(open_method, method = 9)
OPENING(open_masters, masters = 9)
OPENING(open_form, adapter_format = "zip")
OPENING(open_weights, weights = "int3")
OPENING(open_backward, backward_weights = "sideways")

CALL(open_full_for_inference)
{
	r->m.method = MOE_METHOD_FULL;
	r->m.inference_only = 1;
	return open_spoilt(r);
}
CALL(open_full_with_adapter)
{
	r->m.method = MOE_METHOD_FULL;
	r->m.adapter = "some/adapter";
	return open_spoilt(r);
}
CALL(open_router_for_inference)
{
	r->m.train_router = r->m.inference_only = 1;
	return open_spoilt(r);
}
CALL(open_router_twice)
{
	r->m.train_router = 1;
	r->m.lora_targets = "gate";
	return open_spoilt(r);
}
CALL(open_router_dropout)
{
	r->m.lora_targets = "gate";
	r->m.lora_dropout = .5;
	return open_spoilt(r);
}
CALL(open_into_nothing)
{
	return moe_model_open(r->engine, &r->m, NULL);
}

static const struct row opening[] = {
	{ open_unsized, MOE_ERR_ARG, "model params: struct_size is not set" },
	{ open_nothing, MOE_ERR_ARG, "dir is NULL" },
	{ open_negative, MOE_ERR_ARG, "max_tokens -1, slots 0" },
	{ open_slots, MOE_ERR_ARG, "slots 4096 (at most" },
	{ open_alpha, MOE_ERR_ARG, "lora_alpha -1; none may be negative" },
	{ open_recompute, MOE_ERR_ARG, "recompute is 7; 0 (auto)" },
	{ open_dropout, MOE_ERR_ARG, "lora_dropout is 1; at least 0 and below 1" },
	{ open_aux, MOE_ERR_ARG, "aux_coef -1, z_coef 0; finite numbers from 0" },
	{ open_z, MOE_ERR_ARG, "z_coef" },
	{ open_keep_text, MOE_ERR_ARG, "keep_text needs inference_only" },
	{ open_method, MOE_ERR_ARG, "method 9, masters 0; 0 to 2" },
	{ open_masters, MOE_ERR_ARG, "masters 9" },
	{ open_form, MOE_ERR_ARG, "adapter format 'zip' is none of" },
	{ open_weights, MOE_ERR_ARG, "weights \"int3\": keep, bf16" },
	{ open_backward, MOE_ERR_CONFIG, "backward weights \"sideways\"; possible are" },
	{ open_full_for_inference, MOE_ERR_ARG, "method full trains, inference_only does not: choose one" },
	{ open_full_with_adapter, MOE_ERR_ARG, "method full has no adapter, but some/adapter is one" },
	{ open_router_for_inference, MOE_ERR_ARG, "train_router and inference_only exclude each other" },
	{ open_router_twice, MOE_ERR_ARG, "one of both is possible" },
	{ open_router_dropout, MOE_ERR_UNSUPPORTED, "lora_dropout 0.5 with an adapter of gate" },
	{ open_into_nothing, MOE_ERR_ARG, "out is NULL" },
};

/* ---- calls of an open one ---- */

static int32_t ids[64];
static float logits[4096];

static struct moe_array logits_of(int64_t rows, int64_t columns)
{
	return (struct moe_array){ .data = logits, .dtype = MOE_F32, .ndim = 2, .shape = { rows, columns } };
}

CALL(logits_without_ids)
{
	struct moe_array out = logits_of(1, 2048);

	return moe_model_logits(r->model, NULL, 3, NULL, 1, &out);
}
CALL(logits_of_no_model)
{
	struct moe_array out = logits_of(1, 2048);

	return moe_model_logits(NULL, ids, 3, NULL, 1, &out);
}
CALL(logits_of_too_many)
{
	struct moe_array out = logits_of(1, 2048);

	return moe_model_logits(r->model, ids, 64, NULL, 1, &out);
}
CALL(logits_beyond)
{
	struct moe_array out = logits_of(1, 2048);
	int32_t beyond[2] = { 1, 2048 };

	return moe_model_logits(r->model, beyond, 2, NULL, 1, &out);
}
CALL(logits_shape)
{
	struct moe_array out = logits_of(1, 2047);

	return moe_model_logits(r->model, ids, 3, NULL, 1, &out);
}
CALL(logits_strides)
{
	struct moe_array out = logits_of(1, 2048);

	out.strides[0] = 4096, out.strides[1] = 2;
	return moe_model_logits(r->model, ids, 3, NULL, 1, &out);
}
CALL(logits_rows)
{
	struct moe_array out = logits_of(2, 2048);
	int32_t row[2] = { 2, 1 };

	return moe_model_logits(r->model, ids, 3, row, 2, &out);
}
CALL(next_of_none)
{
	struct moe_array out = logits_of(1, 2048);

	return moe_model_next(r->model, ids, 0, 0, &out);
}
CALL(next_without_text)
{
	struct moe_array out = logits_of(1, 2048);

	return moe_model_next(r->model, ids, 1, 0, &out);
}
CALL(loss_of_none)
{
	double loss;
	int64_t count, offsets[2] = { 0, 2 };

	return moe_model_loss(r->model, ids, NULL, offsets, 0, &loss, &count);
}
CALL(info_unsized)
{
	struct moe_model_info info = { .struct_size = 8 };

	return moe_model_get_info(r->model, &info);
}
CALL(save_nowhere)
{
	return moe_model_save_adapter(r->model, NULL);
}
CALL(save_model_nowhere)
{
	return moe_model_save(r->model, NULL);
}
CALL(save_untrained)
{
	return moe_model_save(r->model, "none");
}
CALL(load_nothing)
{
	return moe_model_load_adapter(r->model, NULL);
}
CALL(tokens_of_no_model)
{
	return moe_train_expert_tokens(NULL, 0, NULL, 8);
}
CALL(tokens_beyond)
{
	int64_t counts[8];

	return moe_train_expert_tokens(r->model, 4, counts, 8);
}
CALL(tokens_before)
{
	int64_t counts[8];

	return moe_train_expert_tokens(r->model, 0, counts, 7);
}
CALL(tokens_untrained)
{
	int64_t counts[8];

	return moe_train_expert_tokens(r->model, 0, counts, 8);
}
CALL(evaluate_nothing)
{
	struct moe_eval_result result = { .struct_size = sizeof result };

	return moe_evaluate(r->model, NULL, &result);
}
CALL(train_result_unsized)
{
	struct moe_train_result result = { .struct_size = 8 };

	return moe_train(r->model, &r->t, NULL, NULL, &result);
}
CALL(token_info_of_nothing)
{
	struct moe_token_file_info info = { .struct_size = sizeof info };

	return moe_token_file_info(NULL, &info);
}

static const struct row calls[] = {
	{ logits_without_ids, MOE_ERR_ARG, "1 rows of 3 ids; ids, and 1 to all of them in row" },
	{ logits_of_no_model, MOE_ERR_ARG, "model is NULL" },
	{ logits_of_too_many, MOE_ERR_ARG, "a document of 64 tokens; 1 to 32 are possible" },
	{ logits_beyond, MOE_ERR_ARG, "token 1 is 2048; the vocabulary has 2048" },
	{ logits_shape, MOE_ERR_ARG, "F32 [1, 2048] is expected" },
	{ logits_strides, MOE_ERR_ARG, "out must be contiguous" },
	{ logits_rows, MOE_ERR_ARG, "row[1] is 1: rows ascend within 3 tokens" },
	{ next_of_none, MOE_ERR_ARG, "0 ids; at least one is needed" },
	{ next_without_text, MOE_ERR_STATE, "opened without keep_text" },
	{ loss_of_none, MOE_ERR_ARG, "losses of 0 documents" },
	{ info_unsized, MOE_ERR_ARG, "model info: struct_size is not set" },
	{ save_nowhere, MOE_ERR_ARG, "dir is NULL" },
	{ save_model_nowhere, MOE_ERR_ARG, "dir is NULL" },
	{ save_untrained, MOE_ERR_STATE, "nothing trains them. moe_merge folds an adapter in" },
	{ load_nothing, MOE_ERR_ARG, "dir is NULL" },
	{ tokens_of_no_model, MOE_ERR_ARG, "model or counts is NULL" },
	{ tokens_beyond, MOE_ERR_ARG, "layer 4; 0 to 3 are possible" },
	{ tokens_before, MOE_ERR_ARG, "layer 0 has 8 experts, not 7" },
	{ tokens_untrained, MOE_ERR_ARG, "layer 0 was not trained yet" },
	{ evaluate_nothing, MOE_ERR_ARG, "a token file and struct_size are needed" },
	{ train_result_unsized, MOE_ERR_ARG, "train result: struct_size is not set" },
	{ token_info_of_nothing, MOE_ERR_ARG, "a path and struct_size are needed" },
};

/* ---- one model's adapter in another ---- */

/* Makes a model of r->m, lets it have the adapter in dir, and closes it. */
static enum moe_status load_into(struct refusal *r, const char *dir)
{
	struct moe_model *m = NULL;
	enum moe_status st;

	CU_ASSERT_EQUAL_FATAL(moe_model_open(r->engine, &r->m, &m), MOE_OK);
	st = moe_model_load_adapter(m, dir);
	moe_model_close(m);
	return st;
}

/* An adapter of a model of r->m in a folder of its own. */
static const char *adapter_of(struct refusal *r, const char *name)
{
	static char dir[600];
	struct moe_model *m = NULL;

	snprintf(dir, sizeof dir, "%s/%s", moe_test_dir(), name);
	CU_ASSERT_EQUAL_FATAL(moe_model_open(r->engine, &r->m, &m), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_model_save_adapter(m, dir), MOE_OK);
	moe_model_close(m);
	return dir;
}

CALL(adapter_rank)
{
	const char *dir = adapter_of(r, "rank");

	r->m.lora_rank = 3;
	return load_into(r, dir);
}
CALL(adapter_own_a)
{
	const char *dir = adapter_of(r, "own");

	r->m.share_a = 1;
	return load_into(r, dir);
}
CALL(adapter_routers)
{
	const char *dir;

	r->m.train_router = 1;
	dir = adapter_of(r, "routers");
	r->m.train_router = 0;
	return load_into(r, dir);
}
CALL(adapter_of_none)
{
	struct moe_model *m = NULL;
	enum moe_status st;

	r->m.inference_only = 1;
	CU_ASSERT_EQUAL_FATAL(moe_model_open(r->engine, &r->m, &m), MOE_OK);
	st = moe_model_save_adapter(m, moe_test_dir());
	moe_model_close(m);
	return st;
}
CALL(train_for_inference)
{
	struct moe_model *m = NULL;
	enum moe_status st;

	r->m.inference_only = 1;
	CU_ASSERT_EQUAL_FATAL(moe_model_open(r->engine, &r->m, &m), MOE_OK);
	st = moe_train(m, &r->t, NULL, NULL, NULL);
	moe_model_close(m);
	return st;
}

static const struct row adapters[] = {
	{ adapter_rank, MOE_ERR_ARG, "open the model with this adapter instead" },
	{ adapter_own_a, MOE_ERR_ARG, "the adapter has an A each for gate and up; the model's share one" },
	{ adapter_routers, MOE_ERR_ARG, "the adapter has the weights of 4 routers, the model has 0" },
	{ adapter_of_none, MOE_ERR_STATE, "the model has no adapter" },
	{ train_for_inference, MOE_ERR_ARG, "opened without LoRA or for inference" },
};

/* Memory for the model, but not for transposed copies beside it. */
static void copies(void)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2 };
	struct refusal r = { 0 };
	enum moe_status st = MOE_ERR_NOFIT;
	bool said = false;

	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &r.engine), MOE_OK);
	fill(&r);
	r.m.backward_weights = "resident";
	for (r.m.memory_limit = 1 << 20; st == MOE_ERR_NOFIT && !said; r.m.memory_limit += 256 << 10) {
		struct moe_model *m = NULL;

		st = moe_model_open(r.engine, &r.m, &m);
		said = st == MOE_ERR_NOFIT && strstr(moe_last_error(), "backward weights \"resident\" take");
		moe_model_close(m);
	}
	if (st == MOE_ERR_UNSUPPORTED)
		printf("this table has no copies ");
	else
		CU_ASSERT_TRUE(said);
	CU_ASSERT_EQUAL(moe_engine_close(r.engine), MOE_OK);
}

static void refused(void)
{
	struct refusal r = { .engine = refusals_engine() };

	CHECK(&r, opening);
	fill(&r);
	CU_ASSERT_EQUAL_FATAL(moe_model_open(r.engine, &r.m, &r.model), MOE_OK);
	CHECK(&r, calls);
	moe_model_close(r.model);
	CHECK(&r, adapters);
	CU_ASSERT_EQUAL(moe_engine_close(r.engine), MOE_OK);
}

const struct moe_test moe_suite_tests[] = {
	{ "rows", refused },
	{ "copies that have no room", copies },
	{ NULL, NULL },
};
