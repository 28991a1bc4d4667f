/* SPDX-License-Identifier: Apache-2.0 */
/* What a layer's calls must give: plain loops, one thread, doubles. */
#include "tests/random_layers.h"

#include <math.h>

static uint64_t state = 1, shape; /* shape: of the sequence's layers that share buffers */
static unsigned long sequence;
static bool failed, sizes_of_codes; /* quantised layers among plain ones, of sizes that groups of
				       codes divide */

void random_seed(uint64_t seed, unsigned long number)
{
	sequence = number;
	failed = false;
	state = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
	shape = state * 0xd1342543de82ef95ull | 1;
	sizes_of_codes = number % 3 == 0;
}

int any(int n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (int)(state >> 33) % n;
}

float unit(void)
{
	return (float)any(20001) / 10000 - 1;
}

bool random_failed(void)
{
	return failed;
}

void say(const char *what, double error)
{
	if (!failed)
		printf("  sequence %lu (MOESAIC_TEST_SEED repeats it): %s %.2e, last error: %s\n",
		       sequence, what, error, moe_last_error());
	failed = true;
}

void expect(bool good, const char *what)
{
	if (!CHECK(good))
		say(what, 0);
}

void expect_status(enum moe_status got, enum moe_status want, const char *what)
{
	if (!CHECK(got == want))
		say(what, (double)got);
}

/* ---- arrays ---- */

enum moe_block_array array_of(int i)
{
	return i < 6 ? layer_lora[i] : (enum moe_block_array)(i - 6);
}

bool trained(const struct layer_model *m, int i)
{
	return i < 6 ? m->d.c.r > 0 : m->d.c.base_grads;
}

bool trains(const struct layer_model *m)
{
	return m->d.c.r > 0 || m->d.c.base_grads;
}

bool is_bound(const struct layer_model *m, int i)
{
	return i < 6 ? m->bound : m->bound_base;
}

bool has_buffers(const struct layer_model *m)
{
	return (m->bound || m->bound_base) && m->with_buffers;
}

bool several(const struct layer_model *m)
{
	return m->p.micro_batches > 1 && !has_buffers(m);
}

struct moe_array array_like(const struct layer_model *m, int i, void *data, enum moe_dtype dtype)
{
	return layer_array(&m->d.c, array_of(i), data, dtype);
}

int64_t caller_index(const struct layer_model *m, int i, int64_t j)
{
	int64_t one = m->d.n[array_of(i)] / m->d.c.E;

	return i < 6 ? j : m->map[j / one] * one + j % one;
}

void caller_put(struct layer_model *m, int i, const float *by_expert)
{
	size_t n = (size_t)m->d.n[array_of(i)];
	float *a = malloc((n + 1) * sizeof *a);

	for (size_t j = 0; j < n; j++)
		a[caller_index(m, i, (int64_t)j)] = by_expert[j];
	moe_from_f32(m->param[i], m->dtype, a, n);
	free(a);
}

void caller_take(const struct layer_model *m, int i, const void *array, float *by_expert)
{
	size_t n = (size_t)m->d.n[array_of(i)];
	float *a = malloc((n + 1) * sizeof *a);

	moe_to_f32(a, array, m->dtype, n);
	for (size_t j = 0; j < n; j++)
		by_expert[j] = a[caller_index(m, i, (int64_t)j)];
	free(a);
}

/* ---- making a layer ---- */

static const struct moe_format *draw_format(void)
{
	int n = 0;

	while (moe_format_list[n])
		n++;
	return moe_format_list[any(n)];
}

static enum moe_activations draw_shape(struct block_case *c, bool coded)
{
	static const char *const modes[] = { "direct", "shared:1", "resident" };

	c->r = any(4) ? 3 : 0;
	c->backward = table()->weight_transpose && !coded ? modes[any(3)] : "direct";
	c->group_size = 1 + any(3);
	return (enum moe_activations)any(2);
}

/* Large enough that few values are cut: each that rounding cuts or not is a part of what is
 * compared. */
static float draw_limit(void)
{
	static const float limits[] = { .4f, .7f, 1 };

	return any(3) ? 0 : limits[any(3)];
}

static void draw_params(struct layer_model *m)
{
	struct block_case c = { .E = N_EXPERTS, .k = 2, .H = 24, .I = 20, .T = 1 };
	bool coded = sizes_of_codes && any(3) > 0;
	enum moe_activations activations;
	uint64_t own = state;

	if (sizes_of_codes)
		c.H = 64, c.I = 32;
	if (coded)
		m->format = draw_format();
	if (any(4)) /* of one shape with the other */
		state = shape;
	activations = draw_shape(&c, coded);
	state = own * 0x9e3779b97f4a7c15ull | 1;
	c.base_grads = any(2) && !coded;
	c.limit = draw_limit();
	block_data_make(&m->d, &c);
	for (int i = 0; i < BLOCK_WEIGHTS; i++) /* of this sequence's own numbers */
		for (int64_t j = 0; j < m->d.n[i]; j++)
			m->d.w[i][j] = .35f * sqrtf(24.f / (float)c.H) * unit();
	block_data_round(&m->d);
	m->p = layer_params(&c);
	m->p.weight_format = m->format ? m->format->name : NULL;
	m->p.layer = any(5);
	m->p.max_tokens = T_MAX;
	m->p.max_cache_depth = 1 + any(DEPTH);
	m->p.micro_batches = 1 + any(2);
	m->p.activations = activations;
	m->p.lora_dropout = any(3) ? 0 : .3f;
	m->loose = 1;
	m->dtype = any(3) ? MOE_F32 : MOE_BF16;
	m->with_buffers = any(4) > 0;
}

/* Rows of the arrays that experts compute with: every row once where they are trained. */
static void draw_map(struct layer_model *m)
{
	bool mapped = any(2);

	for (int e = 0; e < N_EXPERTS; e++)
		m->map[e] = e;
	for (int e = N_EXPERTS - 1; mapped && e > 0; e--) {
		int other = any(e + 1);
		int64_t row = m->map[e];

		m->map[e] = m->map[other];
		m->map[other] = row;
	}
	if (mapped && !m->d.c.base_grads)
		m->map[any(N_EXPERTS)] = any(N_EXPERTS);
}

static void alloc_arrays(struct layer_model *m)
{
	for (int i = 0; i < 9; i++) {
		size_t n = (size_t)m->d.n[array_of(i)];

		m->sum[i] = calloc(n + 1, sizeof(double));
		m->m[i] = calloc(n + 1, sizeof(double));
		m->v[i] = calloc(n + 1, sizeof(double));
		m->param[i] = calloc(n + 1, sizeof(float));
		m->buffer[i] = calloc(n + 1, sizeof(float));
		if (!trained(m, i))
			continue;
		caller_put(m, i, m->d.w[array_of(i)]);
		m->g[i].param = array_like(m, i, m->param[i], m->dtype);
		m->g[i].buffer = array_like(m, i, m->with_buffers ? m->buffer[i] : NULL, m->dtype);
	}
}

/* The LoRA is the caller's, or the layer's own; base params likewise, whose values are read later.
 */
static void bind(struct layer_model *m)
{
	m->bound = m->d.c.r && any(2);
	m->bound_base = m->d.c.base_grads && any(2);
	if (m->bound)
		expect_status(moe_experts_bind_lora(m->l, m->g), MOE_OK, "bind LoRA");
	else if (m->d.c.r)
		layer_set_lora(m->l, &m->d);
	for (int i = 0; i < 6 && m->bound; i++)
		caller_take(m, i, m->param[i], m->d.w[array_of(i)]);
	if (m->bound_base)
		expect_status(moe_experts_bind_base(m->l, m->g + 6), MOE_OK, "bind base");
}

void model_make(struct layer_model *m, struct moe_engine *e)
{
	memset(m, 0, sizeof *m);
	draw_params(m);
	draw_map(m);
	if (!any(8))
		misuse_create(e, &m->p);
	expect_status(moe_experts_create(e, &m->p, &m->l), MOE_OK, "create");
	if (!m->l)
		return;
	if (m->p.lora_dropout > 0) /* the model has none; see do_dropout */
		expect_status(moe_experts_set_dropout(m->l, MOE_DROPOUT_OFF, -1, 0), MOE_OK,
			      "dropout off");
	if (!any(8))
		misuse_unloaded(m);
	model_load(m);
	alloc_arrays(m);
	if (!any(8))
		misuse_without_lora(m);
	bind(m);
}

void model_free(struct layer_model *m)
{
	moe_experts_destroy(m->l);
	flush(m);
	for (int i = 0; i < m->n_kept; i++)
		call_free(&m->kept[i].d);
	for (int i = 0; i < 9; i++)
		free(m->sum[i]), free(m->m[i]), free(m->v[i]), free(m->buffer[i]),
			free(m->param[i]);
	free(m->output);
	block_data_free(&m->d);
}

/* ---- calls that wait for their check ---- */

void flush(struct layer_model *m)
{
	for (int i = 0; i < m->n_list; i++) {
		struct pending *p = &m->list[i];
		double error = error_of_floats(p->got, p->want, p->n, p->slack);

		if (!CHECK(error <= p->bound)) {
			say("a result is off by", error);
			printf("  %s, %lld numbers of %d tokens, group size %d, %s, format %s, "
			       "limit %g\n",
			       m->d.c.backward, (long long)p->n, p->d.c.T, m->d.c.group_size,
			       m->p.activations ? "recompute" : "retain",
			       m->format ? m->format->name : "none", (double)m->d.c.limit);
		}
		free(p->want);
		if (p->owner)
			call_free(&p->d);
	}
	m->n_list = 0;
}

void remember(struct layer_model *m, const struct block_data *d, float *got, const double *want,
	      int64_t n, double slack, bool owner)
{
	struct pending *p = &m->list[m->n_list++];

	*p = (struct pending){ .got = got,
			       .n = n,
			       .d = *d,
			       .owner = owner,
			       .bound = m->loose * random_bound(),
			       .slack = slack };
	p->want = malloc((size_t)(n + 1) * sizeof(double));
	memcpy(p->want, want, (size_t)n * sizeof(double));
}

struct block_data call_of(const struct layer_model *m, int T)
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

void call_free(struct block_data *d)
{
	memset(d->w, 0, sizeof d->w); /* the model's */
	block_data_free(d);
}

/* ---- the gradient window ---- */

static void check_shown(struct layer_model *m, bool shown)
{
	for (int i = 0; i < 9; i++)
		if (is_bound(m, i))
			expect(m->g[i].grad == (shown ? m->g[i].buffer.data : NULL),
			       "grad of a bound parameter");
}

void close_window(struct layer_model *m)
{
	m->open = m->pending = m->taken = false;
	check_shown(m, false);
}

void published(struct layer_model *m)
{
	bool taken = m->taken;

	if (!m->pending)
		return;
	m->pending = m->taken = false;
	m->open = !taken;
	check_shown(m, m->open);
	for (int i = 0; i < 9 && m->open; i++) {
		size_t n = (size_t)m->d.n[array_of(i)];
		float *got = malloc((n + 1) * sizeof *got);
		double error;

		if (is_bound(m, i) && m->with_buffers) {
			caller_take(m, i, m->buffer[i], got);
			error = error_of_floats(got, m->sum[i], (int64_t)n, m->slack.grad[i]);
			if (!CHECK(error <=
				   m->loose * random_bound() + (m->dtype == MOE_BF16 ? 4e-3 : 0)))
				say("a published gradient is off by", error);
		}
		free(got);
	}
}

void add_gradients(struct layer_model *m, const struct block_reference *r,
		   const struct slack *slack, double scale)
{
	bool accumulate = m->open || (m->pending && !m->taken);

	for (int i = 0; i < 9; i++)
		m->slack.grad[i] = (accumulate ? m->slack.grad[i] : 0) + scale * slack->grad[i];
	for (int i = 0; i < 9; i++)
		for (int64_t j = 0; trained(m, i) && j < m->d.n[array_of(i)]; j++)
			m->sum[i][j] =
				(accumulate ? m->sum[i][j] : 0) + scale * r->grad[array_of(i)][j];
	m->pending = trains(m);
	m->taken = false;
}

void stale(struct layer_model *m)
{
	for (int i = 0; i < m->n_kept; i++)
		m->kept[i].stale = true;
}

/* ---- the optimizer ---- */

double squares(const struct layer_model *m)
{
	double s = 0;

	for (int i = 0; i < 9; i++)
		for (int64_t j = 0; trained(m, i) && j < m->d.n[array_of(i)]; j++)
			s += m->sum[i][j] * m->sum[i][j];
	return s;
}

/* How far AdamW may be off: with a small eps a gradient of rounding noise moves a parameter by a
 * whole step. */
static double update_bound(const struct layer_model *m, const struct moe_adamw_params *p, int i)
{
	double largest = 1;

	if (p->eps < .5)
		return 2.5 * p->learning_rate;
	for (int64_t j = 0; j < m->d.n[array_of(i)]; j++)
		largest = fmax(largest, fabs(m->sum[i][j]));
	return 1e-6 +
	       8 * p->learning_rate * (m->loose * random_bound() * largest + m->moments_slack);
}

void model_update(struct layer_model *m, const struct moe_adamw_params *p, double factor)
{
	double c1, c2, bound = 0;

	m->steps++;
	m->moments_slack *= p->beta1;
	for (int i = 0; i < 9; i++)
		m->moments_slack = fmax(m->moments_slack, m->slack.grad[i]);
	c1 = 1 - pow(p->beta1, m->steps), c2 = 1 - pow(p->beta2, m->steps);
	for (int i = 0; i < 9; i++)
		for (int64_t j = 0; trained(m, i) && j < m->d.n[array_of(i)]; j++) {
			double g = factor * m->sum[i][j];
			float *w = &m->d.w[array_of(i)][j];

			m->m[i][j] = p->beta1 * m->m[i][j] + (1 - p->beta1) * g;
			m->v[i][j] = p->beta2 * m->v[i][j] + (1 - p->beta2) * g * g;
			*w = (float)(*w * (1 - p->learning_rate * p->weight_decay) -
				     p->learning_rate * (m->m[i][j] / c1) /
					     (sqrt(m->v[i][j] / c2) + p->eps));
		}
	for (int i = 0; i < 9; i++)
		if (trained(m, i))
			bound = fmax(bound, update_bound(m, p, i));
	m->drift += bound;
	stale(m);
	m->taken = m->pending;
	m->open = false;
	check_shown(m, false);
}

/* A bound parameter is the layer's value, rounded to its type. */
static void check_param(struct layer_model *m, int i)
{
	size_t n = (size_t)m->d.n[array_of(i)], bytes = n * moe_dtype_size(m->dtype);
	void *now = malloc(bytes + 1);

	memcpy(now, m->param[i], bytes);
	caller_put(m, i, m->d.w[array_of(i)]);
	expect(!memcmp(now, m->param[i], bytes), "a bound parameter after the update");
	free(now);
}

void check_update(struct layer_model *m)
{
	do_wait(m);
	for (int i = 0; i < 9; i++) {
		enum moe_block_array which = array_of(i);
		double *v, error = 0;

		if (!trained(m, i))
			continue;
		v = layer_get(m->l, &m->d.c, which, false);
		for (int64_t j = 0; j < m->d.n[which]; j++)
			error = worst_of(error, fabs(v[caller_index(m, i, j)] - m->d.w[which][j]));
		if (!CHECK(error <= m->drift))
			say("a parameter is off by", error);
		for (int64_t j = 0; j < m->d.n[which]; j++)
			m->d.w[which][j] = (float)v[caller_index(m, i, j)];
		free(v);
		if (is_bound(m, i))
			check_param(m, i);
	}
	m->drift = 0;
}
