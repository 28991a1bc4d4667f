/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the C interface refuses, a row each: the call's status, and what its text says of the value and of what is possible.
 * Rows change one thing in parameters that are good.
 */
#include "moesaic.h"
#include "tests/harness.h"

#include "model/readers/safetensors_writer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

const char moe_suite_name[] = "refusals";

/* What the calls of all rows use; a row spoils a copy. */
struct refusal {
	struct moe_engine *engine;
	struct moe_model *model;
	struct moe_model_params m;
	struct moe_trainer_params t;
	struct moe_experts_params e;
	struct moe_block_params b;
	struct moe_estimate_params s;
	struct moe_merge_params g;
	struct moe_convert_params a;
	struct moe_convert_model_params w;
};

struct row {
	enum moe_status (*call)(struct refusal *r);
	enum moe_status status;
	const char *says;
};

#define CALL(name) static enum moe_status name(__attribute__((unused)) struct refusal *r)

static void fill(struct refusal *r)
{
	const char *dir = moe_test_path("tests/fixtures/ckpt/qwen3moe");

	r->m = (struct moe_model_params){ .struct_size = sizeof r->m, .dir = dir, .max_tokens = 32 };
	r->t = (struct moe_trainer_params){ .struct_size = sizeof r->t, .data = "none", .output_dir = "none" };
	r->e = (struct moe_experts_params){ .struct_size = sizeof r->e, .experts = 2, .experts_per_token = 1, .hidden = 16,
					    .intermediate = 16, .lora_rank = 2, .lora_alpha = 2, .weight_dtype = MOE_F32 };
	r->b = (struct moe_block_params){ .struct_size = sizeof r->b, .experts = 2, .experts_per_token = 1, .hidden = 16,
					  .intermediate = 16, .weight_dtype = MOE_F32 };
	r->s = (struct moe_estimate_params){ .struct_size = sizeof r->s, .model = &r->m };
	r->g = (struct moe_merge_params){ .struct_size = sizeof r->g, .model = dir, .adapter = "none", .output_dir = "none" };
	r->a = (struct moe_convert_params){ .struct_size = sizeof r->a, .in = "none", .out = "none", .adapter_format = "kt" };
	r->w = (struct moe_convert_model_params){ .struct_size = sizeof r->w, .in = dir, .out = "none", .weights = "int8" };
}

static void check(struct refusal *r, const struct row *row, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		enum moe_status st;

		fill(r);
		st = row[i].call(r);
		if (st != row[i].status || !strstr(moe_last_error(), row[i].says))
			printf("row %zu: %s: %s; expected \"%s\"\n", i, moe_status_text(st), moe_last_error(), row[i].says);
		CU_ASSERT_EQUAL(st, row[i].status);
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), row[i].says));
	}
}

#define CHECK(r, rows) check(r, rows, sizeof(rows) / sizeof *(rows))

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

/* ---- the trainer's parameters ---- */

#define TRAINING(name, change)                                                                     \
	CALL(name)                                                                                 \
	{                                                                                          \
		r->t.change;                                                                       \
		return moe_train_check(&r->t);                                                     \
	}
TRAINING(train_unsized, struct_size = 8)
TRAINING(train_nothing, data = NULL)
TRAINING(train_rate, learning_rate = -1)
TRAINING(train_ratio, warmup_ratio = 2)
TRAINING(train_split, eval_split = 1.5)
TRAINING(train_batch, batch_size = -1)
TRAINING(train_epochs, epochs = -1)
TRAINING(train_decay, weight_decay = NAN)
TRAINING(train_delay, eval_delay = -1)
TRAINING(train_logging, logging_steps = -3)
TRAINING(train_eval, eval_steps = 2.5)
TRAINING(train_saving, save_steps = -1.5)
TRAINING(train_best, load_best = 1)
TRAINING(train_drop_last, drop_last = 1)
TRAINING(train_schedule, schedule = "sawtooth")
TRAINING(train_measured, schedule = "reduce_lr_on_plateau")

CALL(train_kwargs)
{
	r->t.schedule = "cosine_with_min_lr";
	r->t.schedule_args = "min_lr=1e-6,min_lr_rate=0.1";
	return moe_train_check(&r->t);
}
CALL(train_min_lr)
{
	r->t.schedule = "cosine_with_min_lr";
	r->t.schedule_args = "min_lr=1";
	return moe_train_check(&r->t);
}
CALL(train_timescale)
{
	r->t.schedule = "inverse_sqrt";
	r->t.schedule_args = "timescale=0";
	return moe_train_check(&r->t);
}
CALL(train_shape)
{
	r->t.schedule = "warmup_stable_decay";
	r->t.schedule_args = "num_decay_steps=2,decay_type=square";
	return moe_train_check(&r->t);
}
CALL(train_too_short)
{
	r->t.schedule = "warmup_stable_decay";
	r->t.schedule_args = "num_decay_steps=9";
	r->t.max_steps = 4;
	return moe_train_check(&r->t);
}
CALL(train_not_a_number)
{
	r->t.schedule = "polynomial";
	r->t.schedule_args = "power=two";
	return moe_train_check(&r->t);
}

static const struct row training[] = {
	{ train_unsized, MOE_ERR_ARG, "trainer params: struct_size is not set" },
	{ train_nothing, MOE_ERR_ARG, "training needs data and an output directory" },
	{ train_rate, MOE_ERR_ARG, "learning_rate is -1; 0 (1e-4) or more" },
	{ train_ratio, MOE_ERR_ARG, "warmup_ratio is 2; 0 to 1" },
	{ train_split, MOE_ERR_ARG, "eval_split is 1.5; a share below 1 or a whole number" },
	{ train_batch, MOE_ERR_ARG, "batch_size is -1; 0 or more" },
	{ train_epochs, MOE_ERR_ARG, "epochs is -1; 0 or more" },
	{ train_decay, MOE_ERR_ARG, "weight_decay is" },
	{ train_delay, MOE_ERR_ARG, "eval_delay is -1" },
	{ train_logging, MOE_ERR_ARG, "logging_steps is -3; a whole number of steps, or a share" },
	{ train_eval, MOE_ERR_ARG, "eval_steps is 2.5" },
	{ train_saving, MOE_ERR_ARG, "save_steps is -1.5" },
	{ train_best, MOE_ERR_ARG, "give evaluation data or eval_split" },
	{ train_drop_last, MOE_ERR_ARG, "drop_last goes with batch_size" },
	{ train_schedule, MOE_ERR_ARG, "learning-rate schedule \"sawtooth\"; supported:" },
	{ train_measured, MOE_ERR_ARG, "follows a measured loss" },
	{ train_kwargs, MOE_ERR_ARG, "min_lr and min_lr_rate: one of them" },
	{ train_min_lr, MOE_ERR_ARG, "schedule argument min_lr: 1 is above the learning rate" },
	{ train_timescale, MOE_ERR_ARG, "schedule argument timescale: 0" },
	{ train_shape, MOE_ERR_ARG, "decay_type: \"square\"; linear, cosine and 1-sqrt" },
	{ train_too_short, MOE_ERR_ARG, "of decay are more than all 4" },
	{ train_not_a_number, MOE_ERR_ARG, "schedule argument power: \"two\" is not a number" },
};

/* ---- experts, blocks, estimates ---- */

static enum moe_status create_spoilt(struct refusal *r)
{
	struct moe_expert_layer *l = NULL;
	enum moe_status st = moe_experts_create(r->engine, &r->e, &l);

	CU_ASSERT_PTR_NULL(l);
	return st;
}

#define CREATING(name, change)                                                                     \
	CALL(name)                                                                                 \
	{                                                                                          \
		r->e.change;                                                                       \
		return create_spoilt(r);                                                           \
	}
CREATING(experts_unsized, struct_size = 8)
CREATING(experts_hidden, hidden = 0)
CREATING(experts_per_token, experts_per_token = 0)
CREATING(experts_rank, lora_rank = -1)
CREATING(experts_micro, micro_batches = 9)
CREATING(experts_alpha, lora_alpha = 0)
CREATING(experts_dropout, lora_dropout = 2)
CREATING(experts_activations, activations = 5)
CREATING(experts_format, weight_format = "int3")
CREATING(experts_dtype, weight_dtype = MOE_I64)
CREATING(experts_limit, swiglu_limit = -1)

CALL(experts_large)
{
	r->e.hidden = r->e.intermediate = 1 << 30;
	return create_spoilt(r);
}
CALL(experts_direct)
{
	r->e.weight_format = "int8";
	r->e.backward_weights = "ring";
	return create_spoilt(r);
}

static enum moe_status block_spoilt(struct refusal *r)
{
	struct moe_block *b = NULL;
	enum moe_status st = moe_block_create(r->engine, &r->b, &b);

	CU_ASSERT_PTR_NULL(b);
	return st;
}

#define BLOCK(name, change)                                                                        \
	CALL(name)                                                                                 \
	{                                                                                          \
		r->b.change;                                                                       \
		return block_spoilt(r);                                                            \
	}
BLOCK(block_unsized, struct_size = 8)
BLOCK(block_hidden, hidden = 0)
BLOCK(block_experts, experts = 1 << 20)
BLOCK(block_per_token, experts_per_token = 0)
BLOCK(block_rank, lora_rank = -1)
BLOCK(block_activations, activations = 5)
BLOCK(block_dtype, weight_dtype = MOE_I32)
BLOCK(block_router, router = "roulette")
BLOCK(block_format, weight_format = "int3")

CALL(block_large)
{
	r->b.hidden = r->b.intermediate = 1 << 30;
	return block_spoilt(r);
}
CALL(block_group)
{
	r->b.weight_format = "int8";
	r->b.weight_group = -1;
	return block_spoilt(r);
}
CALL(block_frozen)
{
	r->b.weight_format = "int8";
	r->b.train_base = 1;
	return block_spoilt(r);
}
CALL(block_direct)
{
	r->b.weight_format = "int8";
	r->b.backward_weights = "ring";
	return block_spoilt(r);
}
CALL(estimate_unsized)
{
	struct moe_estimate out = { .struct_size = 8 };

	return moe_estimate(&r->s, &out);
}
CALL(estimate_negative)
{
	struct moe_estimate out = { .struct_size = sizeof out };

	r->s.tokens = -1;
	return moe_estimate(&r->s, &out);
}
CALL(optimizer_of_none)
{
	struct moe_optimizer *o;

	return moe_optimizer_create(r->engine, NULL, 0, &o);
}
CALL(optimizer_of_null)
{
	struct moe_expert_layer *none = NULL;
	struct moe_optimizer *o;

	return moe_optimizer_create(r->engine, &none, 1, &o);
}
CALL(optimizer_step_of_none)
{
	struct moe_adamw_params p = { .struct_size = sizeof p, .learning_rate = 1e-3, .max_grad_norm = -1 };

	return moe_optimizer_step(NULL, &p);
}

static const struct row parts[] = {
	{ experts_unsized, MOE_ERR_ARG, "experts params: struct_size is not set" },
	{ experts_hidden, MOE_ERR_ARG, "hidden 0, intermediate 16, 2 experts; positive sizes" },
	{ experts_per_token, MOE_ERR_ARG, "experts_per_token is 0; 1 to" },
	{ experts_rank, MOE_ERR_ARG, "lora_rank -1" },
	{ experts_micro, MOE_ERR_ARG, "9 micro_batches beside each other need a max_cache_depth of 8" },
	{ experts_large, MOE_ERR_NOFIT, "are too large" },
	{ experts_alpha, MOE_ERR_ARG, "lora_alpha is 0; with a rank it must be positive" },
	{ experts_dropout, MOE_ERR_ARG, "lora_dropout is 2" },
	{ experts_activations, MOE_ERR_ARG, "activations is 5; 0 (retain)" },
	{ experts_format, MOE_ERR_ARG, "unknown weight_format \"int3\"" },
	{ experts_dtype, MOE_ERR_ARG, "weight_dtype" },
	{ experts_limit, MOE_ERR_ARG, "swiglu" },
	{ experts_direct, MOE_ERR_UNSUPPORTED, "backward_weights is \"ring\"; \"direct\" is possible with format int8" },
	{ block_unsized, MOE_ERR_ARG, "block params: struct_size is not set" },
	{ block_hidden, MOE_ERR_ARG, "block of hidden 0, intermediate 16, 2 experts; positive sizes" },
	{ block_experts, MOE_ERR_ARG, "1048576 experts; at most" },
	{ block_per_token, MOE_ERR_ARG, "experts_per_token is 0; 1 to" },
	{ block_rank, MOE_ERR_ARG, "lora_rank -1, shared_intermediate 0" },
	{ block_large, MOE_ERR_NOFIT, "is too large" },
	{ block_activations, MOE_ERR_ARG, "activations is 5" },
	{ block_dtype, MOE_ERR_ARG, "is not a float type" },
	{ block_router, MOE_ERR_ARG, "unknown router \"roulette\"" },
	{ block_format, MOE_ERR_ARG, "unknown weight_format \"int3\"" },
	{ block_group, MOE_ERR_ARG, "weight_group is -1; 0 (the format's own)" },
	{ block_frozen, MOE_ERR_UNSUPPORTED, "weights in format int8 are frozen" },
	{ block_direct, MOE_ERR_UNSUPPORTED, "backward_weights is \"ring\"; \"direct\"" },
	{ estimate_unsized, MOE_ERR_ARG, "estimate: struct_size and a model are needed" },
	{ estimate_negative, MOE_ERR_ARG, "tokens -1, micro_batches 0, document_tokens 0; none may be negative" },
	{ optimizer_of_none, MOE_ERR_ARG, "optimizer: 0 layers; at least one" },
	{ optimizer_of_null, MOE_ERR_ARG, "optimizer: layer 0 of 1 is NULL" },
	{ optimizer_step_of_none, MOE_ERR_ARG, "max_grad_norm is -1; 0 (no clipping)" },
};

/* ---- files, traces, machines ---- */

#define FILES(name, what, function, change)                                                        \
	CALL(name)                                                                                 \
	{                                                                                          \
		r->what.change;                                                                    \
		return function(&r->what, NULL);                                                   \
	}
FILES(merge_unsized, g, moe_merge, struct_size = 8)
FILES(merge_nothing, g, moe_merge, adapter = NULL)
FILES(merge_shards, g, moe_merge, max_shard_bytes = -1)
FILES(adapter_unsized, a, moe_convert_adapter, struct_size = 8)
FILES(adapter_nothing, a, moe_convert_adapter, in = NULL)
FILES(adapter_form, a, moe_convert_adapter, adapter_format = "zip")
FILES(weights_unsized, w, moe_convert_model, struct_size = 8)
FILES(weights_nothing, w, moe_convert_model, weights = NULL)
FILES(weights_threads, w, moe_convert_model, threads = -1)
FILES(weights_keep, w, moe_convert_model, weights = "keep")
FILES(weights_parts, w, moe_convert_model, kt_parts = 65)
FILES(weights_no_parts, w, moe_convert_model, kt_parts = 2)
FILES(weights_unknown, w, moe_convert_model, weights = "int3")
FILES(weights_layers, w, moe_convert_model, layers = "attention")

CALL(weights_kt_layers)
{
	r->w.weights = "kt-int8";
	r->w.layers = "linear";
	return moe_convert_model(&r->w, NULL);
}
CALL(merge_result_unsized)
{
	struct moe_merge_result result = { .struct_size = 8 };

	return moe_merge(&r->g, &result);
}
CALL(inspect_nothing)
{
	return moe_inspect("x", NULL);
}
CALL(inspect_unsized)
{
	struct moe_inspect_params p = { .struct_size = 1 };
	char *json;

	return moe_inspect_with("x", &p, &json);
}
CALL(trace_nowhere)
{
	struct moe_trace_params p = { .struct_size = sizeof p };

	return moe_trace_start(r->engine, &p);
}
CALL(trace_ring)
{
	struct moe_trace_params p = { .struct_size = sizeof p, .file = "x.mxt", .ring_bytes = (size_t)1 << 40 };

	return moe_trace_start(r->engine, &p);
}
CALL(trace_config)
{
	const char *config[] = { "a=b", "c" };
	struct moe_trace_params p = { .struct_size = sizeof p, .file = "x.mxt", .config = config, .n_config = 2 };

	return moe_trace_start(r->engine, &p);
}
CALL(trace_folder)
{
	struct moe_trace_params p = { .struct_size = sizeof p, .file = moe_test_dir() };

	return moe_trace_start(r->engine, &p);
}
CALL(trace_of_none)
{
	return moe_trace_stop(r->engine, NULL);
}
CALL(trace_info_unsized)
{
	struct moe_trace_info info = { .struct_size = 8 };

	return moe_trace_stop(r->engine, &info);
}
CALL(machine_unsized)
{
	struct moe_machine_info info = { .struct_size = 8 };

	return moe_machine_describe(&info);
}
CALL(calibrate_unsized)
{
	struct moe_calibrate_params p = { .struct_size = 8 };

	return moe_machine_calibrate(&p, NULL);
}
CALL(roof_threads)
{
	double gbps;

	return moe_machine_read_roof(-1, &gbps);
}

static const struct row files[] = {
	{ merge_unsized, MOE_ERR_ARG, "merge params: struct_size is not set" },
	{ merge_result_unsized, MOE_ERR_ARG, "merge result: struct_size is not set" },
	{ merge_nothing, MOE_ERR_ARG, "model, adapter or output_dir is NULL" },
	{ merge_shards, MOE_ERR_ARG, "max_shard_bytes is -1; 0 (no limit)" },
	{ adapter_unsized, MOE_ERR_ARG, "convert params: struct_size is not set" },
	{ adapter_nothing, MOE_ERR_ARG, "in, out or adapter_format is NULL" },
	{ adapter_form, MOE_ERR_ARG, "adapter format 'zip' is none of" },
	{ weights_unsized, MOE_ERR_ARG, "convert params: struct_size is not set" },
	{ weights_nothing, MOE_ERR_ARG, "in, out or weights is NULL" },
	{ weights_threads, MOE_ERR_ARG, "threads -1; none may be negative" },
	{ weights_keep, MOE_ERR_ARG, "converts nothing: name a format" },
	{ weights_parts, MOE_ERR_ARG, "kt_parts 65: 1 to 64 are possible" },
	{ weights_no_parts, MOE_ERR_ARG, "weights \"int8\": kt_parts and kt_backward are for \"kt-int8\"" },
	{ weights_kt_layers, MOE_ERR_ARG, "weights \"kt-int8\" are experts: layers \"linear\" is not possible" },
	{ weights_unknown, MOE_ERR_ARG, "weights \"int3\": int8, int4" },
	{ weights_layers, MOE_ERR_ARG, "layers \"attention\": experts and linear" },
	{ inspect_nothing, MOE_ERR_ARG, "path or json is NULL" },
	{ inspect_unsized, MOE_ERR_ARG, "inspect params: struct_size is not set" },
	{ trace_nowhere, MOE_ERR_ARG, "struct_size and file are needed" },
	{ trace_ring, MOE_ERR_ARG, "ring_bytes is 1099511627776; at most" },
	{ trace_config, MOE_ERR_ARG, "config[1] is not \"key=value\"" },
	{ trace_folder, MOE_ERR_IO, "Is a directory" },
	{ trace_of_none, MOE_ERR_STATE, "no trace is being written" },
	{ trace_info_unsized, MOE_ERR_ARG, "trace info: struct_size is not set" },
	{ machine_unsized, MOE_ERR_ARG, "machine info: struct_size is not set" },
	{ calibrate_unsized, MOE_ERR_ARG, "calibrate params: struct_size is not set" },
	{ roof_threads, MOE_ERR_ARG, "-1 threads" },
};

/* ---- rows, steps, digests ---- */

static float data[64 * 16];

CALL(rows_of_none)
{
	struct moe_rows *rows;

	return moe_rows_create(r->engine, NULL, 4, &rows);
}
CALL(rows_twice)
{
	struct moe_rows *first, *second;
	enum moe_status st = moe_rows_create(r->engine, data, 4, &first);

	CU_ASSERT_EQUAL_FATAL(st, MOE_OK);
	st = moe_rows_create(r->engine, data, 4, &second);
	moe_rows_destroy(first);
	return st;
}
CALL(digest_of_none)
{
	char text[MOE_SHA256_TEXT];

	return moe_file_sha256("/nonexistent/file", text);
}
CALL(digest_of_folder)
{
	char text[MOE_SHA256_TEXT];

	return moe_file_sha256(moe_test_dir(), text);
}

static struct moe_engine *engine_of_layers;

/* What a call with one layer's experts says: they are made for it. */
static enum moe_status with_layer(struct refusal *r, enum moe_status (*call)(struct moe_expert_layer *))
{
	struct moe_expert_layer *l = NULL;
	enum moe_status st;

	engine_of_layers = r->engine;
	CU_ASSERT_EQUAL_FATAL(moe_experts_create(r->engine, &r->e, &l), MOE_OK);
	st = call(l);
	moe_experts_destroy(l);
	return st;
}

static enum moe_status layer_info(struct moe_expert_layer *l)
{
	struct moe_experts_info info = { .struct_size = 8 };

	return moe_experts_get_info(l, &info);
}
static enum moe_status layer_dropout(struct moe_expert_layer *l)
{
	return moe_experts_set_dropout(l, 7, 0, 0);
}
static enum moe_status layer_array(struct moe_expert_layer *l)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };

	return moe_experts_set_array(l, (enum moe_block_array)99, &a);
}
static enum moe_status layer_weights(struct moe_expert_layer *l)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };

	return moe_experts_set_array(l, MOE_BLOCK_GATE_PROJ, &a);
}
static enum moe_status layer_narrow(struct moe_expert_layer *l)
{
	struct moe_array a = { .data = data, .dtype = MOE_BF16, .ndim = 3, .shape = { 2, 2, 16 } };

	return moe_experts_get_array(l, MOE_BLOCK_GATE_LORA_A, &a);
}
static enum moe_status layer_frozen(struct moe_expert_layer *l)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };

	return moe_experts_get_array(l, MOE_BLOCK_GATE_PROJ, &a);
}
static enum moe_status layer_gradient(struct moe_expert_layer *l)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 2, 16 } };

	return moe_experts_get_gradient(l, MOE_BLOCK_GATE_LORA_A, &a);
}
static enum moe_status layer_file(struct moe_expert_layer *l)
{
	return moe_experts_load_file(l, moe_test_path("tests/fixtures/ckpt/qwen3moe"),
				     "a.prefix.that.no.tensor.of.any.checkpoint.will.ever.have.because.it.is.far.too.long.for.a.name.to."
				     "be.made.of.it.and.of.what.follows.it.in.the.file.which.is.the.number.of.an.expert.and.its.matrix",
				     NULL, 0);
}
static enum moe_status layer_norm(struct moe_expert_layer *l)
{
	struct moe_adamw_params p = { .struct_size = sizeof p, .learning_rate = 1e-3, .max_grad_norm = 1 };

	return moe_experts_update(l, &p);
}
static enum moe_status layer_repack(struct moe_expert_layer *l)
{
	return moe_experts_update_base(l);
}
static enum moe_status layer_bind(struct moe_expert_layer *l)
{
	return moe_experts_bind_lora(l, NULL);
}
static enum moe_status layer_codes(struct moe_expert_layer *l)
{
	struct moe_quantised_arrays q = { .struct_size = sizeof q };

	return moe_experts_load_quantised(l, &q, &q, &q, 0, NULL, 0);
}

static enum moe_status layer_alike(struct moe_expert_layer *l)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } }, b = a;

	b.dtype = MOE_BF16;
	return moe_experts_load(l, &a, &b, &a, NULL, 0);
}
static enum moe_status layer_checkpoint(struct moe_expert_layer *l)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 2, .shape = { (int64_t)1 << 31, 16 } };

	CU_ASSERT_EQUAL(moe_experts_checkpoint_begin(l), MOE_OK);
	return moe_experts_checkpoint_put(l, &a);
}

/* Codes of INT8, good but for what the row changes. */
static enum moe_status load_codes(struct moe_expert_layer *l, size_t size, int64_t experts, bool none)
{
	static int8_t codes[3 * 16 * 16];
	static float scale[3 * 16];
	struct moe_quantised_arrays q = {
		.struct_size = size,
		.codes = { .data = codes, .dtype = MOE_I8, .ndim = 3, .shape = { experts, 16, 16 } },
		.scale = { .data = scale, .dtype = MOE_F32, .ndim = 3, .shape = { experts, 16, 1 } },
	};

	return moe_experts_load_quantised(l, &q, none ? NULL : &q, &q, 0, NULL, 0);
}
static enum moe_status layer_codes_unsized(struct moe_expert_layer *l)
{
	return load_codes(l, 8, 2, false);
}
static enum moe_status layer_codes_null(struct moe_expert_layer *l)
{
	return load_codes(l, sizeof(struct moe_quantised_arrays), 2, true);
}
static enum moe_status layer_codes_experts(struct moe_expert_layer *l)
{
	return load_codes(l, sizeof(struct moe_quantised_arrays), 3, false);
}
/* More rows than the keeper of their order was told. */
static enum moe_status layer_rows(struct moe_expert_layer *l)
{
	static float x[4 * 16], out[4 * 16], weights[4] = { 1, 1, 1, 1 };
	static int32_t chosen[4];
	struct moe_array w = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };
	struct moe_array a = { .data = x, .dtype = MOE_F32, .ndim = 2, .shape = { 4, 16 } }, o = a;
	struct moe_array i = { .data = chosen, .dtype = MOE_I32, .ndim = 2, .shape = { 4, 1 } };
	struct moe_array p = { .data = weights, .dtype = MOE_F32, .ndim = 2, .shape = { 4, 1 } };
	struct moe_rows *rows;
	enum moe_status st;

	o.data = out;
	CU_ASSERT_EQUAL_FATAL(moe_experts_load(l, &w, &w, &w, NULL, 0), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_experts_init_lora(l, 1), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_rows_create(engine_of_layers, x, 2, &rows), MOE_OK);
	st = moe_experts_forward_async(l, &a, &i, &p, 0, &o);
	moe_rows_destroy(rows);
	return st;
}

#define LAYER(name)                                                                                \
	CALL(of_##name)                                                                            \
	{                                                                                          \
		return with_layer(r, layer_##name);                                                \
	}
LAYER(info)
LAYER(dropout)
LAYER(array)
LAYER(weights)
LAYER(narrow)
LAYER(frozen)
LAYER(gradient)
LAYER(file)
LAYER(norm)
LAYER(repack)
LAYER(bind)
LAYER(codes)
LAYER(alike)
LAYER(checkpoint)
LAYER(rows)

#define CODES(name)                                                                                \
	CALL(of_##name)                                                                            \
	{                                                                                          \
		r->e.weight_format = "int8";                                                       \
		return with_layer(r, layer_##name);                                                \
	}
CODES(codes_unsized)
CODES(codes_null)
CODES(codes_experts)

CALL(of_no_rank)
{
	struct moe_expert_layer *l = NULL;
	enum moe_status st;

	r->e.lora_rank = 0;
	CU_ASSERT_EQUAL_FATAL(moe_experts_create(r->engine, &r->e, &l), MOE_OK);
	st = moe_experts_init_lora(l, 1);
	moe_experts_destroy(l);
	return st;
}
CALL(of_nothing_to_train)
{
	struct moe_expert_layer *l = NULL;
	struct moe_optimizer *o = NULL;
	enum moe_status st;

	r->e.lora_rank = 0;
	CU_ASSERT_EQUAL_FATAL(moe_experts_create(r->engine, &r->e, &l), MOE_OK);
	st = moe_optimizer_create(r->engine, &l, 1, &o);
	moe_experts_destroy(l);
	return st;
}
CALL(of_one_twice)
{
	struct moe_expert_layer *l[2] = { NULL, NULL };
	struct moe_optimizer *o = NULL;
	enum moe_status st;

	CU_ASSERT_EQUAL_FATAL(moe_experts_create(r->engine, &r->e, &l[0]), MOE_OK);
	l[1] = l[0];
	st = moe_optimizer_create(r->engine, l, 2, &o);
	moe_experts_destroy(l[0]);
	return st;
}
CALL(optimizer_null)
{
	struct moe_adamw_params p = { .struct_size = sizeof p, .learning_rate = 1e-3 };

	return moe_optimizer_step(NULL, &p);
}
CALL(optimizer_wait)
{
	struct moe_expert_layer *l = NULL;
	struct moe_optimizer *o = NULL;
	enum moe_status st;

	CU_ASSERT_EQUAL_FATAL(moe_experts_create(r->engine, &r->e, &l), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_optimizer_create(r->engine, &l, 1, &o), MOE_OK);
	st = moe_optimizer_wait(o, 3, NULL);
	moe_optimizer_destroy(o);
	moe_experts_destroy(l);
	return st;
}

static const struct row layers[] = {
	{ rows_of_none, MOE_ERR_ARG, "rows: no data, 4 tokens; data and at least one token" },
	{ rows_twice, MOE_ERR_ARG, "the order of this data is kept already" },
	{ digest_of_none, MOE_ERR_IO, "/nonexistent/file: cannot open" },
	{ digest_of_folder, MOE_ERR_IO, "cannot read: Is a directory" },
	{ of_info, MOE_ERR_ARG, "experts info: struct_size is not set" },
	{ of_dropout, MOE_ERR_ARG, "dropout mode 7, position 0; 0 to 2" },
	{ of_array, MOE_ERR_ARG, "these experts have no array 99" },
	{ of_weights, MOE_ERR_ARG, "is set by moe_experts_load or moe_experts_update_base" },
	{ of_narrow, MOE_ERR_ARG, "dtype BF16 is not possible here; F32 and F64 are" },
	{ of_frozen, MOE_ERR_STATE, "cannot be read: train_base is not set" },
	{ of_gradient, MOE_ERR_STATE, "there are no gradients: the window is closed" },
	{ of_file, MOE_ERR_ARG, "is too long" },
	{ of_norm, MOE_ERR_UNSUPPORTED, "max_grad_norm is a matter of the trainer" },
	{ of_repack, MOE_ERR_STATE, "has no weights: load them first" },
	{ of_bind, MOE_ERR_ARG, "the parameters to bind are NULL" },
	{ of_codes, MOE_ERR_STATE, "has no weight_format: create it with the weights' format" },
	{ of_alike, MOE_ERR_ARG, "up_proj is BF16 and gate_proj F32; they must be alike" },
	{ of_checkpoint, MOE_ERR_ARG, "out has 2147483648 rows; at most" },
	{ of_rows, MOE_ERR_ARG, "x has 4 rows, moe_rows_create of its data was told 2" },
	{ of_codes_unsized, MOE_ERR_ARG, "quantised arrays: struct_size is not set" },
	{ of_codes_null, MOE_ERR_ARG, "it is NULL" },
	{ of_codes_experts, MOE_ERR_ARG, "codes must have 2 experts as its first dimension" },
	{ of_no_rank, MOE_ERR_STATE, "lora_rank is 0: there is no LoRA to initialise" },
	{ of_nothing_to_train, MOE_ERR_ARG, "optimizer: layer 0 trains nothing: no LoRA, no train_base" },
	{ of_one_twice, MOE_ERR_ARG, "optimizer: layers 0 and 1 are the same" },
	{ optimizer_null, MOE_ERR_ARG, "optimizer is NULL" },
	{ optimizer_wait, MOE_ERR_ARG, "optimizer: step 3; 0 (the last one) to 0 are possible" },
};

/* ---- a block ---- */

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

/* One expert's scales by row, the other's by group of eight columns; n arrays of single experts. */
static enum moe_status layer_groups(struct moe_expert_layer *l)
{
	static int8_t codes[16 * 16];
	struct moe_quantised_arrays q[2];

	for (size_t i = 0; i < 32; i++)
		data[i] = 1;
	for (int e = 0; e < 2; e++)
		q[e] = (struct moe_quantised_arrays){
			.struct_size = sizeof q[e],
			.codes = { .data = codes, .dtype = MOE_I8, .ndim = 2, .shape = { 16, 16 } },
			.scale = { .data = data, .dtype = MOE_F32, .ndim = 2, .shape = { 16, e + 1 } },
		};
	return moe_experts_load_quantised(l, q, q, q, 2, NULL, 0);
}
CODES(groups)

static enum moe_status layer_wide(struct moe_expert_layer *l)
{
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };

	return moe_experts_load(l, &a, &a, &a, NULL, 0);
}
CALL(of_wide)
{
	r->e.weight_dtype = MOE_BF16;
	return with_layer(r, layer_wide);
}

/* gate and down of F32, up of BF16. */
static enum moe_status layer_bases(struct moe_expert_layer *l)
{
	static float base[3][2 * 16 * 16];
	struct moe_array a = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };
	struct moe_gradient three[3] = { { .param = a }, { .param = a }, { .param = a } };

	CU_ASSERT_EQUAL_FATAL(moe_experts_load(l, &a, &a, &a, NULL, 0), MOE_OK);
	for (int i = 0; i < 3; i++)
		three[i].param.data = base[i];
	three[1].param.dtype = MOE_BF16;
	return moe_experts_bind_base(l, three);
}
CALL(of_bases)
{
	r->e.train_base = 1;
	return with_layer(r, layer_bases);
}

/* Gradients are published: nothing new can be bound. */
static enum moe_status layer_open(struct moe_expert_layer *l)
{
	static float x[16], y[16], weights[1] = { 1 }, six[6][2 * 2 * 16];
	static int32_t chosen[1];
	struct moe_array w = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };
	struct moe_array a = { .data = x, .dtype = MOE_F32, .ndim = 2, .shape = { 1, 16 } }, o = a;
	struct moe_array i = { .data = chosen, .dtype = MOE_I32, .ndim = 2, .shape = { 1, 1 } };
	struct moe_array p = { .data = weights, .dtype = MOE_F32, .ndim = 2, .shape = { 1, 1 } };
	struct moe_gradient g[6];

	o.data = y;
	for (int j = 0; j < 6; j++) {
		bool b = j % 2;

		g[j] = (struct moe_gradient){ .param = { .data = six[j], .dtype = MOE_F32, .ndim = 3,
							 .shape = { 2, b ? 16 : 2, b ? 2 : 16 } } };
	}
	CU_ASSERT_EQUAL_FATAL(moe_experts_load(l, &w, &w, &w, NULL, 0), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_experts_init_lora(l, 1), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_experts_forward(l, &a, &i, &p, 1, &o), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_experts_backward(l, &o, 1, &a, NULL), MOE_OK);
	return moe_experts_bind_lora(l, g);
}
LAYER(open)

/* Codes for gate and up of all experts, plain weights for down. */
static enum moe_status layer_half(struct moe_expert_layer *l)
{
	static uint8_t codes[2 * 32 * 16];
	static const float scale[2] = { 1, 1 };
	struct moe_st_item items[] = {
		{ .name = "p.mlp.experts.gate_up_proj", .dtype = MOE_F8_E4M3, .ndim = 3, .shape = { 2, 32, 16 }, .data = codes },
		{ .name = "p.mlp.experts.gate_up_proj_scale_inv", .dtype = MOE_F32, .ndim = 3, .shape = { 2, 1, 1 }, .data = scale },
		{ .name = "p.mlp.experts.down_proj", .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 }, .data = data },
	};
	char path[600];

	snprintf(path, sizeof path, "%s/half.safetensors", moe_test_dir());
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_write(path, items, 3, NULL, 0), MOE_OK);
	return moe_experts_load_file(l, path, "p", NULL, 0);
}
CALL(of_half)
{
	r->e.weight_format = "fp8";
	return with_layer(r, layer_half);
}

/* Experts of a file: `dtype` for one matrix, F32 for the others. */
static enum moe_status load_file(struct moe_expert_layer *l, enum moe_dtype dtype)
{
	static const char *const names[3] = { "gate", "up", "down" };
	struct moe_st_item items[6];
	char name[6][64], path[600];

	for (int i = 0; i < 6; i++) {
		snprintf(name[i], sizeof name[i], "p.mlp.experts.%d.%s_proj.weight", i / 3, names[i % 3]);
		items[i] = (struct moe_st_item){
			.name = name[i], .dtype = i == 4 ? dtype : MOE_F32, .ndim = 2, .shape = { 16, 16 }, .data = data
		};
	}
	snprintf(path, sizeof path, "%s/experts.safetensors", moe_test_dir());
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_write(path, items, 6, NULL, 0), MOE_OK);
	return moe_experts_load_file(l, path, "p", NULL, 0);
}
static enum moe_status layer_mixed(struct moe_expert_layer *l)
{
	return load_file(l, MOE_BF16);
}
LAYER(mixed)

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
	{ of_groups, MOE_ERR_FORMAT, "they must be alike" },
	{ of_wide, MOE_ERR_ARG, "gate_proj is F32, wider than weight_dtype BF16" },
	{ of_bases, MOE_ERR_ARG, "base parameters are F32 and BF16; they must be alike" },
	{ of_open, MOE_ERR_STATE, "binding needs a closed gradient window: release the gradients first" },
	{ of_half, MOE_ERR_FORMAT, "down_proj: gate_up_proj is quantised, this one has no codes" },
	{ of_mixed, MOE_ERR_FORMAT, "experts.1.up_proj.weight is BF16, other experts are F32" },
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

/* ---- after fork ---- */

static void forked(void)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2 };
	struct moe_engine *e = NULL;
	int status = 0;
	pid_t child;

	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &e), MOE_OK);
	child = fork();
	if (!child) {
		struct moe_engine *again = NULL;
		bool good = moe_engine_wait(e) == MOE_ERR_FORKED && strstr(moe_last_error(), "cannot be used after fork");

		good = good && moe_engine_open(&p, &again) == MOE_ERR_FORKED && strstr(moe_last_error(), "StarPU cannot be used in it");
		_exit(!good);
	}
	CU_ASSERT_EQUAL(waitpid(child, &status, 0), child);
	CU_ASSERT_EQUAL(status, 0);
	CU_ASSERT_EQUAL(moe_engine_close(e), MOE_OK);
}

static void refused(void)
{
	/* ref: F32 stays F32, so that widths differ */
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2, .isa = "ref" };
	struct refusal r = { 0 };

	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &r.engine), MOE_OK);
	CHECK(&r, opening);
	fill(&r);
	CU_ASSERT_EQUAL_FATAL(moe_model_open(r.engine, &r.m, &r.model), MOE_OK);
	CHECK(&r, calls);
	moe_model_close(r.model);
	CHECK(&r, training);
	CHECK(&r, parts);
	CHECK(&r, files);
	CHECK(&r, layers);
	CHECK(&r, blocks);
	CHECK(&r, adapters);
	CU_ASSERT_EQUAL(moe_engine_close(r.engine), MOE_OK);
}

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

const struct moe_test moe_suite_tests[] = {
	{ "rows", refused },
	{ "copies that have no room", copies },
	{ "after fork", forked },
	{ NULL, NULL },
};
