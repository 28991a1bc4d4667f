/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random sequences of calls on two layers that share buffers, against a plain single-threaded model of them: each
 * call gives the right numbers or the documented error. A failing sequence is printed by its seed;
 * MOESAIC_TEST_SEED repeats it as the first one.
 */
#include "tests/layer_check.h"

#include <math.h>

const char moe_suite_name[] = "layer_random";

enum { LAYERS = 2, DEPTH = 2, CALLS = 48, T_MAX = 9, PENDING = 64 };

/* A call whose results are checked when the layer has been waited for. */
struct pending {
	float *got;
	double *want;
	int64_t n;
	struct block_data d; /* arrays of the call, freed with it */
	bool owner;
};

/* A layer as the header describes it. */
struct model {
	struct moe_expert_layer *l;
	struct moe_experts_params p;
	struct block_data d; /* weights: what the layer computes with; c.T is not used */
	struct moe_gradient g[9];
	float *buffer[9];
	bool bound, bound_base;
	struct kept {
		struct block_data d;
		bool stale;
	} kept[DEPTH];
	int n_kept;
	bool open, pending, accumulate;
	double *sum[9]; /* window: LoRA, then base */
	double *m[9], *v[9];
	int steps;
	struct pending list[PENDING];
	int n_list;
};

static uint64_t state = 1;
static unsigned long sequence;
static bool failed;
static uint64_t shape; /* of the sequence's layers that share buffers */

static int any(int n) /* 0..n-1 */
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (int)(state >> 33) % n;
}

static float unit(void)
{
	return (float)any(20001) / 10000 - 1;
}

static void say(const char *what, double error)
{
	if (!failed)
		printf("  sequence %lu (MOESAIC_TEST_SEED repeats it): %s %.2e, last error: %s\n", sequence, what,
		       error, moe_last_error());
	failed = true;
}

static void expect(bool good, const char *what)
{
	if (!CHECK(good))
		say(what, 0);
}

static void expect_status(enum moe_status got, enum moe_status want, const char *what)
{
	if (!CHECK(got == want))
		say(what, (double)got);
}

static double bound(void)
{
	return table_is_packed() ? 3e-2 : 3e-5;
}

/* ||got - want|| / ||want||, where a few small numbers may all be rounded far. */
static double error_of(const double *got, const double *want, int64_t n)
{
	double small = table_is_packed() ? .5 : .1; /* of terms near 1, which may cancel */
	double diff = 0, norm = 0;

	for (int64_t i = 0; i < n; i++) {
		diff += (got[i] - want[i]) * (got[i] - want[i]);
		norm += want[i] * want[i];
	}
	return n ? sqrt(diff) / (sqrt(norm) + small * sqrt((double)n)) : 0;
}

static double error_of_floats(const float *got, const double *want, int64_t n)
{
	double *g = malloc((size_t)(n + 1) * sizeof *g), e;

	for (int64_t i = 0; i < n; i++)
		g[i] = got[i];
	e = error_of(g, want, n);
	free(g);
	return e;
}

static enum moe_block_array array_of(int i)
{
	return i < 6 ? layer_lora[i] : (enum moe_block_array)(i - 6);
}

static bool trained(const struct model *m, int i)
{
	return i < 6 ? m->d.c.r > 0 : m->d.c.base_grads;
}

static bool trains(const struct model *m)
{
	return m->d.c.r > 0 || m->d.c.base_grads;
}

/* ---- calls that wait for their check ---- */

static void flush(struct model *m)
{
	for (int i = 0; i < m->n_list; i++) {
		struct pending *p = &m->list[i];
		double error = error_of_floats(p->got, p->want, p->n);

		if (!CHECK(error <= bound())) {
			say("a result is off by", error);
			printf("  %s, %lld numbers of %d tokens, group size %d, %s\n", m->d.c.backward,
			       (long long)p->n, p->d.c.T, m->d.c.group_size,
			       m->p.activations ? "recompute" : "retain");
		}
		free(p->want);
		if (p->owner) {
			memset(p->d.w, 0, sizeof p->d.w); /* the model's */
			block_data_free(&p->d);
		}
	}
	m->n_list = 0;
}

static void remember(struct model *m, const struct block_data *d, float *got, const double *want, int64_t n,
		     bool owner)
{
	struct pending *p = &m->list[m->n_list++];

	*p = (struct pending){ .got = got, .n = n, .d = *d, .owner = owner };
	p->want = malloc((size_t)(n + 1) * sizeof(double));
	memcpy(p->want, want, (size_t)n * sizeof(double));
}

/* Arrays of a call of T tokens, with the model's weights. */
static struct block_data call_of(const struct model *m, int T)
{
	struct block_data d = m->d;
	int64_t n = (int64_t)T * d.c.H, slots = (int64_t)T * d.c.k;

	d.c.T = T;
	d.x = malloc((size_t)(n + 1) * 4), d.grad_out = malloc((size_t)(n + 1) * 4);
	d.out = calloc((size_t)n + 1, 4), d.grad_x = calloc((size_t)n + 1, 4);
	d.weights = malloc((size_t)(slots + 1) * 4), d.grad_weights = calloc((size_t)slots + 1, 4);
	d.ids = malloc((size_t)(slots + 1) * sizeof *d.ids);
	for (int64_t i = 0; i < n; i++)
		d.x[i] = moe_bf16_to_f32(moe_f32_to_bf16(unit()));
	for (int64_t i = 0; i < n; i++)
		d.grad_out[i] = moe_bf16_to_f32(moe_f32_to_bf16(unit()));
	for (int64_t i = 0; i < slots; i++) {
		d.ids[i] = any(d.c.E + 1) - 1;
		d.weights[i] = unit();
	}
	return d;
}

static void call_free(struct block_data *d)
{
	memset(d->w, 0, sizeof d->w);
	block_data_free(d);
}

/* ---- the model ---- */

static enum moe_activations draw_shape(struct block_case *c)
{
	static const char *const modes[] = { "direct", "shared:1", "resident" };

	c->r = any(4) ? 3 : 0;
	c->backward = table()->weight_transpose ? modes[any(3)] : "direct";
	c->group_size = 1 + any(3);
	return (enum moe_activations)any(2);
}

static void model_make(struct model *m, struct moe_engine *e)
{
	struct block_case c = { .E = 4, .k = 2, .H = 24, .I = 20, .T = 1 };
	bool refuse = any(8) == 0;
	enum moe_activations activations;
	uint64_t own = state;

	memset(m, 0, sizeof *m);
	if (any(4)) /* of one shape with the other */
		state = shape;
	activations = draw_shape(&c);
	state = own * 0x9e3779b97f4a7c15ull | 1;
	c.base_grads = any(2);
	block_data_make(&m->d, &c);
	for (int i = 0; i < BLOCK_WEIGHTS; i++) /* of this sequence's own numbers */
		for (int64_t j = 0; j < m->d.n[i]; j++)
			m->d.w[i][j] = .35f * unit();
	block_data_round(&m->d);
	m->p = layer_params(&c);
	m->p.max_tokens = T_MAX;
	m->p.max_cache_depth = 1 + any(DEPTH);
	m->p.micro_batches = 1 + any(2);
	m->p.activations = activations;
	if (refuse) {
		struct moe_experts_params bad = m->p;

		bad.experts_per_token = 0;
		expect_status(moe_experts_create(e, &bad, &m->l), MOE_ERR_ARG, "create without experts_per_token");
	}
	expect_status(moe_experts_create(e, &m->p, &m->l), MOE_OK, "create");
	expect_status(layer_load(m->l, &m->d, NULL, 0), MOE_OK, "load");
	for (int i = 0; i < 9; i++) {
		size_t n = (size_t)m->d.n[array_of(i)];

		m->sum[i] = calloc(n + 1, sizeof(double));
		m->m[i] = calloc(n + 1, sizeof(double));
		m->v[i] = calloc(n + 1, sizeof(double));
		m->buffer[i] = calloc(n + 1, sizeof(float));
		if (!trained(m, i))
			continue;
		m->g[i].param = layer_array(&c, array_of(i), m->d.w[array_of(i)], MOE_F32);
		m->g[i].buffer = layer_array(&c, array_of(i), m->buffer[i], MOE_F32);
	}
	m->bound = c.r && any(2);
	m->bound_base = c.base_grads && any(2);
	if (m->bound)
		expect_status(moe_experts_bind_lora(m->l, m->g), MOE_OK, "bind LoRA");
	else if (c.r)
		layer_set_lora(m->l, &m->d);
	if (m->bound_base)
		expect_status(moe_experts_bind_base(m->l, m->g + 6), MOE_OK, "bind base");
}

static void model_free(struct model *m)
{
	moe_experts_destroy(m->l); /* with whatever is in flight */
	flush(m);
	for (int i = 0; i < m->n_kept; i++)
		call_free(&m->kept[i].d);
	for (int i = 0; i < 9; i++)
		free(m->sum[i]), free(m->m[i]), free(m->v[i]), free(m->buffer[i]);
	block_data_free(&m->d);
}

static bool buffers(const struct model *m)
{
	return m->bound || m->bound_base;
}

/* Backwards may follow each other without a wait. */
static bool several(const struct model *m)
{
	return m->p.micro_batches > 1 && !buffers(m);
}

static void check_shown(struct model *m, bool published)
{
	for (int i = 0; i < 9; i++)
		if (i < 6 ? m->bound : m->bound_base)
			expect(m->g[i].grad == (published ? m->buffer[i] : NULL), "grad of a bound parameter");
}

static void close_window(struct model *m)
{
	m->open = m->pending = false;
	check_shown(m, false);
}

/* After a call that waited: the pending backward is published. */
static void published(struct model *m)
{
	if (!m->pending)
		return;
	m->pending = false;
	m->open = true;
	check_shown(m, true);
	for (int i = 0; i < 9; i++)
		if (i < 6 ? m->bound : m->bound_base) {
			double error = error_of_floats(m->buffer[i], m->sum[i], m->d.n[array_of(i)]);

			if (!CHECK(error <= bound()))
				say("a published gradient is off by", error);
		}
}

static void do_wait(struct model *m)
{
	expect_status(moe_experts_wait(m->l), MOE_OK, "wait");
	published(m);
	flush(m);
}

static void do_forward(struct model *m)
{
	bool save = any(3) > 0, async = any(2), inject = any(6) == 0;
	struct block_data d = call_of(m, any(T_MAX + 1));
	struct layer_call a = layer_call(&d, d.c.T);
	struct block_reference r = { 0 };
	enum moe_status st, want = save && m->n_kept >= m->p.max_cache_depth ? MOE_ERR_STATE : MOE_OK;

	if (m->n_list > PENDING - 4)
		do_wait(m);
	if (inject)
		moe_alloc_fail_after(1 + any(60));
	st = (async ? moe_experts_forward_async : moe_experts_forward)(m->l, &a.x, &a.ids, &a.weights, save, &a.out);
	moe_alloc_fail_after(-1);
	if (inject && st == MOE_ERR_NOMEM) {
		call_free(&d);
		return;
	}
	expect_status(st, want, "forward");
	if (st != MOE_OK) {
		call_free(&d);
		return;
	}
	block_reference(&r, &d, d.ids);
	remember(m, &d, d.out, r.out, (int64_t)d.c.T * d.c.H, !save);
	block_reference_free(&r);
	if (save)
		m->kept[m->n_kept++] = (struct kept){ .d = d };
	if (!async && !m->pending && !any(4))
		do_wait(m);
}

/* The gradients of a pass, times scale, into the window's sums. */
static void add_gradients(struct model *m, const struct block_reference *r, bool accumulate, double scale)
{
	for (int i = 0; i < 9; i++)
		for (int64_t j = 0; trained(m, i) && j < m->d.n[array_of(i)]; j++)
			m->sum[i][j] = (accumulate ? m->sum[i][j] : 0) + scale * r->grad[array_of(i)][j];
}

static void do_backward(struct model *m)
{
	static const double scales[] = { 1, .5, 3, 0, -1, NAN };
	bool async = any(2), inject = any(6) == 0;
	int which = any(8);
	double scale = scales[which > 5 ? 0 : which];
	struct kept *k = m->n_kept ? &m->kept[m->n_kept - 1] : NULL;
	struct block_data none = call_of(m, 1), *d = k ? &k->d : &none;
	struct layer_call a = layer_call(d, d->c.T);
	struct block_reference r = { 0 };
	enum moe_status st, want = MOE_OK;
	bool wrong_rows = k && any(6) == 0;

	if (m->n_list > PENDING - 4)
		do_wait(m);
	if (wrong_rows)
		a.grad_out.shape[0]++;
	if (!k || (m->pending && !several(m)))
		want = MOE_ERR_STATE;
	else if (!(scale > 0) || wrong_rows)
		want = MOE_ERR_ARG;
	else if (k->stale)
		want = MOE_ERR_STATE;
	if (inject)
		moe_alloc_fail_after(1 + any(80));
	st = (async ? moe_experts_backward_async : moe_experts_backward)(m->l, &a.grad_out, scale, &a.grad_x,
									 &a.grad_weights);
	moe_alloc_fail_after(-1);
	if (inject && want == MOE_OK && st == MOE_ERR_NOMEM) {
		expect(strstr(moe_last_error(), "used up") != NULL, "text of a failed backward");
		close_window(m);
	} else {
		expect_status(st, want, "backward");
	}
	if (st == MOE_OK) {
		block_reference(&r, d, d->ids);
		remember(m, d, d->grad_weights, r.grad_weights, (int64_t)d->c.T * d->c.k, false);
		remember(m, d, d->grad_x, r.grad_x, (int64_t)d->c.T * d->c.H, true);
		add_gradients(m, &r, m->open || m->pending, scale);
		block_reference_free(&r);
		m->pending = trains(m);
		m->n_kept--;
		if (!async) {
			published(m);
		}
	} else if (k && (st == MOE_ERR_NOMEM || (want == MOE_ERR_STATE && k->stale && (!m->pending || several(m))))) {
		do_wait(m); /* the forward may be in flight and use the arrays */
		call_free(&k->d);
		m->n_kept--;
	}
	call_free(&none);
}

/* What the layer computes with, and the model's AdamW, are the same up to rounding. */
static void check_values(struct model *m)
{
	for (int i = 0; i < 9; i++) {
		enum moe_block_array which = array_of(i);
		double *v, error = 0;

		if (!trained(m, i))
			continue;
		v = layer_get(m->l, &m->d.c, which, false);
		/* a gradient of rounding noise moves a parameter by a whole step: 1e-2 */
		for (int64_t j = 0; j < m->d.n[which]; j++)
			error = fmax(error, fabs(v[j] - m->d.w[which][j]));
		if (!CHECK(error <= 2.5e-2))
			say("a parameter is off by", error);
		for (int64_t j = 0; j < m->d.n[which]; j++)
			m->d.w[which][j] = (float)v[j];
		free(v);
	}
}

static void stale(struct model *m)
{
	for (int i = 0; i < m->n_kept; i++)
		m->kept[i].stale = true;
}

static void do_update(struct model *m)
{
	struct moe_adamw_params p = adamw_default();
	enum moe_status st, want = MOE_OK;

	if (!trains(m) || (m->pending ? buffers(m) : !m->open))
		want = MOE_ERR_STATE;
	if (want == MOE_OK && buffers(m))
		do_wait(m); /* params of the caller are written: nothing else may read them */
	st = moe_experts_update(m->l, &p);
	expect_status(st, want, "update");
	if (st != MOE_OK)
		return;
	m->steps++;
	for (int i = 0; i < 9; i++)
		for (int64_t j = 0; trained(m, i) && j < m->d.n[array_of(i)]; j++) {
			double g = m->sum[i][j], c1 = 1 - pow(p.beta1, m->steps), c2 = 1 - pow(p.beta2, m->steps);
			float *w = &m->d.w[array_of(i)][j];

			if (i < 6 ? m->bound : m->bound_base)
				continue; /* the layer writes it */
			m->m[i][j] = p.beta1 * m->m[i][j] + (1 - p.beta1) * g;
			m->v[i][j] = p.beta2 * m->v[i][j] + (1 - p.beta2) * g * g;
			*w = (float)(*w * (1 - p.learning_rate * p.weight_decay) -
				     p.learning_rate * (m->m[i][j] / c1) / (sqrt(m->v[i][j] / c2) + p.eps));
		}
	stale(m);
	m->open = m->pending = false; /* taken by the update: wait publishes nothing */
	do_wait(m);
	check_shown(m, false);
	check_values(m);
}

/* The caller's optimizer: changes bound params and tells. */
static void do_external(struct model *m)
{
	bool async = any(2);

	do_wait(m); /* nothing reads the params meanwhile */
	for (int i = 0; i < 9; i++)
		for (int64_t j = 0; (i < 6 ? m->bound : m->bound_base) && j < m->d.n[array_of(i)]; j++)
			m->d.w[array_of(i)][j] = moe_bf16_to_f32(
				moe_f32_to_bf16(m->d.w[array_of(i)][j] * (i < 6 ? 1.5f : 1) + .01f * unit())) /
				(i < 6 ? 1.5f : 1);
	if (m->bound || !m->d.c.r)
		expect_status((async ? moe_experts_update_lora_async : moe_experts_update_lora)(m->l), MOE_OK,
			      "update_lora");
	else
		expect_status(moe_experts_update_lora(m->l), MOE_ERR_STATE, "update_lora of own LoRA");
	if (m->bound_base || !m->d.c.base_grads)
		expect_status((async ? moe_experts_update_base_async : moe_experts_update_base)(m->l), MOE_OK,
			      "update_base");
	else
		expect_status(moe_experts_update_base(m->l), MOE_ERR_STATE, "update_base without params");
	if (m->bound || m->bound_base)
		stale(m);
	if (async)
		do_wait(m); /* the params are ours again */
}

static void do_window(struct model *m)
{
	enum moe_window w;
	int i;

	switch (any(4)) {
	case 0:
		expect_status(moe_experts_release_gradients(m->l), m->pending ? MOE_ERR_STATE : MOE_OK, "release");
		if (!m->pending)
			close_window(m);
		break;
	case 1: /* as zero_grad(set_to_none) */
		if (!buffers(m) || m->pending)
			break;
		for (i = 0; i < 9; i++)
			m->g[i].grad = NULL;
		m->open = false;
		break;
	case 2: /* mixed, and mended */
		if (!buffers(m) || m->pending || !m->open)
			break;
		i = m->bound ? any(6) : 6 + any(3);
		m->g[i].grad = NULL;
		expect_status(moe_experts_get_window(m->l, &w), MOE_ERR_STATE, "a mixed window");
		m->g[i].grad = m->buffer[i];
		break;
	default:
		break;
	}
	expect_status(moe_experts_get_window(m->l, &w), MOE_OK, "window");
	if (!m->pending) {
		expect(w == (!trains(m) ? MOE_WINDOW_EMPTY : m->open ? MOE_WINDOW_OPEN : MOE_WINDOW_CLOSED),
		       "state of the window");
	}
}

static void do_gradient(struct model *m)
{
	int i = any(9);
	double *g, error;
	struct moe_array a;

	if (!trained(m, i))
		return;
	g = calloc((size_t)m->d.n[array_of(i)] + 1, sizeof *g);
	a = layer_array(&m->d.c, array_of(i), g, MOE_F64);
	if (m->open && !m->pending) {
		expect_status(moe_experts_get_gradient(m->l, array_of(i), &a), MOE_OK, "gradient");
		error = error_of(g, m->sum[i], m->d.n[array_of(i)]);
		if (!CHECK(error <= bound()))
			say("a gradient is off by", error);
	} else {
		expect_status(moe_experts_get_gradient(m->l, array_of(i), &a), MOE_ERR_STATE,
			      "gradient of a closed window");
	}
	free(g);
}

static void do_memory(struct model *m)
{
	enum moe_status want = m->n_kept || m->pending ? MOE_ERR_STATE : MOE_OK;

	expect_status(moe_experts_release_memory(m->l), want, "release_memory");
}

static void do_drop(struct model *m)
{
	do_wait(m);
	expect_status(moe_experts_drop(m->l), m->n_kept ? MOE_OK : MOE_ERR_STATE, "drop");
	if (m->n_kept)
		call_free(&m->kept[--m->n_kept].d);
}

static void do_bad(struct model *m)
{
	struct block_data d = call_of(m, 2);
	struct layer_call a = layer_call(&d, 2);

	switch (any(4)) {
	case 0:
		a.x.shape[0] = a.out.shape[0] = a.ids.shape[0] = a.weights.shape[0] = T_MAX + 1;
		break;
	case 1:
		d.ids[1] = m->d.c.E;
		break;
	case 2:
		a.x.dtype = MOE_I32;
		break;
	default:
		a.weights.shape[1]++;
		break;
	}
	expect_status(moe_experts_forward(m->l, &a.x, &a.ids, &a.weights, 1, &a.out), MOE_ERR_ARG, "a bad forward");
	call_free(&d);
}

static void step(struct model *m, struct moe_engine *e)
{
	switch (any(16)) {
	case 0:
	case 1:
	case 2:
	case 3:
		do_forward(m);
		break;
	case 4:
	case 5:
	case 6:
	case 7:
		do_backward(m);
		break;
	case 8:
		do_wait(m);
		break;
	case 9:
		do_update(m);
		break;
	case 10:
		do_external(m);
		break;
	case 11:
		do_window(m);
		break;
	case 12:
		do_gradient(m);
		break;
	case 13:
		if (any(2))
			expect_status(moe_experts_repack_async(m->l), MOE_OK, "repack");
		else
			do_memory(m);
		break;
	case 14:
		if (any(3))
			do_bad(m);
		else
			do_drop(m);
		break;
	default:
		if (any(6))
			break;
		model_free(m);
		model_make(m, e);
		break;
	}
}

static void run_sequence(struct moe_engine *e, unsigned long seed)
{
	struct model m[LAYERS];

	sequence = seed;
	failed = false;
	state = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
	shape = state * 0xd1342543de82ef95ull | 1;
	for (int i = 0; i < LAYERS; i++)
		model_make(&m[i], e);
	for (int i = 0; i < CALLS && !failed; i++)
		step(&m[any(LAYERS)], e);
	for (int i = 0; i < LAYERS; i++)
		model_free(&m[i]);
}

static void sequences(void)
{
	int n = moe_test_full() ? 1000 : table_is_packed() ? 24 : 60;
	struct moe_engine *e = layer_engine(2, 1 + any(2));

	for (int i = 0; i < n; i++)
		run_sequence(e, moe_test_seed() + (unsigned long)i);
	CHECK_OK(moe_engine_close(e));
}

static void exact(void)
{
	exact_table(sequences);
}

static void best(void)
{
	state = 88172645463325252ull;
	sequences(); /* the table that an engine takes by itself */
}

const struct moe_test moe_suite_tests[] = {
	{ "sequences, exact kernels", exact },
	{ "sequences, the CPU's kernels", best },
	{ NULL, NULL },
};
