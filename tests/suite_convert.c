/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Converted checkpoints: what every layout stores is read back as it was written; conversions that a
 * format can hold exactly are exact; and what is refused.
 */
#include "model/convert.h"
#include "tests/model_check.h"
#include "tests/quantised_check.h"

const char moe_suite_name[] = "convert";


static char made_dir[300], plain_dir[300], out_dir[300], back_dir[300];

static const char *source(void)
{
	const char *from = fixture("ckpt/qwen3moe");

	snprintf(made_dir, sizeof made_dir, "%s/made", moe_test_dir());
	snprintf(plain_dir, sizeof plain_dir, "%s/plain", moe_test_dir());
	snprintf(out_dir, sizeof out_dir, "%s/out", moe_test_dir());
	snprintf(back_dir, sizeof back_dir, "%s/back", moe_test_dir());
	return from;
}

static enum moe_status convert(const char *in, const char *out, const char *weights,
			       const char *layers, struct moe_convert_model_result *r)
{
	struct moe_convert_model_params p = { .struct_size = sizeof p,
					      .in = in,
					      .out = out,
					      .weights = weights,
					      .layers = layers,
					      .threads = 2 };

	*r = (struct moe_convert_model_result){ .struct_size = sizeof *r };
	moe_tree_remove(out);
	return moe_convert_model(&p, r);
}

/* ---- what is stored comes back ---- */

static float noise(int64_t i)
{
	return (float)((double)(i * 7919 % 1009) / 504.5 - 1) * (i % 61 ? .05f : .3f);
}

static void store_and_open(const struct moe_format *f, const struct moe_format_layout *l)
{
	enum { N = 144, K = 384 };
	float *x = calloc(N * K, sizeof *x), *want = calloc(K, sizeof *want),
	      *got = calloc(K, sizeof *got);
	struct moe_stored s = { .codes_name = "c",
				.scale_name = "s",
				.zero_name = "z",
				.n = N,
				.k = K };
	struct moe_array *a[4] = { &s.codes, &s.scale, &s.zero, &s.more };
	struct moe_quantised q, back = { .coding = { .format = f }, .n = N, .k = K };
	int64_t n = 0, k = 0;
	void *memory;

	for (int i = 0; i < N * K; i++)
		x[i] = noise(i);
	CHECK_OK(moe_quantise(f, x, MOE_F32, N, K, K, &q, &memory));
	CHECK_OK(l->writer->shapes(&q, &s));
	for (int i = 0; i < 4; i++)
		if (a[i]->ndim)
			a[i]->data = calloc((size_t)moe_shape_count(a[i]->ndim, a[i]->shape),
					    moe_dtype_size(a[i]->dtype));
	CHECK_OK(l->writer->store(&q, &s));
	CHECK(l->size(&s.codes, &s.scale, &n, &k) && n == N && k == K);
	CHECK_OK(l->open(&s, &back));
	back.codes = s.codes, back.scale = s.scale, back.zero = s.zero;
	CHECK(back.coding.rows == q.coding.rows && back.coding.group == q.coding.group &&
	      back.coding.zero == q.coding.zero);
	for (int i = 0; i < N; i++) {
		moe_dequantise_row(&q, i, 0, K, want);
		moe_dequantise_row(&back, i, 0, K, got);
		CHECK(!memcmp(want, got, K * sizeof *got));
	}
	for (int i = 0; i < 4; i++)
		free(a[i]->data);
	moe_free(memory);
	free(x), free(want), free(got);
}

static void test_layouts(void)
{
	int written = 0;

	for (int i = 0; moe_format_list[i]; i++)
		for (int j = 0; j < MOE_FORMAT_LAYOUTS && moe_format_list[i]->layout[j].codes; j++)
			if (moe_format_list[i]->layout[j].writer) {
				store_and_open(moe_format_list[i], &moe_format_list[i]->layout[j]);
				written++;
			}
	CHECK(written >= 8);
}

/* A copy of every second row keeps values. */
static void test_copy(void)
{
	enum { N = 32, K = 96 };
	float *x = calloc(N * K, sizeof *x), want[K], got[K];

	for (int i = 0; i < N * K; i++)
		x[i] = noise(i);
	for (int i = 0; moe_format_list[i]; i++) {
		const struct moe_format *f = moe_format_list[i];
		struct moe_quantised q, half;
		void *memory, *copy;

		if (f->rows > 1)
			continue;
		CHECK_OK(moe_quantise(f, x, MOE_F32, N, K, K, &q, &memory));
		half = (struct moe_quantised){
			.coding = q.coding, .n = N / 2, .k = K
		};
		CHECK_OK(moe_quantised_copy(&q, 1, 2, &half, &copy));
		for (int n = 0; n < N / 2; n++) {
			moe_dequantise_row(&q, 1 + 2 * n, 0, K, want);
			moe_dequantise_row(&half, n, 0, K, got);
			CHECK(!memcmp(want, got, sizeof got));
		}
		moe_free(memory);
		moe_free(copy);
	}
	free(x);
}

/* ---- checkpoints ---- */

static bool same_values(const struct moe_st_tensor *a, const struct moe_st_tensor *b)
{
	int64_t count = moe_shape_count(a->ndim, a->shape);
	float x, y;

	if (a->ndim != b->ndim || count != moe_shape_count(b->ndim, b->shape))
		return false;
	for (int64_t i = 0; i < count; i++) {
		moe_to_f32(&x, (const char *)a->data + (size_t)i * moe_dtype_size(a->dtype), a->dtype,
			   1);
		moe_to_f32(&y, (const char *)b->data + (size_t)i * moe_dtype_size(b->dtype), b->dtype,
			   1);
		if (x != y)
			return false;
	}
	return true;
}

/* Every tensor of b is in a, with its values. Fused experts of a are looked into. */
static void check_same(const char *a_dir, const char *b_dir)
{
	struct moe_safetensors *a, *b;

	CHECK_OK(moe_safetensors_open(a_dir, &a));
	CHECK_OK(moe_safetensors_open(b_dir, &b));
	CHECK(moe_safetensors_count(a) == moe_safetensors_count(b));
	for (size_t i = 0; i < moe_safetensors_count(b); i++) {
		const struct moe_st_tensor *y = moe_safetensors_at(b, i);
		const struct moe_st_tensor *x = moe_safetensors_find(a, y->name);

		CHECK(x && same_values(x, y));
	}
	moe_safetensors_close(a);
	moe_safetensors_close(b);
}

/* Dequantised: what the checkpoint stands for, to the last bit. */
static void test_dequantise(void)
{
	const char *from = source();
	struct moe_convert_model_result r;

	for (size_t i = 0; from && i < MOE_COUNT(quantised_kinds); i++) {
		const struct quantised_kind *k = &quantised_kinds[i];

		if (k->fused) /* test_fused */
			continue;
		make_quantised(from, EXPERTS, k, made_dir, plain_dir, NULL);
		CHECK_OK(convert(made_dir, out_dir, "f32", NULL, &r));
		CHECK(r.converted == 112 && r.error == 0 && r.kept == 0);
		if (!k->attention) /* bf16 there, f32 here */
			CHECK_OK(convert(plain_dir, back_dir, "f32", NULL, &r));
		check_same(k->attention ? plain_dir : back_dir, out_dir);
	}
}

/* Codes that other names can hold stay what they are. */
static void test_kept(void)
{
	static const char *const ways[][4] = {
		{ "int4", "gptq", "awq", "int4" },
		{ "fp8", "fp8", NULL, NULL },
		{ "int8", "int8", NULL, NULL },
		{ "mxfp4", "mxfp4", NULL, NULL },
		{ "gptq", "awq", "int4", "gptq" },
	};
	const char *from = source();
	char dir[2][320], values[320];
	struct moe_convert_model_result r;

	for (size_t i = 0; from && i < MOE_COUNT(ways); i++) {
		snprintf(dir[0], sizeof dir[0], "%s/way-0", moe_test_dir());
		snprintf(dir[1], sizeof dir[1], "%s/way-1", moe_test_dir());
		snprintf(values, sizeof values, "%s/values", moe_test_dir());
		CHECK_OK(convert(from, dir[0], ways[i][0], "experts", &r));
		CHECK(r.error > 1e-3 && r.worst_error < .2 && *r.worst && r.kept == 0);
		CHECK_OK(convert(dir[0], values, "f32", NULL, &r));
		for (int j = 1; j < 4 && ways[i][j]; j++) {
			CHECK_OK(convert(dir[!(j & 1)], dir[j & 1], ways[i][j], "experts", &r));
			CHECK(r.kept == 96 && r.converted == 96 && r.error == 0);
			CHECK_OK(convert(dir[j & 1], back_dir, "f32", NULL, &r));
			check_same(values, back_dir);
		}
	}
}

/* So small that F16 has fewer bits for them than BF16. */
static void small_scales(struct made *m)
{
	struct moe_st_item *s = item(m, EXPERT ".weight_scale");
	int64_t count = moe_shape_count(s->ndim, s->shape);

	CHECK(s->dtype == MOE_BF16);
	for (int64_t i = 0; i < count; i++)
		((uint16_t *)s->data)[i] = moe_f32_to_bf16((1 + .0078125f * (float)(i % 127)) * 1e-6f);
}

/* ||a - b|| / ||b|| of an F32 tensor of two checkpoints. */
static double error_of(const char *a_dir, const char *b_dir, const char *name)
{
	const char *dir[] = { a_dir, b_dir };
	struct moe_safetensors *st[2];
	const struct moe_st_tensor *t[2];
	double wrong = 0, all = 0;

	for (int i = 0; i < 2; i++) {
		CHECK_OK(moe_safetensors_open(dir[i], &st[i]));
		t[i] = moe_safetensors_find(st[i], name);
		CU_ASSERT_FATAL(t[i] && t[i]->dtype == MOE_F32);
	}
	for (size_t i = 0; i < t[0]->bytes / 4; i++) {
		float x, y;

		memcpy(&x, (const char *)t[0]->data + 4 * i, 4);
		memcpy(&y, (const char *)t[1]->data + 4 * i, 4);
		wrong += ((double)x - y) * ((double)x - y);
		all += (double)y * y;
	}
	moe_safetensors_close(st[0]);
	moe_safetensors_close(st[1]);
	return sqrt(wrong / all);
}

/* Codes are taken over, scales come near only: said, and not counted as kept. */
static void test_nearest_scales(void)
{
	const char *from = source();
	struct moe_convert_model_result r, seen;
	char dir[320], values[320];
	double error;

	if (!from)
		return;
	snprintf(dir, sizeof dir, "%s/wide-scales", moe_test_dir());
	snprintf(values, sizeof values, "%s/values", moe_test_dir());
	make_quantised(from, EXPERTS, &quantised_kinds[3], made_dir, NULL, small_scales); /* int4 */
	CHECK_OK(convert(made_dir, dir, "gptq", "experts", &r));
	CHECK(r.converted == 96 && r.kept == 95 && !strcmp(r.worst, EXPERT ".weight"));
	CHECK(r.worst_error > 1e-4);
	CHECK_OK(convert(made_dir, out_dir, "f32", NULL, &seen));
	CHECK_OK(convert(dir, values, "f32", NULL, &seen));
	error = error_of(values, out_dir, EXPERT ".weight");
	CHECK(fabs(error - r.worst_error) < 1e-4 * error);
}

/* bf16 holds MXFP4's values, and they come back as the codes they were. */
static void test_there_and_back(void)
{
	const char *from = source();
	struct moe_convert_model_result r;

	if (!from)
		return;
	CHECK_OK(convert(from, made_dir, "mxfp4", NULL, &r));
	CHECK_OK(convert(made_dir, out_dir, "bf16", NULL, &r));
	CHECK(r.error == 0 && r.converted == 96);
	CHECK_OK(convert(out_dir, back_dir, "mxfp4", NULL, &r));
	CHECK(r.error == 0 && r.converted == 96);
	CHECK_OK(convert(made_dir, plain_dir, "f32", NULL, &r));
	CHECK_OK(convert(back_dir, out_dir, "f32", NULL, &r));
	check_same(plain_dir, out_dir);
}

/* Fused experts become tensors of their own. */
static void test_fused(void)
{
	const char *from = source();
	struct moe_convert_model_result r;

	if (!from)
		return;
	make_quantised(from, EXPERTS, &quantised_kinds[1], made_dir, plain_dir, NULL); /* fp8_fused */
	CHECK_OK(convert(made_dir, out_dir, "fp8", "experts", &r));
	CHECK(r.converted == 96 && r.kept == 96);
	CHECK_OK(convert(out_dir, back_dir, "f32", NULL, &r));
	CHECK_OK(convert(plain_dir, out_dir, "f32", NULL, &r));
	check_same(out_dir, back_dir);
	make_quantised(from, EXPERTS, &quantised_kinds[4], made_dir, plain_dir, NULL); /* mxfp4 */
	CHECK_OK(convert(made_dir, out_dir, "mxfp4", NULL, &r)); /* as gpt-oss has them */
	CHECK(r.converted == 64 && r.kept == 64);
	CHECK_OK(convert(made_dir, back_dir, "int8", NULL, &r));
	CHECK(r.converted == 96 && r.kept == 0 && r.error < .02);
}

/* ---- what is refused ---- */

static void refused(const struct quantised_kind *kind, void (*change)(struct made *),
		    const char *weights, enum moe_status want, const char *text)
{
	struct moe_convert_model_result r;

	make_quantised(fixture("ckpt/qwen3moe"), EXPERTS, kind, made_dir, NULL, change);
	CHECK_ERROR(convert(made_dir, out_dir, weights, NULL, &r), want, text);
	CHECK(!moe_path_exists(out_dir));
}

static void no_group_scale(struct made *m)
{
	*item(m, EXPERT ".weight_scale") = m->item[m->n - 1];
	m->n--;
}

static void nan_scale(struct made *m)
{
	((float *)item(m, EXPERT ".weight_scale_inv")->data)[0] = NAN;
}

static void scale_shape(struct made *m)
{
	item(m, EXPERT ".weight_scale_inv")->shape[0] = 3;
}

static void scale_dtype(struct made *m)
{
	item(m, EXPERT ".weight_scale_inv")->dtype = MOE_I64;
}

static void wrong_groups(struct made *m)
{
	item(m, EXPERT ".weight_scale")->shape[1] = 3;
}

static void act_order(struct made *m)
{
	((int32_t *)item(m, EXPERT ".g_idx")->data)[7] = 2;
}

static void no_zeros(struct made *m)
{
	*item(m, EXPERT ".qzeros") = m->item[m->n - 1];
	m->n--;
}

static void scale_of_others(struct made *m)
{
	item(m, "model.layers.0.mlp.experts.gate_up_proj_scales")->shape[0] = 7;
}

static void nan_code(struct made *m)
{
	((uint8_t *)item(m, EXPERT ".weight")->data)[129] = 0xff;
}

static void test_errors(void)
{
	const struct quantised_kind *fp8 = &quantised_kinds[0], *int4 = &quantised_kinds[3];
	const struct quantised_kind *mxfp4 = &quantised_kinds[4], *gptq = &quantised_kinds[5];

	if (!source())
		return;
	refused(fp8, no_scale, "bf16", MOE_ERR_FORMAT,
		EXPERT ".weight holds quantised codes, but its scales are missing");
	refused(fp8, nan_scale, "bf16", MOE_ERR_FORMAT,
		EXPERT ".weight_scale_inv: the scale of row 0, column 0 is NaN");
	refused(fp8, scale_shape, "int8", MOE_ERR_FORMAT,
		EXPERT ".weight_scale_inv has shape [3, 1]; [1, 1]");
	refused(fp8, scale_dtype, "int8", MOE_ERR_FORMAT,
		EXPERT ".weight_scale_inv has dtype I64");
	refused(fp8, nan_code, "int8", MOE_ERR_FORMAT, "row 1, column 1 is not finite");
	refused(int4, no_group_scale, "bf16", MOE_ERR_FORMAT,
		EXPERT ".weight_packed holds quantised codes, but its scales are missing");
	refused(int4, wrong_groups, "gptq", MOE_ERR_FORMAT,
		EXPERT ".weight_scale has 3 groups, which do not divide 128 columns");
	refused(gptq, act_order, "bf16", MOE_ERR_UNSUPPORTED, EXPERT ".g_idx orders the columns");
	refused(gptq, no_zeros, "bf16", MOE_ERR_FORMAT, EXPERT ".qzeros is missing");
	refused(mxfp4, scale_of_others, "bf16", MOE_ERR_FORMAT,
		"gate_up_proj_scales has 3 dimensions and begins with 7");
	refused(fp8, NULL, "int5", MOE_ERR_ARG, "weights \"int5\": fp8, gptq, awq, int4");
}

const struct moe_test moe_suite_tests[] = {
	{ "every layout is read as it was written", test_layouts },
	{ "rows of codes are copied", test_copy },
	{ "dequantised checkpoints have the values, exactly", test_dequantise },
	{ "codes that fit are kept, way and way back", test_kept },
	{ "what scales lose beside kept codes is said", test_nearest_scales },
	{ "bf16 and back", test_there_and_back },
	{ "fused experts", test_fused },
	{ "what is refused, by name", test_errors },
	{ NULL, NULL },
};
