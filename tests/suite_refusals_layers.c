/* SPDX-License-Identifier: Apache-2.0 */
/* Experts of a layer, their optimizer. Blocks: suite_refusals_blocks. */
#include "tests/refusals.h"

#include "model/readers/safetensors_writer.h"

const char moe_suite_name[] = "refusals_layers";

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

/* One token each in x and out, whose strides the rows change. */
static enum moe_status forward_of(struct moe_expert_layer *l, struct moe_array x, struct moe_array out)
{
	static float weights[4] = { 1, 1, 1, 1 };
	static int32_t chosen[4];
	struct moe_array w = { .data = data, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 16, 16 } };
	struct moe_array i = { .data = chosen, .dtype = MOE_I32, .ndim = 2, .shape = { 4, 1 } };
	struct moe_array p = { .data = weights, .dtype = MOE_F32, .ndim = 2, .shape = { 4, 1 } };

	CU_ASSERT_EQUAL_FATAL(moe_experts_load(l, &w, &w, &w, NULL, 0), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_experts_init_lora(l, 1), MOE_OK);
	return moe_experts_forward(l, &x, &i, &p, 1, &out);
}

static float four_rows[2][16 * 16];

static struct moe_array rows_at(int which, int64_t row, int64_t column)
{
	return (struct moe_array){
		.data = four_rows[which], .dtype = MOE_F32, .ndim = 2, .shape = { 4, 16 }, .strides = { row, column }
	};
}

static enum moe_status layer_one_place(struct moe_expert_layer *l)
{
	/* rows may be read from one place; written ones may be apart, or columns first */
	CU_ASSERT_EQUAL(forward_of(l, rows_at(0, 0, 1), rows_at(1, 1, 4)), MOE_OK);
	CU_ASSERT_EQUAL(forward_of(l, rows_at(0, 16, 1), rows_at(1, 3, 16)), MOE_ERR_STATE); /* a forward is kept: the arrays are good */
	CU_ASSERT_EQUAL(moe_experts_drop(l), MOE_OK);
	CU_ASSERT_EQUAL(forward_of(l, rows_at(0, 16, 1), rows_at(1, 8, 1)), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(forward_of(l, rows_at(0, 16, 1), rows_at(1, 16, 0)), MOE_ERR_ARG);
	return forward_of(l, rows_at(0, 16, 1), rows_at(1, 0, 1));
}
static enum moe_status layer_far(struct moe_expert_layer *l)
{
	return forward_of(l, rows_at(0, (int64_t)1 << 62, 1), rows_at(1, 16, 1));
}
static enum moe_status layer_negative(struct moe_expert_layer *l)
{
	struct moe_array x = rows_at(0, 0, 0);

	x.shape[0] = -4;
	return forward_of(l, x, rows_at(1, 0, 0));
}
static enum moe_status layer_grad_in_one_place(struct moe_expert_layer *l)
{
	struct moe_array g = rows_at(0, 16, 1), gx = rows_at(1, 0, 1), gw = rows_at(1, 0, 0);

	CU_ASSERT_EQUAL_FATAL(forward_of(l, g, rows_at(1, 16, 1)), MOE_OK);
	CU_ASSERT_EQUAL(moe_experts_backward(l, &g, 1, &gx, NULL), MOE_ERR_ARG);
	gx.strides[0] = 16;
	gw.shape[1] = 1;
	gw.strides[1] = 1; /* [4, 1] in one place */
	return moe_experts_backward(l, &g, 1, &gx, &gw);
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
LAYER(one_place)
LAYER(far)
LAYER(negative)
LAYER(grad_in_one_place)

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
/* More than any machine has: mapping it goes, writing it would end the process. */
CALL(too_much)
{
	struct moe_expert_layer *l = NULL;
	enum moe_status st;

	r->e.hidden = 512;
	r->e.lora_rank = 1 << 29;
	st = moe_experts_create(r->engine, &r->e, &l);
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
	{ of_one_place, MOE_ERR_ARG, "out has strides 0 and 1: elements of shape [4, 16] would be written to one place" },
	{ of_far, MOE_ERR_ARG, "x has strides 4611686018427387904 and 1 (in elements): it ends beyond any memory" },
	{ of_negative, MOE_ERR_ARG, "x has shape [-4, 16]: negative" },
	{ of_grad_in_one_place, MOE_ERR_ARG, "grad_weights has strides 0 and 1: elements" },
	{ too_much, MOE_ERR_NOFIT, "experts: " },
	{ of_codes_unsized, MOE_ERR_ARG, "quantised arrays: struct_size is not set" },
	{ of_codes_null, MOE_ERR_ARG, "it is NULL" },
	{ of_codes_experts, MOE_ERR_ARG, "codes must have 2 experts as its first dimension" },
	{ of_no_rank, MOE_ERR_STATE, "lora_rank is 0: there is no LoRA to initialise" },
	{ of_nothing_to_train, MOE_ERR_ARG, "optimizer: layer 0 trains nothing: no LoRA, no train_base" },
	{ of_one_twice, MOE_ERR_ARG, "optimizer: layers 0 and 1 are the same" },
	{ optimizer_null, MOE_ERR_ARG, "optimizer is NULL" },
	{ optimizer_wait, MOE_ERR_ARG, "optimizer: step 3; 0 (the last one) to 0 are possible" },
	{ of_groups, MOE_ERR_FORMAT, "they must be alike" },
	{ of_wide, MOE_ERR_ARG, "gate_proj is F32, wider than weight_dtype BF16" },
	{ of_bases, MOE_ERR_ARG, "base parameters are F32 and BF16; they must be alike" },
	{ of_open, MOE_ERR_STATE, "binding needs a closed gradient window: release the gradients first" },
	{ of_half, MOE_ERR_FORMAT, "down_proj: gate_up_proj is quantised, this one has no codes" },
	{ of_mixed, MOE_ERR_FORMAT, "experts.1.up_proj.weight is BF16, other experts are F32" },
};

static void refused(void)
{
	struct refusal r = { .engine = refusals_engine() };

	CHECK(&r, layers);
	CU_ASSERT_EQUAL(moe_engine_close(r.engine), MOE_OK);
}

const struct moe_test moe_suite_tests[] = {
	{ "rows", refused },
	{ NULL, NULL },
};
