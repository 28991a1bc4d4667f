/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dropout of LoRA's inputs: against plain loops of doubles with the same masks, in every mode, policy and number of
 * parts; the masks themselves; when there is one (F6, F7).
 */
#include "api/experts.h"
#include "tests/layer_check.h"

#include <math.h>

const char moe_suite_name[] = "dropout";

#define P .3f
#define SCALE 1.5

/* ---- reference ---- */

struct reference {
	const struct block_data *d;
	const struct moe_experts *l;
	int64_t step, position;
	double *out, *grad_x, *grad_weights, *grad[BLOCK_WEIGHTS];
};

static void reference_alloc(struct reference *r, const struct block_data *d, const struct moe_experts *l)
{
	int64_t n = (int64_t)d->c.T * d->c.H;

	*r = (struct reference){ .d = d, .l = l };
	r->out = calloc((size_t)n, sizeof(double));
	r->grad_x = calloc((size_t)n, sizeof(double));
	r->grad_weights = calloc((size_t)(d->c.T * d->c.k), sizeof(double));
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		r->grad[i] = calloc((size_t)d->n[i] + 1, sizeof(double));
}

static void reference_free(struct reference *r)
{
	free(r->out), free(r->grad_x), free(r->grad_weights);
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		free(r->grad[i]);
}

/* Factors of n columns of a token: 0 or 1 / (1 - p). */
static void mask(const struct reference *r, enum moe_dropped which, int e, int t, int n, double *m)
{
	struct moe_dropout drop = { .p = P, .position = r->position };
	float one;

	drop.key[which] = moe_mix(
		moe_mix(moe_mix(r->l->dropout_seed + (uint64_t)r->step) + which) + (uint64_t)e);
	for (int i = 0; i < n; i++) {
		one = 1;
		moe_drop(&drop, which, t, i, 1, &one);
		m[i] = one;
	}
}

/* y = W x + s B (A (m x)) */
static void forward(const float *W, const float *A, const float *B, int n, int k, int r, const double *x,
		    const double *m, double *v, double *y)
{
	for (int j = 0; j < r; j++) {
		v[j] = 0;
		for (int i = 0; i < k; i++)
			v[j] += A[j * k + i] * m[i] * x[i];
	}
	for (int o = 0; o < n; o++) {
		y[o] = 0;
		for (int i = 0; i < k; i++)
			y[o] += W[o * k + i] * x[i];
		for (int j = 0; j < r; j++)
			y[o] += SCALE * B[o * r + j] * v[j];
	}
}

/* dx += through that; gradients of A and B added */
static void backward(const float *W, const float *A, const float *B, int n, int k, int r, const double *x,
		     const double *m, const double *v, const double *dy, double *dx, double *dA, double *dB)
{
	for (int i = 0; i < k; i++)
		for (int o = 0; o < n; o++)
			dx[i] += W[o * k + i] * dy[o];
	for (int j = 0; j < r; j++) {
		double dv = 0;

		for (int o = 0; o < n; o++) {
			dv += SCALE * B[o * r + j] * dy[o];
			dB[o * r + j] += SCALE * dy[o] * v[j];
		}
		for (int i = 0; i < k; i++) {
			dA[j * k + i] += dv * m[i] * x[i];
			dx[i] += m[i] * A[j * k + i] * dv;
		}
	}
}

/* Expert e's share of token t, slot s. */
static void slot(struct reference *r, int t, int s, int e, const double *x)
{
	const struct block_data *d = r->d;
	int H = d->c.H, I = d->c.I, q = d->c.r;
	const float *W[3], *A[3], *B[3];
	double *dA[3], *dB[3], *m[3], v[3][32], *g = calloc((size_t)(6 * I + 2 * H), sizeof *g);
	double *u = g + I, *h = u + I, *dh = h + I, *dg = dh + I, *du = dg + I, *y = du + I, *dy = y + H;
	double weight = d->weights[s], dot = 0;

	for (int i = 0; i < 3; i++) {
		int64_t wide = (int64_t)(i == 2 ? I : H) * q, tall = (int64_t)(i == 2 ? H : I) * q;

		W[i] = d->w[i] + (int64_t)e * I * H;
		A[i] = d->w[layer_lora[i]] + e * wide, B[i] = d->w[layer_lora[3 + i]] + e * tall;
		dA[i] = r->grad[layer_lora[i]] + e * wide, dB[i] = r->grad[layer_lora[3 + i]] + e * tall;
		m[i] = malloc((size_t)MOE_MAX(H, I) * sizeof(double));
		mask(r, (enum moe_dropped)i, e, t, i == 2 ? I : H, m[i]);
	}
	forward(W[0], A[0], B[0], I, H, q, x, m[0], v[0], g);
	forward(W[1], A[1], B[1], I, H, q, x, m[1], v[1], u);
	for (int i = 0; i < I; i++)
		h[i] = g[i] / (1 + exp(-g[i])) * u[i];
	forward(W[2], A[2], B[2], H, I, q, h, m[2], v[2], y);
	for (int i = 0; i < H; i++) {
		double go = d->grad_out[t * H + i];

		r->out[t * H + i] += weight * y[i];
		dot += go * y[i];
		dy[i] = weight * go;
	}
	r->grad_weights[s] = dot;
	backward(W[2], A[2], B[2], H, I, q, h, m[2], v[2], dy, dh, dA[2], dB[2]);
	for (int i = 0; i < I; i++) {
		double sig = 1 / (1 + exp(-g[i]));

		du[i] = dh[i] * g[i] * sig;
		dg[i] = dh[i] * u[i] * (sig + g[i] * sig * (1 - sig));
	}
	backward(W[0], A[0], B[0], I, H, q, x, m[0], v[0], dg, r->grad_x + t * H, dA[0], dB[0]);
	backward(W[1], A[1], B[1], I, H, q, x, m[1], v[1], du, r->grad_x + t * H, dA[1], dB[1]);
	for (int i = 0; i < 3; i++)
		free(m[i]);
	free(g);
}

static void reference_run(struct reference *r)
{
	const struct block_case *c = &r->d->c;
	double *x = malloc((size_t)c->H * sizeof *x);

	for (int t = 0; t < c->T; t++) {
		for (int i = 0; i < c->H; i++)
			x[i] = r->d->x[t * c->H + i];
		for (int j = 0; j < c->k; j++)
			if (r->d->ids[t * c->k + j] >= 0)
				slot(r, t, t * c->k + j, r->d->ids[t * c->k + j], x);
	}
	free(x);
}

/* ---- layers ---- */

static struct moe_expert_layer *dropping(struct moe_engine *e, const struct block_data *d,
					 enum moe_activations activations)
{
	struct moe_experts_params p = layer_params(&d->c);

	p.lora_dropout = P;
	p.seed = 11;
	p.layer = 2;
	p.activations = activations;
	p.max_cache_depth = 2;
	return layer_make(e, d, &p);
}

static void compare(struct moe_expert_layer *l, const struct block_data *d, const struct reference *r)
{
	const struct table_tolerance *t = table_tolerance_held();
	int64_t n = (int64_t)d->c.T * d->c.H;

	layer_within("out", d->out, r->out, n, t->out);
	layer_within("grad_x", d->grad_x, r->grad_x, n, t->grad_x);
	layer_within("grad_weights", d->grad_weights, r->grad_weights, (int64_t)d->c.T * d->c.k,
		     (table_is_packed() ? 1.5 : 1) * t->grad_weights);
	for (int i = 0; i < LAYER_LORA; i++) {
		double *g = layer_get(l, &d->c, layer_lora[i], true), error;

		error = relative_error(g, r->grad[layer_lora[i]], d->n[layer_lora[i]]);
		/* a few tokens are no mean of their roundings */
		if (!CHECK(error <= (table_is_packed() && d->c.T < 10 ? 1.5 : 1) * t->grad))
			printf("  LoRA gradient %d: %.2e\n", i, error);
		free(g);
	}
}

static uint64_t run_case(struct moe_engine *e, const struct block_case *c, enum moe_activations activations,
			 bool check)
{
	struct moe_expert_layer *l;
	struct block_data d;
	struct reference r;
	uint64_t h;

	block_data_make(&d, c);
	l = dropping(e, &d, activations);
	CHECK_OK(moe_experts_set_dropout(l, MOE_DROPOUT_SAVED, 7, 40));
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	if (check) {
		reference_alloc(&r, &d, &l->layer);
		r.step = 7;
		r.position = 40;
		reference_run(&r);
		compare(l, &d, &r);
		reference_free(&r);
	}
	h = hash_of(1, d.grad_x, sizeof(float) * (size_t)(c->T * c->H));
	for (int i = 0; i < LAYER_LORA; i++) {
		double *g = layer_get(l, c, layer_lora[i], true);

		h = hash_of(h, g, sizeof *g * (size_t)d.n[layer_lora[i]]);
		free(g);
	}
	moe_experts_destroy(l);
	block_data_free(&d);
	return h;
}

static void against_reference(void)
{
	static const char *const modes[] = { "direct", "shared:1", "resident" };
	static const struct block_case cases[] = {
		{ .E = 4, .k = 2, .H = 72, .I = 300, .T = 33, .r = 5, .routing = 2, .seed = 3 },
		{ .E = 2, .k = 1, .H = 40, .I = 24, .T = 300, .r = 3, .routing = 1, .seed = 4 },
		{ .E = 3, .k = 2, .H = 300, .I = 32, .T = 2, .r = 17, .seed = 5 },
	};

	for (int parts = 1; parts <= 3; parts += 2) {
		struct moe_engine *e = layer_engine(2, parts);

		for (size_t i = 0; i < MOE_COUNT(cases); i++)
			for (int mode = 0; mode < (table()->weight_transpose ? 3 : 1); mode++) {
				struct block_case c = cases[i];
				uint64_t h;

				c.backward = modes[mode];
				c.slices_i = c.slices_h = 1;
				h = run_case(e, &c, MOE_ACTIVATIONS_RETAIN, true);
				CHECK(h == run_case(e, &c, MOE_ACTIVATIONS_RECOMPUTE, false));
				c.slices_i = c.slices_h = 2; /* slicing and groups change no mask */
				c.group_size = 1;
				CHECK(h == run_case(e, &c, MOE_ACTIVATIONS_RECOMPUTE, false));
			}
		CHECK_OK(moe_engine_close(e));
	}
}

static void references(void)
{
	each_table(against_reference);
}

/* ---- when there is a mask ---- */

static bool same(const float *a, const float *b, int64_t n)
{
	return !memcmp(a, b, (size_t)n * sizeof *a);
}

static void when(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = { .E = 3, .k = 2, .H = 48, .I = 40, .T = 20, .r = 4, .seed = 6 };
	struct moe_adamw_params adamw = adamw_default();
	struct moe_expert_layer *l, *plain;
	struct block_data d;
	float *first, *eval;
	int64_t n = 20 * 48;

	block_data_make(&d, &c);
	l = dropping(e, &d, MOE_ACTIVATIONS_RETAIN);
	plain = layer_make(e, &d, NULL);
	first = malloc((size_t)n * sizeof *first), eval = malloc((size_t)n * sizeof *eval);
	CHECK_OK(layer_forward(plain, &d, false));
	memcpy(eval, d.out, (size_t)n * sizeof *eval);
	CHECK_OK(layer_forward(l, &d, false)); /* F7: none without save */
	CHECK(same(d.out, eval, n));
	CHECK_OK(layer_forward(l, &d, true));
	memcpy(first, d.out, (size_t)n * sizeof *first);
	CHECK(!same(first, eval, n));
	CHECK_OK(layer_forward(l, &d, true)); /* F6: the same step and position, the same mask */
	CHECK(same(d.out, first, n));
	CHECK_OK(moe_experts_set_dropout(l, MOE_DROPOUT_ON, -1, 0));
	CHECK_OK(layer_forward(l, &d, false)); /* a first forward that is not saved */
	CHECK(same(d.out, first, n));
	CHECK_OK(moe_experts_set_dropout(l, MOE_DROPOUT_OFF, -1, 0));
	CHECK_OK(moe_experts_drop(l));
	CHECK_OK(layer_forward(l, &d, true));
	CHECK(same(d.out, eval, n));
	CHECK_OK(moe_experts_drop(l));
	CHECK_OK(moe_experts_set_dropout(l, MOE_DROPOUT_SAVED, 1, 0));
	CHECK_OK(layer_forward(l, &d, true)); /* another step */
	CHECK(!same(d.out, first, n));
	CHECK_OK(layer_backward(l, &d, 1));
	CHECK_OK(layer_backward(l, &d, 1));
	CHECK_OK(moe_experts_set_dropout(l, MOE_DROPOUT_SAVED, 0, 0));
	CHECK_OK(layer_forward(l, &d, true)); /* step 0 again */
	CHECK(same(d.out, first, n));
	CHECK_OK(moe_experts_drop(l));
	CHECK_OK(moe_experts_set_dropout(l, MOE_DROPOUT_SAVED, 0, 1));
	CHECK_OK(layer_forward(l, &d, true)); /* other positions */
	CHECK(!same(d.out, first, n));
	CHECK_OK(moe_experts_update(l, &adamw));
	CHECK_ERROR(moe_experts_set_dropout(l, 5, 0, 0), MOE_ERR_ARG, "mode 5");
	CHECK_ERROR(moe_experts_set_dropout(l, 0, 0, -1), MOE_ERR_ARG, "position -1");
	moe_experts_destroy(l), moe_experts_destroy(plain);
	free(first), free(eval);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* Rates, independence of neighbours, expectation. */
static void masks(void)
{
	struct moe_dropout d = { .p = P, .key = { 1, 2, 3 } };
	enum { N = 400, M = 500 };
	float row[M], other[M];
	double kept = 0, both = 0, sum = 0;

	for (int t = 0; t < N; t++) {
		for (int i = 0; i < M; i++)
			row[i] = other[i] = 1;
		moe_drop(&d, MOE_DROP_GATE, t, 0, M, row);
		moe_drop(&d, MOE_DROP_GATE, t + 1, 0, M, other);
		for (int i = 0; i < M; i++) {
			kept += row[i] != 0;
			sum += row[i];
			both += row[i] != 0 && other[i] != 0;
			CHECK(row[i] == 0 || fabsf(row[i] - 1 / (1 - P)) < 1e-6f);
		}
	}
	/* five standard deviations of N M draws */
	CHECK(fabs(kept / (N * M) - (1 - P)) < 5 * sqrt(P * (1 - P) / (N * M)));
	CHECK(fabs(sum / (N * M) - 1) < .01);
	CHECK(fabs(both / (N * M) - (1 - P) * (1 - P)) < .01);
}

const struct moe_test moe_suite_tests[] = {
	{ "against plain loops", references },
	{ "when there is a mask", when },
	{ "masks", masks },
	{ NULL, NULL },
};
