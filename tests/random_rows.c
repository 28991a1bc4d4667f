/* SPDX-License-Identifier: Apache-2.0 */
/* A token whose numbers are not finite. */
#include "tests/random_layers.h"

#include <math.h>

/* Token t of call d is bad in x (or in grad_out); what the others give is in r. */
struct bad_token {
	struct layer_model *m;
	struct block_data d;
	struct block_reference r;
	struct slack slack;
	int t;
	bool in_grad_out;
	bool visits[N_EXPERTS], skipped; /* no expert at all */
};

static int64_t n_finite(const float *v, int64_t n)
{
	int64_t found = 0;

	for (int64_t i = 0; i < n; i++)
		found += isfinite(v[i]) != 0;
	return found;
}

/* Into a row of token t: not one finite number, or as if it were not there. */
static void check_row(const struct bad_token *b, const float *rows, const double *want,
		      int64_t width, double slack, const char *what)
{
	int64_t n = (int64_t)b->d.c.T * width, at = b->t * width;
	float *others = malloc((size_t)n * sizeof *others);

	expect(n_finite(rows + at, width) == (b->skipped ? width : 0), what);
	memcpy(others, rows, (size_t)n * sizeof *others);
	for (int64_t i = at; i < at + width; i++) {
		expect(!b->skipped || rows[i] == 0, what);
		others[i] = (float)want[i];
	}
	expect(error_of_floats(others, want, n, slack) <= random_bound(), what);
	free(others);
}

/* The token's own slots; -1 has 0. */
static void check_slots(const struct bad_token *b)
{
	const struct block_data *d = &b->d;

	for (int j = 0; j < d->c.T * d->c.k; j++) {
		bool own = j / d->c.k == b->t && d->ids[j] >= 0;

		expect(own == !isfinite(d->grad_weights[j]), "grad_weights beside a bad token");
		if (own)
			d->grad_weights[j] = (float)b->r.grad_weights[j];
	}
	expect(error_of_floats(d->grad_weights, b->r.grad_weights, (int64_t)d->c.T * d->c.k,
			       b->slack.grad_weights) <= random_bound(),
	       "grad_weights of other tokens");
}

/*
 * Every number of an expert that the token visited is NaN; some of them where the token is
 * infinite, or its gradient bad and cut values have none.
 */
static void check_gradient(const struct bad_token *b, int i, bool all)
{
	const struct layer_model *m = b->m;
	enum moe_block_array which = array_of(i);
	int64_t n = m->d.n[which], one = n / N_EXPERTS;
	double *g = layer_get(m->l, &m->d.c, which, true),
	       *own = calloc((size_t)n + 1, sizeof *own);

	for (int64_t j = 0; j < n; j++)
		own[j] = g[caller_index(m, i, j)];
	for (int e = 0; e < N_EXPERTS; e++) {
		int64_t bad = 0;

		for (int64_t j = e * one; j < (e + 1) * one; j++) {
			bad += !isfinite(own[j]);
			if (b->visits[e])
				own[j] = b->r.grad[which][j];
		}
		expect(b->visits[e] ? bad == one || (!all && bad) : !bad,
		       "a gradient beside a bad token");
	}
	expect(error_of_doubles(own, b->r.grad[which], n, b->slack.grad[i]) <= random_bound(),
	       "a gradient of experts without a bad token");
	free(own), free(g);
}

/* One step of an optimizer that clips updates nothing, and counts. */
static void step_is_left_out(struct layer_model *m, struct moe_engine *e)
{
	struct moe_adamw_params p = adamw_default();
	struct moe_optimizer *o = NULL;
	double norm = 0, *before[9] = { NULL };

	for (int i = 0; i < 9; i++)
		if (trained(m, i))
			before[i] = layer_get(m->l, &m->d.c, array_of(i), false);
	p.max_grad_norm = 1;
	expect_status(moe_optimizer_create(e, &m->l, 1, &o), MOE_OK, "optimizer");
	expect_status(moe_optimizer_step(o, &p), MOE_OK, "a step of gradients that are not finite");
	expect_status(moe_optimizer_wait(o, 0, &norm), MOE_OK, "optimizer wait");
	expect(!isfinite(norm), "a norm that is not finite");
	moe_optimizer_destroy(o);
	m->steps++;
	stale(m);
	close_window(m);
	do_wait(m);
	for (int i = 0; i < 9; i++) {
		double *after = before[i] ? layer_get(m->l, &m->d.c, array_of(i), false) : NULL;

		expect(!after || !memcmp(before[i], after,
					 (size_t)m->d.n[array_of(i)] * sizeof *after),
		       "nothing is updated");
		free(after), free(before[i]);
	}
}

static void spoil(struct bad_token *b, float value)
{
	const struct block_case *c = &b->d.c;
	float *x = b->d.x + b->t * c->H, *grad_out = b->d.grad_out + b->t * c->H;

	if (!b->in_grad_out)
		x[any(c->H)] = value;
	for (int i = 0; b->in_grad_out && i < c->H; i++)
		grad_out[i] = value;
}

/* The other tokens' results: without this one, whose output is as ever where its gradient is bad.
 */
static void reference_of_others(struct bad_token *b)
{
	struct block_data rest = b->d;
	size_t bytes = (size_t)(rest.c.T * rest.c.k) * sizeof *rest.ids;

	rest.ids = malloc(bytes);
	memcpy(rest.ids, b->d.ids, bytes);
	b->skipped = true;
	for (int j = b->t * rest.c.k; j < (b->t + 1) * rest.c.k; j++) {
		if (rest.ids[j] >= 0)
			b->visits[rest.ids[j]] = true, b->skipped = false;
		rest.ids[j] = -1;
	}
	pass_reference(b->m, &rest, &b->r, &b->slack);
	free(rest.ids);
}

static void run_bad_token(struct bad_token *b, bool infinite)
{
	struct layer_model *m = b->m;
	const struct block_case *c = &b->d.c;
	int64_t n = (int64_t)c->T * c->H;

	expect_status(layer_forward(m->l, &b->d, true), MOE_OK, "forward of a bad token");
	if (b->in_grad_out)
		expect(n_finite(b->d.out, n) == n, "the output before a bad gradient");
	else
		check_row(b, b->d.out, b->r.out, c->H, b->slack.out, "the output of a bad token");
	expect_status(layer_backward(m->l, &b->d, 1), MOE_OK, "backward of a bad token");
	check_row(b, b->d.grad_x, b->r.grad_x, c->H, b->slack.grad_x, "grad_x of a bad token");
	check_slots(b);
	for (int i = 0; i < 9; i++)
		if (trained(m, i))
			check_gradient(b, i, !infinite && !(b->in_grad_out && c->limit != 0));
}

void do_bad_token(struct layer_model *m, struct moe_engine *e)
{
	static const float values[] = { NAN, INFINITY, -INFINITY };
	struct bad_token b = { .m = m, .in_grad_out = any(3) == 0 };
	int which = m->d.c.limit != 0 || b.in_grad_out
			    ? 0
			    : any(3); /* a clamp makes infinite values finite */

	do_wait(m);
	if (m->n_kept >= m->p.max_cache_depth)
		return;
	expect_status(moe_experts_release_gradients(m->l), MOE_OK, "release");
	close_window(m);
	b.d = call_of(m, 2 + any(T_MAX - 1));
	b.t = any(b.d.c.T);
	reference_of_others(&b);
	spoil(&b, values[which]);
	run_bad_token(&b, which > 0);
	m->open = trains(m);
	if (trains(m) && !b.skipped && any(2)) {
		step_is_left_out(m, e);
	} else {
		expect_status(moe_experts_release_gradients(m->l), MOE_OK, "release");
		close_window(m);
	}
	block_reference_free(&b.r);
	call_free(&b.d);
}
