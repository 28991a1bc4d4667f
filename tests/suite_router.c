/* SPDX-License-Identifier: Apache-2.0 */
/* Every registered router: what it selects, and its gradients against central differences. */
#include "codelets/router.h"
#include "tests/child.h"

#include <math.h>

const char moe_suite_name[] = "router";

static uint64_t state;

static double uniform(void) /* [-1, 1) */
{
	return uniform_of(&state);
}

/* Runs a check on every router with several sizes. */
static void each(void (*run)(const struct moe_router *r, const struct moe_router_config *c))
{
	static const int sizes[][2] = { { 1, 1 }, { 2, 1 },  { 4, 4 },
					{ 8, 2 }, { 64, 6 }, { 128, 8 } };
	int routers = 0;

	state = moe_test_seed() * 0x9e3779b97f4a7c15u | 1;
	for (int i = 0; moe_router_list[i]; i++) {
		const struct moe_router *r = moe_router_list[i];

		CHECK(moe_router_find(r->name) == r);
		routers++;
		for (size_t s = 0; s < MOE_COUNT(sizes); s++)
			for (int normalise = 0; normalise < 2; normalise++) {
				struct moe_router_config c = { sizes[s][0], sizes[s][1],
							       normalise };

				if (r->check(&c) == MOE_OK)
					run(r, &c);
			}
	}
	CHECK(routers > 0);
	CHECK(moe_router_find("no such router") == NULL);
}

static void check_ids(const struct moe_router_config *c, const int32_t *ids)
{
	for (int j = 0; j < c->k; j++) {
		CHECK(ids[j] >= 0 && ids[j] < c->E);
		for (int i = 0; i < j; i++)
			CHECK(ids[i] != ids[j]);
	}
}

static void selection(const struct moe_router *r, const struct moe_router_config *c)
{
	enum { T = 40 };
	float *logits = malloc(sizeof *logits * (size_t)(T * c->E));
	float *w = malloc(sizeof *w * (size_t)(T * c->k)), *w1 = malloc(sizeof *w1 * (size_t)c->k);
	int32_t *ids = malloc(sizeof *ids * (size_t)(T * c->k)),
		*id1 = malloc(sizeof *id1 * (size_t)c->k);

	for (int i = 0; i < T * c->E; i++) /* few values, so that there are ties */
		logits[i] =
			i < T / 2 * c->E ? (float)(int)(uniform() * 3) : (float)(uniform() * 20);
	r->select(c, T, logits, ids, w);
	for (int t = 0; t < T; t++) {
		const float *row = logits + t * c->E;
		double sum = 0;

		check_ids(c, ids + t * c->k);
		for (int j = 0; j < c->k; j++) {
			int id = ids[t * c->k + j],
			    next = j + 1 < c->k ? ids[t * c->k + j + 1] : -1;

			CHECK(w[t * c->k + j] >= 0 && w[t * c->k + j] <= 1 + 1e-6);
			sum += w[t * c->k + j];
			/* best first, the lowest index where equal */
			CHECK(next < 0 || row[id] > row[next] ||
			      (row[id] == row[next] && id < next));
		}
		if (c->normalise || c->k == c->E)
			CHECK(fabs(sum - 1) < 1e-6);
		CHECK(sum <= 1 + 1e-6);
		for (int e = 0; e < c->E;
		     e++) { /* none that was left out is better than the last */
			int last = ids[t * c->k + c->k - 1];
			bool in = false;

			for (int j = 0; j < c->k; j++)
				in |= ids[t * c->k + j] == e;
			CHECK(in || row[e] < row[last] || (row[e] == row[last] && e > last));
		}
		r->select(c, 1, row, id1, w1); /* rows know nothing of each other */
		CHECK(!memcmp(id1, ids + t * c->k, sizeof *id1 * (size_t)c->k));
		CHECK(!memcmp(w1, w + t * c->k, sizeof *w1 * (size_t)c->k));
	}
	free(logits), free(w), free(w1), free(ids), free(id1);
}

/* NaN and infinities: ids stay valid and distinct, nothing crashes */
static void odd_logits(const struct moe_router *r, const struct moe_router_config *c)
{
	static const float odd[] = {
		NAN, INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 0, -0.0f, 1e-40f
	};
	float *logits = malloc(sizeof *logits * (size_t)c->E),
	      *w = malloc(sizeof *w * (size_t)c->k);
	float *g = malloc(sizeof *g * (size_t)c->k), *gl = malloc(sizeof *gl * (size_t)c->E);
	double *p = malloc(sizeof *p * (size_t)c->E);
	int32_t *ids = malloc(sizeof *ids * (size_t)c->k);

	for (int i = 0; i < (int)MOE_COUNT(odd) + 200; i++) {
		for (int e = 0; e < c->E; e++)
			logits[e] = i < (int)MOE_COUNT(odd) ? odd[i]
							    : odd[(int)((uniform() + 1) * 3.999)];
		r->select(c, 1, logits, ids, w);
		check_ids(c, ids);
		for (int j = 0; j < c->k; j++)
			g[j] = 1;
		r->backward(c, 1, logits, ids, w, g, gl); /* does not crash */
		if (r->probs)
			r->probs(c, 1, logits, p);
	}
	free(logits), free(w), free(g), free(gl), free(p), free(ids);
}

/* sum over slots of g w(logits), ids fixed, in double: through probs, which is in double */
static double objective(const struct moe_router *r, const struct moe_router_config *c,
			const float *logits, const int32_t *ids, const float *g, double *p)
{
	double sum = 0, total = 0;

	r->probs(c, 1, logits, p);
	for (int j = 0; j < c->k; j++)
		total += p[ids[j]];
	for (int j = 0; j < c->k; j++)
		sum += g[j] * p[ids[j]] / (c->normalise ? total : 1);
	return sum;
}

static void gradient(const struct moe_router *r, const struct moe_router_config *c)
{
	float *logits = malloc(sizeof *logits * (size_t)c->E),
	      *w = malloc(sizeof *w * (size_t)c->k);
	float *g = malloc(sizeof *g * (size_t)c->k), *gl = malloc(sizeof *gl * (size_t)c->E);
	double *p = malloc(sizeof *p * (size_t)c->E);
	int32_t *ids = malloc(sizeof *ids * (size_t)c->k);

	for (int round = 0; r->probs && round < (moe_test_full() ? 50 : 5); round++) {
		double worst = 0, scale = 0;

		for (int e = 0; e < c->E; e++)
			logits[e] = (float)(uniform() * 3);
		for (int j = 0; j < c->k; j++)
			g[j] = (float)uniform();
		r->select(c, 1, logits, ids, w);
		r->probs(c, 1, logits, p);
		for (int j = 0; j < c->k; j++) { /* the weights are what the objective is made of */
			double S = 0;

			for (int i = 0; i < c->k; i++)
				S += p[ids[i]];
			CHECK(fabs(w[j] - p[ids[j]] / (c->normalise ? S : 1)) < 1e-6);
		}
		r->backward(c, 1, logits, ids, w, g, gl);
		for (int e = 0; e < c->E; e++) {
			const float h = 0x1p-8f; /* exact in float next to logits below 4 */
			float was = logits[e], up = was + h, down = was - h;
			double high, low, want;

			logits[e] = up;
			high = objective(r, c, logits, ids, g, p);
			logits[e] = down;
			low = objective(r, c, logits, ids, g, p);
			logits[e] = was;
			want = (high - low) / ((double)up - (double)down);
			worst = worst_of(worst, fabs(want - gl[e]));
			scale = MOE_MAX(scale, fabs(want));
		}
		CHECK(worst <= 1e-4 * scale + 1e-7);
		if (c->k == 1 && c->normalise) /* the weight is 1 whatever the logits */
			for (int e = 0; e < c->E; e++)
				CHECK(gl[e] == 0);
	}
	free(logits), free(w), free(g), free(gl), free(p), free(ids);
}

static void probabilities(const struct moe_router *r, const struct moe_router_config *c)
{
	float *logits = malloc(sizeof *logits * (size_t)c->E);
	double *p = malloc(sizeof *p * (size_t)c->E);

	for (int round = 0; r->probs && round < 20; round++) {
		double sum = 0;

		for (int e = 0; e < c->E; e++)
			logits[e] = (float)(uniform() * (round < 10 ? 5 : 500));
		r->probs(c, 1, logits, p);
		for (int e = 0; e < c->E; e++) {
			CHECK(p[e] >= 0 && p[e] <= 1);
			sum += p[e];
		}
		CHECK(fabs(sum - 1) < 1e-12);
	}
	free(logits), free(p);
}

/* ---- auxiliary loss ---- */

enum { AUX_T = 12 };

/* The definition: E sum_e f_e P_e with f the share of slots and P the mean probability. */
static double aux_of(const struct moe_router *r, const struct moe_router_config *c,
		     const float *logits, const int32_t *offset, double *p)
{
	double *sum = calloc((size_t)c->E, sizeof *sum), want = 0, got;

	r->probs(c, AUX_T, logits, p);
	for (int i = 0; i < AUX_T * c->E; i++)
		sum[i % c->E] += p[i];
	for (int e = 0; e < c->E; e++)
		want += c->E * ((offset[e + 1] - offset[e]) / (double)AUX_T) * (sum[e] / AUX_T);
	got = moe_aux_loss(c->E, AUX_T, sum, offset);
	CHECK(fabs(got - want) < 1e-12 * (1 + want));
	free(sum);
	return got;
}

static void auxiliary(const struct moe_router *r, const struct moe_router_config *c)
{
	size_t n = (size_t)(AUX_T * c->E);
	float *logits = malloc(n * sizeof *logits), *w = malloc(sizeof *w * (size_t)(AUX_T * c->k));
	float *grad = calloc(n, sizeof *grad), *halves = calloc(n, sizeof *halves);
	double *p = malloc(n * sizeof *p), *q = malloc(n * sizeof *q), worst = 0, scale = 0;
	int32_t *ids = malloc(sizeof *ids * (size_t)(AUX_T * c->k));
	int32_t *offset = calloc((size_t)c->E + 1, sizeof *offset);

	if (!r->probs)
		goto out;
	for (size_t i = 0; i < n; i++)
		logits[i] = (float)(uniform() * 2);
	r->select(c, AUX_T, logits, ids, w);
	for (int i = 0; i < AUX_T * c->k; i++)
		offset[ids[i] + 1]++;
	for (int e = 0; e < c->E; e++)
		offset[e + 1] += offset[e];
	aux_of(r, c, logits, offset, p);
	moe_aux_loss_bwd(c->E, AUX_T, AUX_T, p, offset, 0.5, grad);
	/* in two blocks of tokens: the same */
	moe_aux_loss_bwd(c->E, AUX_T, 5, p, offset, 0.5, halves);
	moe_aux_loss_bwd(c->E, AUX_T, AUX_T - 5, p + 5 * c->E, offset, 0.5, halves + 5 * c->E);
	CHECK(!memcmp(grad, halves, n * sizeof *grad));
	for (size_t i = 0; i < n; i += moe_test_full() ? 1 : 7) {
		const float h = 0x1p-8f;
		float was = logits[i], up = was + h, down = was - h;
		double high, low, want;

		logits[i] = up;
		high = aux_of(r, c, logits, offset, q);
		logits[i] = down;
		low = aux_of(r, c, logits, offset, q);
		logits[i] = was;
		want = 0.5 * (high - low) / ((double)up - (double)down);
		worst = worst_of(worst, fabs(want - grad[i]));
		scale = MOE_MAX(scale, fabs(want));
	}
	CHECK(worst <= 1e-4 * scale + 1e-8);
	/* k experts each hit by every token: the loss is k whatever the logits */
	if (c->k == c->E)
		CHECK(fabs(aux_of(r, c, logits, offset, p) - c->k) < 1e-9);
out:
	free(logits), free(w), free(grad), free(halves), free(p), free(q), free(ids), free(offset);
}

/* ---- z-loss ---- */

static void z_loss(void)
{
	enum { T = 5, E = 6 };
	float logits[T * E], grad[T * E] = { 0 }, halves[T * E] = { 0 };
	const double coef = 0.7;

	for (int i = 0; i < T * E; i++)
		logits[i] = (float)(uniform() * 3);
	logits[7] = 300; /* no overflow */
	moe_z_loss_bwd(E, T, T, logits, coef, grad);
	moe_z_loss_bwd(E, T, 2, logits, coef, halves);
	moe_z_loss_bwd(E, T, T - 2, logits + 2 * E, coef, halves + 2 * E);
	CHECK(!memcmp(grad, halves, sizeof grad));
	for (int i = 0; i < T * E; i++) {
		const float h = 0x1p-6f, was = logits[i];
		double high, low;

		logits[i] = was + h;
		high = moe_z_sum(E, T, logits);
		logits[i] = was - h;
		low = moe_z_sum(E, T, logits);
		logits[i] = was;
		CHECK(fabs(coef * (high - low) / (2.0 * (double)h * T) - (double)grad[i]) <= 1e-3 * (1 + fabs((double)grad[i])));
	}
	for (int i = 0; i < E; i++)
		logits[i] = 0; /* log E */
	CHECK(fabs(moe_z_sum(E, 1, logits) - log(E) * log(E)) < 1e-12);
	logits[0] = NAN;
	CHECK(isnan(moe_z_sum(E, 1, logits)));
}

static void bad_sizes(void)
{
	static const int bad[][2] = { { 0, 1 },	 { -1, 1 }, { 8, 0 },
				      { 8, -1 }, { 8, 9 },  { 1 << 20, 2 } };

	for (int i = 0; moe_router_list[i]; i++)
		for (size_t s = 0; s < MOE_COUNT(bad); s++) {
			struct moe_router_config c = { bad[s][0], bad[s][1], true };

			CHECK(moe_router_list[i]->check(&c) == MOE_ERR_ARG);
			CHECK(strlen(moe_last_error()) > 0);
		}
}

static void select_all(void)
{
	each(selection);
}

static void odd_all(void)
{
	each(odd_logits);
}

static void gradient_all(void)
{
	each(gradient);
}

static void probabilities_all(void)
{
	each(probabilities);
}

static void auxiliary_all(void)
{
	each(auxiliary);
}

const struct moe_test moe_suite_tests[] = {
	{ "selection", select_all },
	{ "NaN and infinities", odd_all },
	{ "probabilities", probabilities_all },
	{ "gradient", gradient_all },
	{ "auxiliary loss", auxiliary_all },
	{ "z-loss", z_loss },
	{ "bad sizes", bad_sizes },
	{ NULL, NULL },
};
