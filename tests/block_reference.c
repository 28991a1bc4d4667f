/* SPDX-License-Identifier: Apache-2.0 */
/* One MoE block in plain loops of doubles: what the random blocks of block_check.c are compared with. */
#include "tests/block_check.h"

#include <math.h>

/* y = W x, W [n, k] */
static void times(int n, int k, const float *W, const double *x, double *y)
{
	for (int i = 0; i < n; i++, W += k) {
		double s[4] = { 0 };
		int j = 0;

		for (; j + 4 <= k; j += 4)
			for (int u = 0; u < 4; u++)
				s[u] += W[j + u] * x[j + u];
		for (; j < k; j++)
			s[0] += W[j] * x[j];
		y[i] = s[0] + s[1] + s[2] + s[3];
	}
}

/* x += f W^T y */
static void times_t(int n, int k, const float *W, const double *y, double f, double *x)
{
	for (int i = 0; i < n; i++, W += k)
		for (int j = 0; j < k; j++)
			x[j] += f * y[i] * W[j];
}

/* G += f y x^T; G NULL: not wanted */
static void outer(int n, int k, const double *y, const double *x, double f, double *G)
{
	for (int i = 0; G && i < n; i++, G += k)
		for (int j = 0; j < k; j++)
			G[j] += f * y[i] * x[j];
}

static double sigmoid(double x)
{
	return 1 / (1 + exp(-x));
}

/* One expert (index e) or the shared one (e < 0) on one row. */
struct swiglu {
	int H, I, r;
	double s, limit, alpha, shift, nearest;
	const float *w[3], *a[3], *b[3]; /* gate, up, down */
	double *gw[3], *ga[3], *gb[3];
	double *gate, *up, *h, *y, *u[3], *dh, *dgate, *dup, *du[3];
};

static void linear(const struct swiglu *m, int i, int n, int k, const double *x, double *y)
{
	double *t = calloc((size_t)MOE_MAX(n, 1), sizeof *t);

	times(n, k, m->w[i], x, y);
	if (m->r) {
		times(m->r, k, m->a[i], x, m->u[i]);
		times(n, m->r, m->b[i], m->u[i], t);
		for (int j = 0; j < n; j++)
			y[j] += m->s * t[j];
	}
	free(t);
}

/* dx += through linear i */
static void linear_bwd(const struct swiglu *m, int i, int n, int k, const double *x,
		       const double *dy, double *dx)
{
	times_t(n, k, m->w[i], dy, 1, dx);
	outer(n, k, dy, x, 1, m->gw[i]);
	if (!m->r)
		return;
	memset(m->du[i], 0, (size_t)m->r * sizeof(double));
	times_t(n, m->r, m->b[i], dy, m->s, m->du[i]);
	times_t(m->r, k, m->a[i], m->du[i], 1, dx);
	outer(n, m->r, dy, m->u[i], m->s, m->gb[i]);
	outer(m->r, k, m->du[i], x, 1, m->ga[i]);
}

static void swiglu_forward(struct swiglu *m, const double *x)
{
	linear(m, 0, m->I, m->H, x, m->gate);
	linear(m, 1, m->I, m->H, x, m->up);
	for (int i = 0; i < m->I; i++) {
		double g = fmin(m->gate[i], m->limit), u = fmax(fmin(m->up[i], m->limit), -m->limit);

		m->h[i] = (u + m->shift) * g * sigmoid(m->alpha * g);
		m->nearest = fmin(m->nearest, fmin(fabs(m->gate[i] - m->limit), fabs(fabs(m->up[i]) - m->limit)));
	}
	linear(m, 2, m->H, m->I, m->h, m->y);
}

static void swiglu_backward(const struct swiglu *m, const double *x, const double *dy, double *dx)
{
	memset(m->dh, 0, (size_t)m->I * sizeof(double));
	linear_bwd(m, 2, m->H, m->I, m->h, dy, m->dh);
	for (int i = 0; i < m->I; i++) {
		double g = fmin(m->gate[i], m->limit), u = fmax(fmin(m->up[i], m->limit), -m->limit);
		double q = sigmoid(m->alpha * g);

		m->dgate[i] = m->gate[i] > m->limit ? 0 : m->dh[i] * (u + m->shift) * q * (1 + m->alpha * g * (1 - q));
		m->dup[i] = fabs(m->up[i]) > m->limit ? 0 : m->dh[i] * g * q;
	}
	linear_bwd(m, 0, m->I, m->H, x, m->dgate, dx);
	linear_bwd(m, 1, m->I, m->H, x, m->dup, dx);
}

static double *zeros(int64_t n)
{
	return calloc((size_t)n + 1, sizeof(double));
}

static void swiglu_alloc(struct swiglu *m, const struct block_case *c, int I, int r)
{
	int H = c->H;

	m->H = H;
	m->I = I;
	m->r = r;
	m->limit = c->limit != 0 ? (double)c->limit : INFINITY;
	m->alpha = c->alpha != 0 ? (double)c->alpha : 1;
	m->shift = (double)c->shift;
	m->nearest = INFINITY;
	m->gate = zeros(I), m->up = zeros(I), m->h = zeros(I), m->y = zeros(H);
	m->dh = zeros(I), m->dgate = zeros(I), m->dup = zeros(I);
	for (int i = 0; i < 3; i++)
		m->u[i] = zeros(r), m->du[i] = zeros(r);
}

static void swiglu_free(struct swiglu *m)
{
	free(m->gate), free(m->up), free(m->h), free(m->y);
	free(m->dh), free(m->dgate), free(m->dup);
	for (int i = 0; i < 3; i++)
		free(m->u[i]), free(m->du[i]);
}

/* Points m at expert e's weights and gradients. */
static void swiglu_expert(struct swiglu *m, const struct block_data *d, struct block_reference *r,
			  int e)
{
	static const int w[3] = { MOE_BLOCK_GATE_PROJ, MOE_BLOCK_UP_PROJ, MOE_BLOCK_DOWN_PROJ };
	static const int a[3] = { MOE_BLOCK_GATE_LORA_A, MOE_BLOCK_UP_LORA_A,
				  MOE_BLOCK_DOWN_LORA_A };
	static const int b[3] = { MOE_BLOCK_GATE_LORA_B, MOE_BLOCK_UP_LORA_B,
				  MOE_BLOCK_DOWN_LORA_B };
#define PIECE(list, i) (list[i] ? list[i] + d->n[i] / d->c.E * e : NULL)

	for (int i = 0; i < 3; i++) {
		/* a shared A gets both gradients in gate's array */
		int ga = i == 1 && d->c.share_a ? a[0] : a[i];

		m->w[i] = PIECE(d->w, w[i]);
		m->a[i] = PIECE(d->w, a[i]);
		m->b[i] = PIECE(d->w, b[i]);
		m->gw[i] = PIECE(r->grad, w[i]);
		m->ga[i] = PIECE(r->grad, ga);
		m->gb[i] = PIECE(r->grad, b[i]);
	}
#undef PIECE
}

static void token_experts(struct swiglu *m, const struct block_data *d, struct block_reference *r,
			  const int32_t *ids, const double *w, int t, const double *x,
			  const double *dy)
{
	const struct block_case *c = &d->c;
	double *out = r->out + (int64_t)t * c->H, *scaled = zeros(c->H);

	for (int j = 0; j < c->k; j++) {
		int e = ids[j];
		double dot = 0;

		if (e < 0)
			continue;
		swiglu_expert(m, d, r, e);
		swiglu_forward(m, x);
		for (int i = 0; i < c->H; i++) {
			out[i] += w[j] * m->y[i];
			dot += dy[i] * m->y[i];
			scaled[i] = w[j] * dy[i];
		}
		r->grad_weights[t * c->k + j] = dot;
		swiglu_backward(m, x, scaled, r->grad_x + (int64_t)t * c->H);
	}
	free(scaled);
}

static void token_shared(struct swiglu *m, const struct block_data *d, struct block_reference *r,
			 int t, const double *x, const double *dy)
{
	const struct block_case *c = &d->c;
	double *gx = r->grad_x + (int64_t)t * c->H, *scaled = zeros(c->H), q = 1, arg = 0, dot = 0;

	for (int i = 0; i < 3; i++) {
		m->w[i] = d->w[MOE_BLOCK_SHARED_GATE + i];
		m->gw[i] = r->grad[MOE_BLOCK_SHARED_GATE + i];
	}
	swiglu_forward(m, x);
	if (c->sigmoid) {
		times(1, c->H, d->w[MOE_BLOCK_SHARED_ROUTER], x, &arg);
		q = sigmoid(arg);
	}
	for (int i = 0; i < c->H; i++) {
		r->out[(int64_t)t * c->H + i] += q * m->y[i];
		dot += dy[i] * m->y[i];
		scaled[i] = q * dy[i];
	}
	swiglu_backward(m, x, scaled, gx);
	if (c->sigmoid) {
		arg = dot * q * (1 - q);
		times_t(1, c->H, d->w[MOE_BLOCK_SHARED_ROUTER], &arg, 1, gx);
		outer(1, c->H, &arg, x, 1, r->grad[MOE_BLOCK_SHARED_ROUTER]);
	}
	free(scaled);
}

/* p [T, E]; lse [T]: log sum exp of the logits */
static void probabilities(const struct block_data *d, const double *x, double *p, double *lse)
{
	const struct block_case *c = &d->c;

	for (int t = 0; t < c->T; t++, p += c->E, x += c->H) {
		double max, sum = 0;

		times(c->E, c->H, d->w[MOE_BLOCK_ROUTER], x, p);
		max = p[0];
		for (int e = 1; e < c->E; e++)
			max = MOE_MAX(max, p[e]);
		for (int e = 0; e < c->E; e++)
			sum += p[e] = exp(p[e] - max);
		for (int e = 0; e < c->E; e++)
			p[e] /= sum;
		lse[t] = max + log(sum);
	}
}

/* dL/dp of one token, from the gradients of the weights and of the auxiliary loss */
static void grad_probabilities(const struct block_case *c, const double *p, const int32_t *ids,
			       const double *gw, const double *share, double *dp)
{
	double S = 0, dot = 0;

	for (int j = 0; j < c->k; j++)
		S += p[ids[j]];
	for (int j = 0; j < c->k; j++)
		dot += gw[j] * (p[ids[j]] / S);
	for (int e = 0; e < c->E; e++)
		dp[e] = c->aux * c->E * share[e] / c->T;
	for (int j = 0; j < c->k; j++)
		dp[ids[j]] += c->normalise ? (gw[j] - dot) / S : gw[j];
}

static void router_backward(const struct block_data *d, struct block_reference *r, const double *x,
			    const double *p, const double *lse, const int32_t *ids)
{
	const struct block_case *c = &d->c;
	double *share = zeros(c->E), *dp = zeros(c->E), *mean = zeros(c->E);

	for (int i = 0; i < c->T * c->k; i++)
		share[ids[i]] += 1.0 / c->T;
	for (int i = 0; i < c->T * c->E; i++)
		mean[i % c->E] += p[i] / c->T;
	r->aux = r->z = 0;
	for (int e = 0; e < c->E; e++)
		r->aux += c->E * share[e] * mean[e];
	for (int t = 0; t < c->T; t++, x += c->H, p += c->E) {
		double *g = r->grad_logits + (int64_t)t * c->E, dot = 0;

		grad_probabilities(c, p, ids + (int64_t)t * c->k,
				   r->grad_weights + (int64_t)t * c->k, share, dp);
		for (int e = 0; e < c->E; e++)
			dot += dp[e] * p[e];
		for (int e = 0; e < c->E; e++)
			g[e] = p[e] * (dp[e] - dot) + 2 * c->z * lse[t] * p[e] / c->T;
		r->z += lse[t] * lse[t] / c->T;
		times_t(c->E, c->H, d->w[MOE_BLOCK_ROUTER], g, 1, r->grad_x + (int64_t)t * c->H);
		outer(c->E, c->H, g, x, 1, r->grad[MOE_BLOCK_ROUTER]);
	}
	free(share), free(dp), free(mean);
}

static void reference_alloc(struct block_reference *r, const struct block_data *d)
{
	const struct block_case *c = &d->c;
	int64_t n = (int64_t)c->T * c->H;

	free(r->out), free(r->grad_x), free(r->grad_weights), free(r->grad_logits);
	r->out = zeros(n);
	r->grad_x = zeros(n);
	r->grad_weights = zeros((int64_t)c->T * c->k);
	r->grad_logits = zeros((int64_t)c->T * c->E);
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		if (d->w[i] && !r->grad[i])
			r->grad[i] = zeros(d->n[i]);
}

void block_reference(struct block_reference *r, const struct block_data *d, const int32_t *ids)
{
	const struct block_case *c = &d->c;
	int64_t n = (int64_t)c->T * c->H;
	struct swiglu m = { .s = 1.5 }, shared = { .s = 1 };
	double *x = zeros(n), *dy = zeros(n), *w = zeros((int64_t)c->T * c->k);
	double *p = zeros((int64_t)c->T * c->E), *lse = zeros(c->T);

	reference_alloc(r, d);
	swiglu_alloc(&m, c, c->I, c->r);
	swiglu_alloc(&shared, c, c->shared, 0);
	for (int64_t i = 0; i < n; i++)
		x[i] = d->x[i], dy[i] = d->grad_out[i];
	for (int i = 0; i < c->T * c->k; i++)
		w[i] = d->weights[i];
	if (c->router) {
		probabilities(d, x, p, lse);
		for (int t = 0; t < c->T; t++) {
			double S = 0;

			for (int j = 0; j < c->k; j++)
				S += p[t * c->E + ids[t * c->k + j]];
			for (int j = 0; j < c->k; j++)
				w[t * c->k + j] =
					p[t * c->E + ids[t * c->k + j]] / (c->normalise ? S : 1);
		}
	}
	for (int t = 0; t < c->T; t++) {
		token_experts(&m, d, r, ids + (int64_t)t * c->k, w + (int64_t)t * c->k, t,
			      x + (int64_t)t * c->H, dy + (int64_t)t * c->H);
		if (c->shared)
			token_shared(&shared, d, r, t, x + (int64_t)t * c->H,
				     dy + (int64_t)t * c->H);
	}
	if (c->router)
		router_backward(d, r, x, p, lse, ids);
	if (c->share_a && c->r) /* both names are one array */
		memcpy(r->grad[MOE_BLOCK_UP_LORA_A], r->grad[MOE_BLOCK_GATE_LORA_A],
		       (size_t)d->n[MOE_BLOCK_UP_LORA_A] * sizeof(double));
	r->nearest = fmin(m.nearest, shared.nearest);
	swiglu_free(&m);
	swiglu_free(&shared);
	free(x), free(dy), free(w), free(p), free(lse);
}

void block_second(struct block_data *d)
{
	for (int i = 0; i < d->c.T * d->c.H; i++)
		d->x[i] *= i % 3 ? 0.5f : -1, d->grad_out[i] *= -0.5f;
}

void block_settle_limit(struct block_data *d)
{
	size_t bytes = (size_t)(d->c.T * d->c.H) * sizeof(float);
	float *x = d->x, *second = malloc(bytes + 1), *grad_out = d->grad_out;
	double nearest;

	memcpy(second, x, bytes);
	d->x = second;
	d->grad_out = calloc(bytes + 1, 1);
	block_second(d);
	free(d->grad_out);
	d->grad_out = grad_out;
	do {
		struct block_reference r = { 0 };

		d->c.limit *= 1.001f;
		block_reference(&r, d, d->ids);
		nearest = r.nearest;
		d->x = x;
		block_reference(&r, d, d->ids);
		nearest = fmin(nearest, r.nearest);
		d->x = second;
		block_reference_free(&r);
	} while (nearest < 1e-5);
	d->x = x;
	free(second);
}

void block_reference_free(struct block_reference *r)
{
	free(r->out), free(r->grad_x), free(r->grad_weights), free(r->grad_logits);
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		free(r->grad[i]);
	memset(r, 0, sizeof *r);
}
