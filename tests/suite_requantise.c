/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Full and hybrid fine-tuning of quantised weights. What computes is, at any time and however parts
 * cut blocks, what moe_quantise makes of the masters; gradients are those of the dequantised
 * weights; masters go AdamW's way.
 */
#include "tests/requantise_check.h"

#include "api/machine.h"
#include "codelets/rounding.h"

const char moe_suite_name[] = "requantise";

static double uniform(uint64_t *seed)
{
	*seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
	return (double)(*seed >> 40) / (1 << 24) - .5;
}

/* ---- one layer's experts ---- */

struct shape {
	int E, H, I, group; /* group 0: the format's */
	bool zero;
	enum moe_dtype scale; /* MOE_DTYPE_COUNT: the format's */
};

static void codings(const struct moe_format *f, const struct shape *s, struct moe_coding *c)
{
	for (int i = 0; i < MOE_EXPERT_MATRICES; i++) {
		c[i] = moe_format_coding(f, i == MOE_DOWN ? s->I : s->H);
		c[i].group = s->group ? s->group : c[i].group;
		c[i].zero = c[i].zero || s->zero;
		c[i].scale = s->scale == MOE_DTYPE_COUNT ? c[i].scale : s->scale;
	}
}

/* Masters as they are read back are what codes are made of; twice, so that old codes are
 * overwritten. */
static void check_layer(struct moe_engine *e, const struct moe_format *f, const struct shape *s,
			bool bf16)
{
	struct moe_coding coding[MOE_EXPERT_MATRICES];
	struct moe_experts_shape shape = { .E = s->E,
					   .k = 1,
					   .H = s->H,
					   .I = s->I,
					   .group_size = 2,
					   .base_grads = true,
					   .train_base = true,
					   .own_masters = bf16,
					   .coding = coding };
	struct moe_experts l = { 0 };
	int64_t n = (int64_t)s->H * s->I;
	float *x = malloc((size_t)n * sizeof *x);
	uint64_t seed = 7;

	codings(f, s, coding);
	OK(moe_machine_use(e));
	CU_ASSERT_EQUAL_FATAL(moe_experts_alloc(e, &shape, MOE_F32, &l), MOE_OK);
	for (int round = 0; round < 2; round++)
		for (int i = 0; i < MOE_EXPERT_MATRICES * s->E; i++) {
			enum moe_expert_matrix which =
				(enum moe_expert_matrix)(i % MOE_EXPERT_MATRICES);
			int expert = i / MOE_EXPERT_MATRICES;
			struct moe_quantised q = { .coding = coding[which] };
			struct moe_coded_matrix m;

			q.n = which == MOE_DOWN ? s->H : s->I;
			q.k = which == MOE_DOWN ? s->I : s->H;
			for (int p = 0; !round && p < l.P; p++)
				moe_experts_pack_coded(&l, which, expert, p, &q, 0, 1);
			for (int64_t j = 0; j < n; j++)
				x[j] = (float)(uniform(&seed) * (j % 3 ? .1 : .3));
			if (bf16)
				for (int64_t j = 0; j < n; j++)
					x[j] = moe_bf16_to_f32(moe_f32_to_bf16(x[j]));
			moe_experts_set_base(&l, which, MOE_VALUE, expert, x);
			moe_experts_coded(&l, which, expert, &m);
			compare_codes(&m, &coding[which], x, f->name);
		}
	moe_experts_free(e, &l);
	free(x);
}

static void layers_of(int parts)
{
	static const struct shape shapes[] = {
		{ 2, 256, 384, 0, false, MOE_DTYPE_COUNT }, /* whole blocks in three parts */
		{ 2, 160, 224, 0, false, MOE_DTYPE_COUNT }, /* cut ones, ragged */
		{ 1, 96, 64, 32, true, MOE_F16 },
		{ 1, 48, 100, 4, false, MOE_F32 },
	};
	struct moe_engine *e = open_engine(2, parts, NULL);

	for (int i = 0; moe_format_list[i]; i++)
		for (size_t j = 0; j < MOE_COUNT(shapes); j++) {
			const struct moe_format *f = moe_format_list[i];
			const struct shape *s = &shapes[j];

			/* MXFP4 has its group, other formats zeros only where they know them */
			if ((s->zero && !f->quantise_zero) ||
			    (s->scale != MOE_DTYPE_COUNT && f->scale == MOE_SCALE_UE8M0))
				continue;
			if (!f->quantise && !s->zero && j > 1)
				continue;
			if (table_takes(i + j, 2)) {
				check_layer(e, f, s, false);
				check_layer(e, f, s, true);
			}
		}
	OK(moe_engine_close(e));
}

static void one_part_layers(void)
{
	layers_of(1);
	layers_of(3);
	layers_of(5);
}

static void test_layers(void)
{
	each_table(one_part_layers);
}

/* Not finite: the scale says so, and no code is what a conversion of NaN left. */
static void test_not_finite(void)
{
	struct moe_coding c = moe_format_coding(moe_format_find("int8"), 4);
	const float bad[2][4] = { { 1, NAN, 2, 3 }, { 1, 2, -INFINITY, 3 } };
	uint8_t codes[4];
	int8_t zero;

	for (int i = 0; i < 2; i++)
		CHECK(isnan(moe_quantise_block(&c, 1, 4, bad[i], 4, codes, 4, &zero)));
	c = moe_format_coding(moe_format_find("mxfp4"), 4);
	CHECK(isnan(moe_quantise_block(&c, 1, 4, bad[0], 4, codes, 4, &zero)));
}

/* ---- whole models ---- */

/* AdamW in double on what it was, from the model's own gradients. */
struct adam {
	float *before;
	double *m, *v;
	int64_t n;
};

static double adam_step(struct adam *a, const float *grad, const float *after, const struct run *r,
			double factor)
{
	double t = (double)r->step, worst = 0;

	for (int64_t i = 0; i < a->n; i++) {
		double g = (double)grad[i] * factor, p;

		a->m[i] = .9 * a->m[i] + .1 * g;
		a->v[i] = .999 * a->v[i] + .001 * g * g;
		p = a->before[i] * (1 - r->lr * r->weight_decay) -
		    r->lr * (a->m[i] / (1 - pow(.9, t))) /
			    (sqrt(a->v[i] / (1 - pow(.999, t))) + 1e-8);
		worst = worst_of(worst, fabs(p - (double)after[i]));
		a->before[i] = after[i];
	}
	return worst;
}

static void check_steps(struct moe_engine *e, const char *dir, const char *weights,
			enum moe_masters masters)
{
	struct moe_model *m = open_trained(e, dir, weights, MOE_METHOD_FULL, masters);
	struct adam a = { 0 };
	double first = 0, loss = 0;
	struct run r;

	begin(&r, m);
	CHECK(check_codes(m) > 8);
	a.before = fields(m, MOE_VALUE, &a.n);
	a.m = calloc((size_t)a.n, sizeof *a.m);
	a.v = calloc((size_t)a.n, sizeof *a.v);
	for (int i = 0; i < 5; i++) {
		int64_t n;
		float *grad, *after;
		double off;

		loss = step(&r, true);
		first = i ? first : loss;
		grad = fields(m, MOE_GRAD, &n);
		after = fields(m, MOE_VALUE, &n);
		off = adam_step(&a, grad, after, &r, r.norm.factor);
		/* one unit of bf16 of the largest master where it was rounded */
		CHECK(off <= (masters == MOE_MASTERS_BF16 ? 4e-3 : 2e-6));
		CHECK(check_codes(m) > 8);
		free(grad), free(after);
	}
	printf("  %s: loss %.4f to %.4f\n", weights ? weights : "stored", first, loss);
	CHECK(loss < first && isfinite(loss));
	free(a.before), free(a.m), free(a.v);
	free_run(&r);
	moe_model_close(m);
}

static void steps_of(int parts)
{
	const char *from = fixture("ckpt/qwen3moe");
	static const char *const weights[] = { "int8", "fp8", "int4", "mxfp4" };
	struct moe_engine *e;

	if (!from)
		return;
	dirs();
	e = open_engine(2, parts, NULL);
	for (size_t i = 0; i < MOE_COUNT(quantised_kinds); i++) {
		if (!best_table_takes(i + (size_t)parts, 6))
			continue;
		make_quantised(from, EXPERTS, &quantised_kinds[i], coded_dir, NULL, NULL);
		check_steps(e, coded_dir, NULL, i % 2 ? MOE_MASTERS_F32 : MOE_MASTERS_BF16);
	}
	for (size_t i = 0; i < MOE_COUNT(weights); i++)
		if (best_table_takes(i, 4))
			check_steps(e, from, weights[i],
				    i % 2 ? MOE_MASTERS_BF16 : MOE_MASTERS_F32);
	OK(moe_engine_close(e));
}

static void steps_one(void)
{
	steps_of(1);
}

static void steps_three(void)
{
	steps_of(3);
}

static void test_steps(void)
{
	each_model_table(steps_one);
	each_model_table(steps_three);
}

static void dequantise(const char *from, const char *to)
{
	struct moe_convert_model_params p = {
		.struct_size = sizeof p, .in = from, .out = to, .weights = "f32", .threads = 1
	};
	struct moe_convert_model_result r = { .struct_size = sizeof r };

	moe_tree_remove(to);
	OK(moe_convert_model(&p, &r));
}

/* Loss and gradients are those of the plain model with the values that the codes stand for. */
static void test_gradients(void)
{
	const char *from = fixture("ckpt/qwen3moe");
	struct moe_engine *e;

	if (!from)
		return;
	dirs();
	e = open_engine(2, 1, NULL);
	for (size_t i = 0; i < MOE_COUNT(quantised_kinds); i++) {
		struct moe_model *a, *b;
		struct run r[2];
		int64_t n;
		float *g[2];

		make_quantised(from, EXPERTS, &quantised_kinds[i], coded_dir, NULL, NULL);
		a = open_trained(e, coded_dir, NULL, MOE_METHOD_FULL, MOE_MASTERS_F32);
		OK(moe_model_save(a, out_dir)); /* codes of masters: another scale than the base's
						   where it may be */
		dequantise(out_dir, plain_dir);
		b = open_trained(e, plain_dir, NULL, MOE_METHOD_FULL, MOE_MASTERS_F32);
		begin(&r[0], a), begin(&r[1], b);
		CHECK(step(&r[0], false) == step(&r[1], false));
		g[0] = fields(a, MOE_GRAD, &n), g[1] = fields(b, MOE_GRAD, &n);
		CHECK(!memcmp(g[0], g[1], (size_t)n * sizeof *g[0]) && g[0][5] != 0);
		free(g[0]), free(g[1]);
		free_run(&r[0]), free_run(&r[1]);
		moe_model_close(a), moe_model_close(b);
	}
	OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "codes from masters, in parts that cut blocks", test_layers },
	{ "values that are not finite", test_not_finite },
	{ "five steps of every format", test_steps },
	{ "gradients of the dequantised weights", test_gradients },
	{ NULL, NULL },
};
