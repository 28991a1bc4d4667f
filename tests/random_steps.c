/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer over layers, and training steps of layers behind each other. */
#include "tests/random_layers.h"

#include <math.h>

/* ---- one step of the optimizer, whatever state the layers are in ---- */

static bool may_update(const struct layer_model *m)
{
	return m->pending ? !has_buffers(m) && !m->taken : m->open;
}

static void bad_optimizer(struct layer_model m[LAYERS], struct moe_engine *e,
			  struct moe_optimizer *o)
{
	struct moe_expert_layer *twice[2] = { m[0].l, m[0].l };
	struct moe_adamw_params p = adamw_default();
	struct moe_optimizer *none;

	expect_status(moe_optimizer_create(e, twice, 2, &none), MOE_ERR_ARG,
		      "an optimizer of a layer twice");
	expect_status(moe_optimizer_create(e, twice, 0, &none), MOE_ERR_ARG,
		      "an optimizer of no layers");
	p.max_grad_norm = NAN;
	expect_status(moe_optimizer_step(o, &p), MOE_ERR_ARG, "max_grad_norm NaN");
	p.max_grad_norm = 0, p.learning_rate = -1;
	expect_status(moe_optimizer_step(o, &p), MOE_ERR_ARG, "a negative learning rate");
	expect_status(moe_optimizer_wait(o, 1, NULL), MOE_ERR_ARG, "step 1 of 0");
	expect_status(moe_optimizer_step(NULL, &p), MOE_ERR_ARG, "an optimizer that is NULL");
}

/* How far values that rounding cuts or not may move the norm of layers m[0] to m[n - 1]. */
static double norm_slack(const struct layer_model *m, int n)
{
	double s = 0;

	for (int i = 0; i < n; i++)
		for (int j = 0; j < 9; j++)
			s += m[i].slack.grad[j] * m[i].slack.grad[j];
	return sqrt(s);
}

/* Of layers m[0] to m[n - 1]; its effect on their models. Returns the norm before clipping. */
static double model_step(struct layer_model *m, int n, const struct moe_adamw_params *p)
{
	double norm = 0, factor = 1;

	for (int i = 0; i < n; i++)
		norm += squares(&m[i]);
	norm = sqrt(norm);
	if (p->max_grad_norm > 0)
		factor = fmin(1, p->max_grad_norm / (norm + 1e-6));
	for (int i = 0; i < n; i++)
		model_update(&m[i], p, factor);
	return norm;
}

static void check_norm(struct moe_optimizer *o, int64_t step, const struct moe_adamw_params *p,
		       double want, double loose, double slack)
{
	double norm = 0;

	expect_status(moe_optimizer_wait(o, step, &norm), MOE_OK, "optimizer wait");
	if (p->max_grad_norm > 0)
		expect(fabs(norm - want) <= 2 * loose * random_bound() * (want + .1) + slack,
		       "the gradient norm");
	else
		expect(isnan(norm), "no norm without clipping");
}

static struct moe_adamw_params draw_params(const struct layer_model *m, int n)
{
	static const double part[] = { 0, .3, 100 };
	struct moe_adamw_params p = adamw_default();
	double norm = 1e-3;

	for (int i = 0; i < n; i++)
		norm += sqrt(squares(&m[i]));
	p.eps = 1, p.learning_rate = .05;
	p.max_grad_norm = part[any(3)] * norm;
	return p;
}

static void run_step(struct layer_model *m, int n, struct moe_engine *e, struct moe_optimizer *o)
{
	struct moe_adamw_params p = draw_params(m, n);
	enum moe_status st, want = MOE_OK;
	bool inject = any(8) == 0;
	double norm;

	for (int i = 0; i < n; i++)
		if (!may_update(&m[i]))
			want = MOE_ERR_STATE;
	for (int i = 0; i < n && want == MOE_OK; i++)
		if (m[i].bound || m[i].bound_base)
			do_wait(&m[i]); /* its params are written */
	if (inject)
		moe_alloc_fail_after(1 + any(80));
	st = moe_optimizer_step(o, &p);
	moe_alloc_fail_after(-1);
	if (inject && want == MOE_OK && st == MOE_ERR_NOMEM) {
		expect(strstr(moe_last_error(), "in part") != NULL, "text of a failed step");
		moe_optimizer_destroy(o);
		for (int i = 0; i < n; i++) {
			model_free(&m[i]);
			model_make(&m[i], e);
		}
		return;
	}
	expect_status(st, want, "optimizer step");
	if (st == MOE_OK) {
		norm = model_step(m, n, &p);
		check_norm(o, any(2), &p, norm, 1, norm_slack(m, n));
		for (int i = 0; i < n; i++)
			check_update(&m[i]);
	}
	moe_optimizer_destroy(o);
}

void do_optimizer(struct layer_model all[LAYERS], struct moe_engine *e)
{
	int n = 1 + any(LAYERS);
	struct layer_model *m = n < LAYERS ? &all[any(LAYERS)] : all;
	struct moe_expert_layer *layers[LAYERS];
	struct moe_optimizer *o = NULL;
	bool train = true;

	for (int i = 0; i < n; i++) {
		layers[i] = m[i].l;
		train = train && trains(&m[i]);
	}
	expect_status(moe_optimizer_create(e, layers, n, &o), train ? MOE_OK : MOE_ERR_ARG,
		      "optimizer");
	if (!o)
		return;
	if (!any(4))
		bad_optimizer(all, e, o);
	run_step(m, n, e, o);
}

/* ---- training steps ---- */

enum { STEPS = 3, MICRO = 2, LINKS = STEPS * MICRO * DEPTH };

/* A micro-batch through both layers: what the first gives is what the second reads. */
struct link {
	struct block_data
		d[LAYERS]; /* references; what is handed on is in d[0].out and d[1].grad_x */
	struct block_reference r[LAYERS];
	struct slack slack[LAYERS];
	struct moe_rows *rows[2];
};

struct chain {
	struct layer_model *m;
	struct moe_engine *e;
	struct moe_optimizer
		*optimizer; /* NULL: a layer trains nothing, the other is updated alone */
	struct link link[LINKS];
	int n;
	bool ordered; /* the engine keeps the order of rows: nothing waits */
};

static void as_floats(float *to, const double *from, const struct block_data *d)
{
	for (int64_t i = 0; i < (int64_t)d->c.T * d->c.H; i++)
		to[i] = (float)from[i];
}

/* What both layers give, with the limits of their SwiGLU moved (sign 1, -1) or as they are (0). */
static void link_reference(struct chain *c, struct link *k, int sign,
			   struct block_reference r[LAYERS])
{
	struct block_data d[LAYERS] = { k->d[0], k->d[1] };

	for (int i = 0; i < LAYERS; i++)
		if (sign && d[i].c.limit != 0)
			d[i].c.limit = moved_limit(&c->m[i], sign);
	block_reference(&r[0], &d[0], d[0].ids);
	as_floats(d[1].x, r[0].out, &d[0]);
	block_reference(&r[1], &d[1], d[1].ids);
	as_floats(d[0].grad_out, r[1].grad_x, &d[0]);
	block_reference_free(&r[0]);
	block_reference(&r[0], &d[0], d[0].ids);
}

/* Arrays and references; routing weights large enough that the second layer's input is not small.
 */
static struct link *link_make(struct chain *c)
{
	struct link *k = &c->link[c->n++];
	struct block_reference moved[2][LAYERS] = { 0 };
	int T = any(T_MAX + 1);
	bool clamped = false;

	memset(k, 0, sizeof *k);
	for (int i = 0; i < LAYERS; i++) {
		k->d[i] = call_of(&c->m[i], T);
		for (int64_t j = 0; j < (int64_t)T * k->d[i].c.k; j++)
			k->d[i].weights[j] *= 8;
		clamped |= k->d[i].c.limit != 0;
	}
	for (int i = 0; i < 2 && clamped; i++)
		link_reference(c, k, 2 * i - 1, moved[i]);
	for (int i = 0; i < LAYERS && clamped; i++) {
		slack_between(&c->m[i], &k->d[i], &moved[0][i], &moved[1][i], &k->slack[i]);
		block_reference_free(&moved[0][i]);
		block_reference_free(&moved[1][i]);
	}
	link_reference(c, k, 0, k->r);
	return k;
}

static void order_rows(struct chain *c, struct link *k)
{
	int64_t T = k->d[0].c.T;
	struct moe_rows *none;

	expect_status(moe_rows_create(c->e, NULL, 3, &none), MOE_ERR_ARG, "rows of NULL");
	expect_status(moe_rows_create(c->e, k->d[0].out, 0, &none), MOE_ERR_ARG, "no rows");
	if (T > 1 && !any(4)) { /* told of fewer */
		struct layer_call a = layer_call(&k->d[0], (int)T);

		expect_status(moe_rows_create(c->e, k->d[0].out, T - 1, &none), MOE_OK, "rows");
		expect_status(
			moe_experts_forward_async(c->m[0].l, &a.x, &a.ids, &a.weights, 1, &a.out),
			MOE_ERR_ARG, "more rows than were told");
		moe_rows_destroy(none);
	}
	expect_status(moe_rows_create(c->e, k->d[0].out, T + 1, &k->rows[0]), MOE_OK, "rows");
	expect_status(moe_rows_create(c->e, k->d[1].grad_x, T + any(2) + !T, &k->rows[1]), MOE_OK,
		      "rows");
	expect_status(moe_rows_create(c->e, k->d[0].out, T + 1, &none), MOE_ERR_ARG, "rows twice");
}

static void link_forward(struct chain *c, struct link *k)
{
	struct layer_call a[LAYERS];

	if (c->ordered)
		order_rows(c, k);
	for (int i = 0; i < LAYERS; i++) {
		struct layer_model *m = &c->m[i];

		a[i] = layer_call(&k->d[i], k->d[i].c.T);
		if (i)
			a[i].x.data = k->d[0].out;
		if (i && !c->ordered)
			settle(&c->m[0]);
		expect_status(moe_experts_forward_async(m->l, &a[i].x, &a[i].ids, &a[i].weights, 1,
							&a[i].out),
			      MOE_OK, "forward in a step");
		remember(m, &k->d[i], k->d[i].out, k->r[i].out, (int64_t)k->d[i].c.T * k->d[i].c.H,
			 k->slack[i].out, false);
	}
}

static void link_backward(struct chain *c, struct link *k)
{
	for (int i = LAYERS - 1; i >= 0; i--) {
		struct layer_model *m = &c->m[i];
		struct block_data *d = &k->d[i];
		struct layer_call a = layer_call(d, d->c.T);
		double scale = any(3) ? 1 : .5;

		if (!i)
			a.grad_out.data = k->d[1].grad_x;
		if (!i && !c->ordered)
			settle(&c->m[1]);
		if (m->pending && !several(m))
			settle(m);
		expect_status(moe_experts_backward_async(m->l, &a.grad_out, scale, &a.grad_x,
							 &a.grad_weights),
			      MOE_OK, "backward in a step");
		remember(m, d, d->grad_x, k->r[i].grad_x, (int64_t)d->c.T * d->c.H,
			 k->slack[i].grad_x, false);
		remember(m, d, d->grad_weights, k->r[i].grad_weights, (int64_t)d->c.T * d->c.k,
			 k->slack[i].grad_weights, false);
		add_gradients(m, &k->r[i], &k->slack[i], scale);
	}
}

static void update_alone(struct layer_model *m, const struct moe_adamw_params *p)
{
	struct moe_adamw_params own = *p;

	own.max_grad_norm = 0;
	expect_status(moe_experts_update(m->l, &own), trains(m) ? MOE_OK : MOE_ERR_STATE,
		      "update in a step");
	if (trains(m))
		model_update(m, &own, 1);
}

static void train_step(struct chain *c, int64_t step)
{
	struct moe_adamw_params p;
	int micro = 1 + any(MICRO), depth = c->m[0].p.max_cache_depth;
	double norm;

	depth = depth < c->m[1].p.max_cache_depth ? depth : c->m[1].p.max_cache_depth;
	for (int i = 0; i < micro; i++) {
		int first = c->n, burst = 1 + any(depth);

		for (int j = 0; j < burst; j++)
			link_forward(c, link_make(c));
		for (int j = burst - 1; j >= 0; j--)
			link_backward(c, &c->link[first + j]);
	}
	for (int i = 0; i < LAYERS; i++)
		if (c->m[i].bound || c->m[i].bound_base)
			settle(&c->m[i]);
	p = draw_params(c->m, LAYERS);
	if (!c->optimizer) {
		for (int i = 0; i < LAYERS; i++)
			update_alone(&c->m[i], &p);
		return;
	}
	expect_status(moe_optimizer_step(c->optimizer, &p), MOE_OK, "optimizer step");
	norm = model_step(c->m, LAYERS, &p);
	if (!any(3))
		check_norm(c->optimizer, any(2) ? step : 0, &p, norm, c->m[0].loose,
			   norm_slack(c->m, LAYERS));
}

static void chain_free(struct chain *c)
{
	for (int i = 0; i < LAYERS; i++)
		check_update(&c->m[i]);
	moe_optimizer_destroy(c->optimizer);
	for (int i = 0; i < c->n; i++) {
		struct link *k = &c->link[i];

		for (int j = 0; j < 2; j++)
			moe_rows_destroy(k->rows[j]);
		for (int j = 0; j < LAYERS; j++) {
			block_reference_free(&k->r[j]);
			call_free(&k->d[j]);
		}
	}
}

void do_steps(struct layer_model m[LAYERS], struct moe_engine *e)
{
	struct chain c = { .m = m, .e = e, .ordered = any(3) > 0 };
	struct moe_expert_layer *layers[LAYERS];
	int steps = 1 + any(STEPS);

	for (int i = 0; i < LAYERS; i++) {
		layers[i] = m[i].l;
		while (m[i].n_kept)
			do_drop(&m[i]);
		do_wait(&m[i]);
		m[i].loose = 4;
	}
	if (trains(&m[0]) && trains(&m[1]))
		expect_status(moe_optimizer_create(e, layers, LAYERS, &c.optimizer), MOE_OK,
			      "optimizer");
	for (int i = 0; i < steps && !random_failed(); i++)
		train_step(&c, i + 1);
	chain_free(&c);
	for (int i = 0; i < LAYERS; i++)
		m[i].loose = 1;
}
