/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of training, of objects that are created, of files, traces and machines; a process after fork. */
#include "tests/refusals.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

const char moe_suite_name[] = "refusals";

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
	{ weights_unknown, MOE_ERR_ARG, "weights \"int3\": fp8, gptq" },
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
	struct refusal r = { .engine = refusals_engine() };

	CHECK(&r, training);
	CHECK(&r, parts);
	CHECK(&r, files);
	CU_ASSERT_EQUAL(moe_engine_close(r.engine), MOE_OK);
}

const struct moe_test moe_suite_tests[] = {
	{ "rows", refused },
	{ "after fork", forked },
	{ NULL, NULL },
};
