/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The experts of one layer with quantised weights, in every format: frozen without LoRA (SkipLoRA) and five AdamW
 * steps of masters, beside the same arithmetic in double, which computes with what moe_quantise makes of its masters.
 */
#include "tests/layer_check.h"

#include "codelets/format.h"

#include <math.h>

const char moe_suite_name[] = "layer_coded";

#define STEPS 5

static const struct block_case small = { .E = 4, .k = 2, .H = 160, .I = 96, .T = 40, .r = 0, .seed = 5 };

/* What the format makes of w, into w. */
static void quantise(const struct moe_format *f, const struct block_case *c, int which, float *w)
{
	int64_t n = which == MOE_BLOCK_DOWN_PROJ ? c->H : c->I, k = which == MOE_BLOCK_DOWN_PROJ ? c->I : c->H;

	for (int e = 0; e < c->E; e++, w += n * k) {
		struct moe_quantised q;
		void *memory;

		CHECK_OK(moe_quantise(f, w, MOE_F32, n, k, k, &q, &memory));
		for (int64_t i = 0; i < n; i++)
			moe_dequantise_row(&q, i, 0, k, w + i * k);
		moe_free(memory);
	}
}

static struct moe_expert_layer *make(struct moe_engine *e, const struct moe_format *f, const struct block_data *d,
				     enum moe_activations activations)
{
	struct moe_experts_params p = layer_params(&d->c);
	struct moe_expert_layer *l = NULL;

	p.weight_format = f->name;
	p.activations = activations;
	if (CHECK_OK(moe_experts_create(e, &p, &l)))
		CHECK_OK(layer_load(l, d, NULL, 0));
	return l;
}

/* Gradients reach x and the routing weights through frozen codes. */
static void skip_lora(struct moe_engine *e, const struct moe_format *f, enum moe_activations activations)
{
	struct block_reference r = { 0 };
	struct moe_expert_layer *l;
	struct block_data d;

	block_data_make(&d, &small);
	l = make(e, f, &d, activations);
	for (int i = 0; i < 3; i++)
		quantise(f, &d.c, i, d.w[i]);
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	block_reference(&r, &d, d.ids);
	layer_compare(l, &d, &r, 1);
	block_reference_free(&r);
	block_data_free(&d);
	moe_experts_destroy(l);
}

/* What a packed table multiplies by: a scale times a code, in bf16. */
static void as_multiplied(float *w, int64_t n)
{
	for (int64_t i = 0; table_is_packed() && i < n; i++)
		w[i] = moe_bf16_to_f32(moe_f32_to_bf16(w[i]));
}

/* A clamped SwiGLU behind codes and behind the same weights as plain ones: the same values are cut, the same bits. */
static void clamped(struct moe_engine *e, const struct moe_format *f, enum moe_activations activations)
{
	struct moe_expert_layer *l[2] = { NULL, NULL };
	struct block_case c = small;
	struct moe_experts_params p;
	struct block_data d[2];
	size_t n = (size_t)(c.T * c.H) * sizeof(float);

	c.r = 3;
	c.limit = .3f;
	for (int i = 0; i < 2; i++)
		block_data_make(&d[i], &c);
	l[0] = make(e, f, &d[0], activations);
	for (int i = 0; i < 3; i++) {
		quantise(f, &c, i, d[1].w[i]);
		as_multiplied(d[1].w[i], d[1].n[i]);
	}
	p = layer_params(&c);
	p.activations = activations;
	p.backward_weights = "direct";
	if (CHECK_OK(moe_experts_create(e, &p, &l[1])))
		CHECK_OK(layer_load(l[1], &d[1], NULL, 0));
	for (int i = 0; i < 2; i++) {
		layer_set_lora(l[i], &d[i]);
		CHECK_OK(layer_forward(l[i], &d[i], true));
		CHECK_OK(layer_backward(l[i], &d[i], 1));
	}
	if (!CHECK(!memcmp(d[0].out, d[1].out, n) && !memcmp(d[0].grad_x, d[1].grad_x, n)))
		printf("  %s, %s\n", f->name, table()->name);
	CHECK(!memcmp(d[0].grad_weights, d[1].grad_weights, (size_t)(c.T * c.k) * sizeof(float)));
	for (int i = 0; i < 2; i++) {
		block_data_free(&d[i]);
		moe_experts_destroy(l[i]);
	}
}

struct masters {
	double *w, *m, *v;
};

static void adamw(struct masters *p, const double *g, int64_t n, int t)
{
	for (int64_t i = 0; i < n; i++) {
		p->m[i] = .9 * p->m[i] + .1 * g[i];
		p->v[i] = .999 * p->v[i] + .001 * g[i] * g[i];
		p->w[i] *= 1 - 1e-2 * .1;
		p->w[i] -= 1e-2 * (p->m[i] / (1 - pow(.9, t))) / (sqrt(p->v[i] / (1 - pow(.999, t))) + 1e-8);
	}
}

static void steps(struct moe_engine *e, const struct moe_format *f, enum moe_activations activations)
{
	struct moe_adamw_params p = { .struct_size = sizeof p, .learning_rate = 1e-2, .beta1 = .9, .beta2 = .999,
				      .eps = 1e-8, .weight_decay = .1 };
	struct block_case c = small;
	struct moe_experts_info info = { .struct_size = sizeof info };
	struct masters m[3];
	struct moe_expert_layer *l;
	struct block_data d;

	c.base_grads = true;
	block_data_make(&d, &c);
	l = make(e, f, &d, activations);
	CHECK_OK(moe_experts_get_info(l, &info)); /* floats became codes */
	if (!CHECK(info.load_error > .001 && info.load_error < (f->bits == 8 ? .04 : .2)))
		printf("  %s: load_error %.4f\n", f->name, info.load_error);
	for (int i = 0; i < 3; i++) {
		size_t n = (size_t)d.n[i];

		m[i] = (struct masters){ calloc(n, sizeof(double)), calloc(n, sizeof(double)), calloc(n, sizeof(double)) };
		for (size_t j = 0; j < n; j++)
			m[i].w[j] = (double)d.w[i][j];
	}
	for (int t = 1; t <= STEPS; t++) {
		struct block_reference r = { 0 };

		for (int i = 0; i < 3; i++) {
			for (int64_t j = 0; j < d.n[i]; j++)
				d.w[i][j] = (float)m[i].w[j];
			quantise(f, &c, i, d.w[i]);
		}
		block_reference(&r, &d, d.ids);
		CHECK_OK(layer_forward(l, &d, true));
		/* codes of masters that differ by rounding may differ here and there */
		layer_within("out", d.out, r.out, (int64_t)c.T * c.H, t == 1 ? table_tolerance()->out : .05);
		CHECK_OK(layer_backward(l, &d, 1));
		CHECK_OK(moe_experts_update(l, &p));
		for (int i = 0; i < 3; i++)
			adamw(&m[i], r.grad[i], d.n[i], t);
		block_reference_free(&r);
	}
	block_data_free(&d);
	block_data_make(&d, &c); /* where they began */
	for (int i = 0; i < 3; i++) {
		double *got = layer_get(l, &c, (enum moe_block_array)i, false), off = 0, way = 0;

		for (int64_t j = 0; j < d.n[i]; j++) {
			off += pow(got[j] - m[i].w[j], 2);
			way += pow(m[i].w[j] - (double)d.w[i][j], 2);
		}
		if (!CHECK(sqrt(off) <= .05 * sqrt(way)))
			printf("  %s, matrix %d: %.2e of its way\n", f->name, i, sqrt(off / way));
		free(got), free(m[i].w), free(m[i].m), free(m[i].v);
	}
	block_data_free(&d);
	moe_experts_destroy(l);
}

static void formats(void)
{
	for (int parts = 1; parts <= 3; parts += 2) {
		struct moe_engine *e = layer_engine(2, parts);

		for (int i = 0; moe_format_list[i]; i++) {
			enum moe_activations a = (i + parts) % 2 ? MOE_ACTIVATIONS_RETAIN : MOE_ACTIVATIONS_RECOMPUTE;

			skip_lora(e, moe_format_list[i], a);
			clamped(e, moe_format_list[i], a);
			steps(e, moe_format_list[i], a);
		}
		CHECK_OK(moe_engine_close(e));
	}
}

static void test_formats(void)
{
	setenv("MOESAIC_COMPUTE", "bf16", 1);
	each_table(formats);
}

/* ---- refused, by name ---- */

static void test_errors(void)
{
	static int8_t codes[2 * 32 * 32];
	static float scale[2 * 32];
	struct moe_quantised_arrays a = { .struct_size = sizeof a,
					  .codes = { .data = codes, .dtype = MOE_I8, .ndim = 3, .shape = { 2, 32, 32 } },
					  .scale = { .data = scale, .dtype = MOE_F32, .ndim = 3, .shape = { 2, 32, 1 } } };
	struct moe_quantised_arrays b = a;
	struct block_case c = { .E = 2, .k = 1, .H = 32, .I = 32, .T = 3 };
	struct moe_experts_params p = layer_params(&c);
	struct moe_engine *e = layer_engine(2, 1);
	struct moe_experts_info info = { .struct_size = sizeof info };
	struct moe_expert_layer *l = NULL;
	const int64_t map[2] = { 1, 0 };

	for (int i = 0; i < 64; i++)
		scale[i] = 1;
	p.weight_format = "int9";
	CHECK_ERROR(moe_experts_create(e, &p, &l), MOE_ERR_ARG, "unknown weight_format \"int9\"");
	p.weight_format = "int8";
	p.layer = 7;
	CHECK_OK(moe_experts_create(e, &p, &l));
	b.codes.dtype = MOE_F32;
	CHECK_ERROR(moe_experts_load_quantised(l, &b, &a, &a, 0, NULL, 0), MOE_ERR_FORMAT,
		    "layer 7, gate_proj of expert 0: codes has dtype F32; I8");
	b = a;
	b.scale.data = NULL;
	CHECK_ERROR(moe_experts_load_quantised(l, &a, &b, &a, 0, NULL, 0), MOE_ERR_ARG,
		    "layer 7, up_proj of expert 0: scale has no data");
	b = a;
	b.scale.shape[2] = 3;
	CHECK_ERROR(moe_experts_load_quantised(l, &a, &a, &b, 0, NULL, 0), MOE_ERR_FORMAT,
		    "down_proj of expert 0: scale has 3 groups, which do not divide 32");
	scale[40] = NAN;
	CHECK_ERROR(moe_experts_load_quantised(l, &a, &a, &a, 0, NULL, 0), MOE_ERR_FORMAT,
		    "gate_proj of expert 1: scale: the scale of row 8, column 0 is NaN");
	scale[40] = 1;
	CHECK_ERROR(moe_experts_load_quantised(l, &a, &a, &a, 1, NULL, 0), MOE_ERR_ARG, "1 quantised matrices");
	CHECK_ERROR(moe_experts_load_quantised(l, &a, &a, &a, 0, map, 1), MOE_ERR_ARG, "the map of experts has 1");
	CHECK_OK(moe_experts_load_quantised(l, &a, &a, &a, 0, map, 2));
	CHECK_OK(moe_experts_load_quantised(l, &b, &b, &b, 0, NULL, 0)); /* once */
	CHECK_OK(moe_experts_get_info(l, &info));
	CHECK(info.load_error == 0);
	moe_experts_destroy(l);
	CHECK_OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "no LoRA, and five steps of masters, in every format and parts", test_formats },
	{ "what is refused, by name", test_errors },
	{ NULL, NULL },
};
