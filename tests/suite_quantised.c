/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised checkpoints in the layouts in which people have them: a model loaded from one has the
 * bits of a model loaded from what it stands for, in every table and cut into parts; and what is
 * refused.
 */
#include "tests/model_check.h"
#include "tests/quantised_check.h"

const char moe_suite_name[] = "quantised";

/* Products of integers have bits of their own: suite_coded and suite_golden. */
static __attribute__((constructor)) void multiply_in_bf16(void)
{
	setenv("MOESAIC_COMPUTE", "bf16", 1);
}

static char coded_dir[300], plain_dir[300];

static void dirs(void)
{
	if (*coded_dir)
		return;
	snprintf(coded_dir, sizeof coded_dir, "%s/coded", moe_test_dir());
	snprintf(plain_dir, sizeof plain_dir, "%s/plain", moe_test_dir());
}

static const char *targets; /* of LoRA; NULL: the usual ones */

static struct moe_model *open_weights(struct moe_engine *e, const char *dir, const char *weights)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = 64,
				      .lora_rank = 4,
				      .seed = 3,
				      .lora_targets = targets,
				      .weights = weights };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	return m;
}

static float *logits_of(struct moe_model *m)
{
	int32_t ids[IDS], rows[3] = { 0, 17, IDS - 1 };
	float *out = calloc(3 * 2048, sizeof *out);
	struct moe_array a = { .data = out, .dtype = MOE_F32, .ndim = 2, .shape = { 3, 2048 } };

	ids_of(ids);
	if (m)
		OK(moe_model_logits(m, ids, IDS, rows, 3, &a));
	return out;
}

/* A step of training: loss, gradient norm and the change of the adapter reach every weight. */
static double train_a_step(struct moe_model *m, double *norm)
{
	int32_t ids[IDS];
	struct run r = { .m = m, .lr = 1e-2 };
	double loss;

	ids_of(ids);
	add_batch(&r, 64);
	moe_model_batch_add(&r.batch[0], ids, NULL, IDS);
	loss = step(&r, true);
	*norm = r.norm.norm;
	free_run(&r);
	return loss;
}

static void compare_models(struct moe_model *a, struct moe_model *b)
{
	double norm[2] = { 0 }, loss[2];
	float *x = logits_of(a), *y = logits_of(b);

	CHECK(!memcmp(x, y, 3 * 2048 * sizeof *x));
	CHECK(x[5] != 0 && isfinite(x[5]));
	free(x), free(y);
	if (!a || !b)
		return;
	for (int i = 0; i < (best_table_takes(1, 2) ? 2 : 0); i++) {
		loss[0] = train_a_step(a, &norm[0]);
		loss[1] = train_a_step(b, &norm[1]);
		CHECK(loss[0] == loss[1] && isfinite(loss[0]));
		CHECK(norm[0] == norm[1] && norm[0] > 0);
	}
	x = logits_of(a), y = logits_of(b);
	CHECK(!memcmp(x, y, 3 * 2048 * sizeof *x));
	free(x), free(y);
}

static int parts;

static void kinds(void)
{
	const char *from = fixture("ckpt/qwen3moe");
	struct moe_engine *e;

	if (!from)
		return;
	dirs();
	e = open_engine(2, parts, NULL);
	for (size_t i = 0; i < MOE_COUNT(quantised_kinds); i++) {
		const struct quantised_kind *k = &quantised_kinds[i];
		struct moe_model_info info = { .struct_size = sizeof info };
		struct moe_model *a, *b;

		if (!best_table_takes(i + (size_t)parts, 6))
			continue;
		make_quantised(from, EXPERTS, k, coded_dir, plain_dir, NULL);
		a = open_weights(e, coded_dir, NULL);
		b = open_weights(e, plain_dir, NULL);
		compare_models(a, b);
		OK(moe_model_get_info(a, &info));
		CHECK(info.expert_format &&
		      !strcmp(info.expert_format, k->zero ? "gptq" : k->format));
		CHECK(!strcmp(info.backward_weights, "direct"));
		moe_model_close(a);
		moe_model_close(b);
	}
	OK(moe_engine_close(e));
}

static void one_part(void)
{
	parts = 1;
	kinds();
}

/* 128 columns over three parts: blocks and groups are cut. */
static void three_parts(void)
{
	parts = 3;
	kinds();
}

static void test_one_part(void)
{
	each_table(one_part);
}

static void test_three_parts(void)
{
	each_table(three_parts);
}

/* --weights: the codes that the same format has on disk, however parts cut them. */
static void converted(void)
{
	const char *from = fixture("ckpt/qwen3moe");
	static const int kind[] = { 1, 3, 4 }; /* no attention */

	if (!from)
		return;
	dirs();
	for (int p = 1; p <= 3; p += 2) {
		struct moe_engine *e = open_engine(2, p, NULL);

		for (size_t i = 0; i < MOE_COUNT(kind); i++) {
			const struct quantised_kind *k = &quantised_kinds[kind[i]];
			struct moe_model *a, *b;

			make_quantised(from, EXPERTS, k, coded_dir, NULL, NULL);
			a = open_weights(e, from, k->format);
			b = open_weights(e, coded_dir, "keep");
			compare_models(a, b);
			moe_model_close(a);
			moe_model_close(b);
		}
		OK(moe_engine_close(e));
	}
}

static void test_converted(void)
{
	converted(); /* codes and layouts are no matter of the table */
}

/*
 * No adapter on experts: gradients go through them to a projection of the first layer, in every
 * format, with the bits of the plain model.
 */
static void test_gradients_below(void)
{
	const char *from = fixture("ckpt/qwen3moe");
	struct moe_engine *e;

	if (!from)
		return;
	dirs();
	targets = "model.layers.0.self_attn.q_proj";
	e = open_engine(2, 1, NULL);
	for (size_t i = 0; i < MOE_COUNT(quantised_kinds); i++) {
		struct moe_model_info info = { .struct_size = sizeof info };
		struct moe_model *a, *b;

		make_quantised(from, EXPERTS, &quantised_kinds[i], coded_dir, plain_dir, NULL);
		a = open_weights(e, coded_dir, NULL);
		b = open_weights(e, plain_dir, NULL);
		OK(moe_model_get_info(a, &info));
		CHECK(info.expert_lora_params == 0 && info.attention_lora_params > 0);
		compare_models(a, b);
		moe_model_close(a);
		moe_model_close(b);
	}
	OK(moe_engine_close(e));
	targets = NULL;
}

/* ---- memory ---- */

/* The weights in memory are the format's, and nothing grows when the model is trained. */
static void test_memory(void)
{
	static const struct {
		const char *weights;
		double bytes; /* per expert weight */
	} list[] = {
		{ "keep", 2 }, { "int8", 1 }, { "fp8", 1 }, { "int4", .5625 }, { "mxfp4", .53125 }
	};
	const char *from = fixture("ckpt/qwen3moe");
	struct moe_engine *e;

	if (!from)
		return;
	e = open_engine(2, 1, NULL);
	for (size_t i = 0; i < MOE_COUNT(list); i++) {
		struct moe_model *m = open_weights(e, from, list[i].weights);
		struct moe_model_info info = { .struct_size = sizeof info };
		int64_t weights, memory;
		double norm, other;

		OK(moe_model_get_info(m, &info));
		weights = info.weight_bytes;
		other = 2.0 * (double)(info.params - info.expert_params);
		train_a_step(m, &norm);
		memory = (int64_t)moe_memory_bytes(e, NULL, -1);
		train_a_step(m, &norm);
		OK(moe_model_get_info(m, &info));
		CHECK(info.weight_bytes == weights);
		CHECK((int64_t)moe_memory_bytes(e, NULL, -1) == memory);
		if (table_is_packed())
			CHECK((double)weights <=
			      1.10 * (list[i].bytes * (double)info.expert_params + other) + 2e5);
		moe_model_close(m);
	}
	OK(moe_engine_close(e));
}

/* ---- errors ---- */

static struct moe_engine *error_engine;
static enum moe_method error_method;

static void refused(const struct quantised_kind *kind, void (*change)(struct made *),
		    const char *weights, enum moe_status want, const char *text)
{
	struct moe_model_params p = {
		.struct_size = sizeof p, .dir = coded_dir, .max_tokens = 64, .weights = weights, .method = error_method
	};
	struct moe_model *m = NULL;

	make_quantised(fixture("ckpt/qwen3moe"), EXPERTS, kind, coded_dir, NULL, change);
	CHECK_ERROR(moe_model_open(error_engine, &p, &m), want, text);
	moe_model_close(m);
}

static void nan_scale(struct made *m)
{
	((float *)item(m, EXPERT ".weight_scale_inv")->data)[0] = NAN;
}

static void scale_shape(struct made *m)
{
	struct moe_st_item *i = item(m, EXPERT ".weight_scale_inv");

	i->shape[0] = 3;
}

static void scale_dtype(struct made *m)
{
	struct moe_st_item *i = item(m, EXPERT ".weight_scale_inv");

	i->dtype = MOE_I64;
}

static void no_codes(struct made *m)
{
	*item(m, EXPERT ".weight_packed") = m->item[m->n - 1];
	m->n--;
}

static void other_group(struct made *m)
{
	item(m, EXPERT ".weight_scale")->shape[1] = 2;
}

static void wrong_groups(struct made *m)
{
	item(m, EXPERT ".weight_scale")->shape[1] = 3;
}

static void act_order(struct made *m)
{
	((int32_t *)item(m, EXPERT ".g_idx")->data)[7] = 2;
}

/* The same values, of rows instead of blocks. */
static void scales_of_rows(struct made *m)
{
	struct moe_st_item *i = item(m, EXPERT ".weight_scale_inv");
	float *scale = own(m, malloc(128 * sizeof *scale));

	for (int n = 0; n < 128; n++)
		scale[n] = *(const float *)i->data;
	i->data = scale;
	i->shape[0] = 128;
}

static void scale_of_others(struct made *m)
{
	item(m, "model.layers.0.mlp.experts.gate_up_proj_scales")->shape[0] = 7;
}

static void test_errors(void)
{
	const struct quantised_kind *fp8 = &quantised_kinds[0], *int4 = &quantised_kinds[3];
	const struct quantised_kind *mxfp4 = &quantised_kinds[4], *gptq = &quantised_kinds[5];

	if (!fixture("ckpt/qwen3moe"))
		return;
	dirs();
	error_engine = open_engine(2, 2, NULL);
	refused(fp8, no_scale, NULL, MOE_ERR_FORMAT,
		EXPERT ".weight holds quantised codes, but " EXPERT ".weight_scale_inv is missing");
	refused(fp8, nan_scale, NULL, MOE_ERR_FORMAT,
		EXPERT ".weight: the scale of row 0, column 0 is NaN");
	refused(fp8, scale_shape, NULL, MOE_ERR_FORMAT,
		EXPERT ".weight_scale_inv has shape [3, 1]; [1, 1]");
	refused(fp8, scale_dtype, NULL, MOE_ERR_FORMAT, EXPERT ".weight_scale_inv has dtype I64");
	refused(fp8, NULL, "int8", MOE_ERR_UNSUPPORTED, "the checkpoint's experts are fp8");
	refused(fp8, NULL, "int5", MOE_ERR_ARG, "weights \"int5\"");
	refused(int4, no_codes, NULL, MOE_ERR_FORMAT, EXPERT ".weight");
	refused(int4, other_group, NULL, MOE_ERR_UNSUPPORTED,
		EXPERT ".weight_packed is int4 with a scale (BF16) per 64");
	refused(int4, wrong_groups, NULL, MOE_ERR_FORMAT,
		EXPERT ".weight_scale has 3 groups, which do not divide 128 columns");
	refused(gptq, act_order, NULL, MOE_ERR_UNSUPPORTED, EXPERT ".g_idx orders the columns");
	refused(mxfp4, scale_of_others, NULL, MOE_ERR_FORMAT,
		"gate_up_proj_scales has 3 dimensions and begins with 7");
	error_method = MOE_METHOD_FULL; /* in blocks of the first expert's it would be quantised again */
	refused(fp8, scales_of_rows, NULL, MOE_ERR_UNSUPPORTED,
		EXPERT ".weight is fp8 with a scale (F32) per 128 columns of 1 rows, the layer's first expert fp8 with one "
		       "(F32) per 128 of 128: one format is expected");
	error_method = MOE_METHOD_LORA;
	OK(moe_engine_close(error_engine));
}

/* NaN codes are counted as NaN weights are. */
static void nan_code(struct made *m)
{
	((uint8_t *)item(m, EXPERT ".weight")->data)[129] = 0xff;
	((uint8_t *)item(m, EXPERT ".weight")->data)[7] = 0x7f;
}

/* Frozen weights have them side by side. */
static void test_mixed_scales(void)
{
	const char *from = fixture("ckpt/qwen3moe");
	struct moe_engine *e;
	struct moe_model *a, *b;

	if (!from)
		return;
	dirs();
	e = open_engine(2, 3, NULL);
	make_quantised(from, EXPERTS, &quantised_kinds[0], coded_dir, plain_dir, scales_of_rows);
	a = open_weights(e, coded_dir, NULL);
	b = open_weights(e, plain_dir, NULL);
	compare_models(a, b);
	moe_model_close(a);
	moe_model_close(b);
	OK(moe_engine_close(e));
}

static void test_nan_codes(void)
{
	struct moe_model_info info = { .struct_size = sizeof info };
	struct moe_engine *e;
	struct moe_model *m;

	if (!fixture("ckpt/qwen3moe"))
		return;
	dirs();
	e = open_engine(2, 3, NULL);
	make_quantised(fixture("ckpt/qwen3moe"), EXPERTS, &quantised_kinds[0], coded_dir, NULL,
		       nan_code);
	m = open_weights(e, coded_dir, NULL);
	OK(moe_model_get_info(m, &info));
	CHECK(info.non_finite == 2);
	moe_model_close(m);
	OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "checkpoints of every layout, one part", test_one_part },
	{ "three parts that cut blocks and groups", test_three_parts },
	{ "quantised at load: the bits of the format on disk", test_converted },
	{ "no adapter on experts: gradients reach the layers below", test_gradients_below },
	{ "weights take the format's bytes, training no more", test_memory },
	{ "what is refused, by name", test_errors },
	{ "scales of blocks and of rows in one layer", test_mixed_scales },
	{ "NaN codes are counted", test_nan_codes },
	{ NULL, NULL },
};
