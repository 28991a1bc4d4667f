/* SPDX-License-Identifier: Apache-2.0 */
/* Calls on one layer, right ones and those that the layer's state forbids. */
#include "tests/random_layers.h"

#include <math.h>

void settle(struct layer_model *m)
{
	expect_status(moe_experts_wait(m->l), MOE_OK, "wait");
	published(m);
}

void do_wait(struct layer_model *m)
{
	settle(m);
	flush(m);
}

/* The same ids in 64 bits; the call has read them when it returns. */
static int64_t *wide_ids(struct layer_call *a, const struct block_data *d)
{
	int64_t n = (int64_t)d->c.T * d->c.k, *wide = malloc((size_t)(n + 1) * sizeof *wide);

	for (int64_t i = 0; i < n; i++)
		wide[i] = d->ids[i];
	a->ids = matrix_of(wide, MOE_I64, d->c.T, d->c.k);
	return wide;
}

void do_forward(struct layer_model *m)
{
	bool save = any(3) > 0, async = any(2), inject = any(6) == 0;
	struct block_data d = call_of(m, any(T_MAX + 1));
	struct layer_call a = layer_call(&d, d.c.T);
	struct block_reference r = { 0 };
	struct slack slack;
	enum moe_status st,
		want = save && m->n_kept >= m->p.max_cache_depth ? MOE_ERR_STATE : MOE_OK;
	int64_t *wide = any(2) ? wide_ids(&a, &d) : NULL;

	if (m->n_list > PENDING - 4)
		do_wait(m);
	if (inject)
		moe_alloc_fail_after(1 + any(60));
	st = (async ? moe_experts_forward_async : moe_experts_forward)(m->l, &a.x, &a.ids,
								       &a.weights, save, &a.out);
	moe_alloc_fail_after(-1);
	free(wide);
	if (!inject || st != MOE_ERR_NOMEM)
		expect_status(st, want, "forward");
	if (st != MOE_OK) {
		call_free(&d);
		return;
	}
	pass_reference(m, &d, &r, &slack);
	remember(m, &d, d.out, r.out, (int64_t)d.c.T * d.c.H, slack.out, !save);
	block_reference_free(&r);
	if (save)
		m->kept[m->n_kept++] = (struct kept){ .d = d };
	if (!async && !m->pending && !any(4))
		do_wait(m);
}

/* What a backward does that is refused or fails to the forward that is kept. */
static void backward_failed(struct layer_model *m, struct kept *k, enum moe_status st,
			    enum moe_status want)
{
	bool looked_at = k && (!m->pending || several(m));

	if (!k || !(st == MOE_ERR_NOMEM || (want == MOE_ERR_STATE && k->stale && looked_at)))
		return;
	do_wait(m); /* the forward may be in flight and use the arrays */
	call_free(&k->d);
	m->n_kept--;
}

void do_backward(struct layer_model *m)
{
	static const double scales[] = { 1, .5, 3, 0, -1, NAN };
	bool async = any(2), inject = any(6) == 0, wrong_rows, without_weights = any(4) == 0;
	int which = any(8);
	double scale = scales[which > 5 ? 0 : which];
	struct kept *k = m->n_kept ? &m->kept[m->n_kept - 1] : NULL;
	struct block_data none = call_of(m, 1), *d = k ? &k->d : &none;
	struct layer_call a = layer_call(d, d->c.T);
	struct block_reference r = { 0 };
	struct slack slack;
	enum moe_status st, want = MOE_OK;

	wrong_rows = k && any(6) == 0;
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
	st = (async ? moe_experts_backward_async : moe_experts_backward)(
		m->l, &a.grad_out, scale, &a.grad_x, without_weights ? NULL : &a.grad_weights);
	moe_alloc_fail_after(-1);
	if (inject && want == MOE_OK && st == MOE_ERR_NOMEM) {
		expect(strstr(moe_last_error(), "used up") != NULL, "text of a failed backward");
		close_window(m);
	} else {
		expect_status(st, want, "backward");
	}
	if (st == MOE_OK) {
		pass_reference(m, d, &r, &slack);
		if (!without_weights)
			remember(m, d, d->grad_weights, r.grad_weights, (int64_t)d->c.T * d->c.k,
				 slack.grad_weights, false);
		remember(m, d, d->grad_x, r.grad_x, (int64_t)d->c.T * d->c.H, slack.grad_x, true);
		add_gradients(m, &r, &slack, scale);
		block_reference_free(&r);
		m->n_kept--;
		if (!async)
			published(m);
	} else {
		backward_failed(m, k, st, want);
	}
	call_free(&none);
}

/* AdamW as it is used, or one whose steps are nearly the gradient: it is compared narrowly. */
static struct moe_adamw_params draw_adamw(void)
{
	struct moe_adamw_params p = adamw_default();

	if (any(2))
		p.eps = 1, p.learning_rate = .05;
	return p;
}

void do_update(struct layer_model *m, struct moe_engine *e)
{
	struct moe_adamw_params p = draw_adamw();
	enum moe_status st, want = MOE_OK;
	bool inject = any(10) == 0;

	if (!trains(m) || (m->pending ? has_buffers(m) || m->taken : !m->open))
		want = MOE_ERR_STATE;
	if (want == MOE_OK && (m->bound || m->bound_base))
		do_wait(m); /* params of the caller are written: nothing else may read them */
	if (inject)
		moe_alloc_fail_after(1 + any(40));
	st = moe_experts_update(m->l, &p);
	moe_alloc_fail_after(-1);
	if (inject && want == MOE_OK && st == MOE_ERR_NOMEM) {
		expect(strstr(moe_last_error(), "in part") != NULL, "text of a failed update");
		model_free(m); /* its values are known to nobody */
		model_make(m, e);
		return;
	}
	expect_status(st, want, "update");
	if (st != MOE_OK)
		return;
	model_update(m, &p, 1);
	if (any(3) || m->bound || m->bound_base || p.eps < .5)
		check_update(m);
}

/* The caller's optimizer: changes bound params and tells. */
void do_external(struct layer_model *m)
{
	bool async = any(2);

	do_wait(m); /* nothing reads the params meanwhile */
	for (int i = 0; i < 9; i++) {
		float *w = m->d.w[array_of(i)], scale = i < 6 ? 1.5f : 1;

		if (!is_bound(m, i))
			continue;
		for (int64_t j = 0; j < m->d.n[array_of(i)]; j++)
			w[j] = moe_bf16_to_f32(moe_f32_to_bf16(w[j] * scale + .01f * unit())) /
			       scale;
		caller_put(m, i, w);
		caller_take(m, i, m->param[i], w);
	}
	if (m->bound || !m->d.c.r)
		expect_status(
			(async ? moe_experts_update_lora_async : moe_experts_update_lora)(m->l),
			MOE_OK, "update_lora");
	else
		expect_status(moe_experts_update_lora(m->l), MOE_ERR_STATE,
			      "update_lora of own LoRA");
	if (m->bound_base || !m->d.c.base_grads)
		expect_status(
			(async ? moe_experts_update_base_async : moe_experts_update_base)(m->l),
			MOE_OK, "update_base");
	else
		expect_status(moe_experts_update_base(m->l), MOE_ERR_STATE,
			      "update_base without params");
	if (m->bound || m->bound_base)
		stale(m);
	if (async)
		do_wait(m); /* the params are ours again */
}

/* The caller changes the grads of a pending backward: it is not published. */
static void disturb(struct layer_model *m)
{
	int first = m->bound ? 0 : 6;
	void *set = m->open ? NULL : m->buffer[first];

	m->g[first].grad = set;
	if (m->open)
		for (int i = 0; i < 9; i++)
			m->g[i].grad = NULL;
	expect_status(moe_experts_wait(m->l), MOE_ERR_STATE,
		      "a window changed during the backward");
	expect(strstr(moe_last_error(), "not published") != NULL,
	       "text of an unpublished backward");
	close_window(m);
	flush(m);
}

/* Grads that contradict each other or the binding are errors until they are mended. */
static void mix(struct layer_model *m)
{
	int i = m->bound ? any(6) : 6 + any(3);
	struct moe_gradient was = m->g[i];
	enum moe_window w;

	switch (any(3)) {
	case 0:
		m->g[i].grad = m->open ? NULL : m->buffer[i];
		break;
	case 1:
		m->g[i].grad = &w; /* not the buffer */
		break;
	default:
		m->g[i].buffer.shape[0]++;
		break;
	}
	expect_status(moe_experts_get_window(m->l, &w), MOE_ERR_STATE, "a mixed window");
	m->g[i] = was;
}

void do_window(struct layer_model *m)
{
	enum moe_window w;

	switch (m->pending && any(2) ? 3 : any(6)) {
	case 0:
		expect_status(moe_experts_release_gradients(m->l),
			      m->pending ? MOE_ERR_STATE : MOE_OK, "release");
		if (!m->pending)
			close_window(m);
		break;
	case 1: /* as zero_grad(set_to_none) */
		if (!has_buffers(m) || m->pending)
			break;
		for (int i = 0; i < 9; i++)
			m->g[i].grad = NULL;
		m->open = false;
		break;
	case 2:
		if (has_buffers(m) && !m->pending)
			mix(m);
		break;
	case 3:
		if (has_buffers(m) && m->pending && !m->taken)
			disturb(m);
		break;
	default:
		break;
	}
	expect_status(moe_experts_get_window(m->l, &w), MOE_OK, "window");
	expect(w == (!trains(m) ? MOE_WINDOW_EMPTY
		     : m->open	? MOE_WINDOW_OPEN
				: MOE_WINDOW_CLOSED),
	       "state of the window");
}

void do_gradient(struct layer_model *m)
{
	int i = any(9);
	double *g, *by_expert, error;
	struct moe_array a;
	size_t n;

	if (!trained(m, i))
		return;
	n = (size_t)m->d.n[array_of(i)];
	g = calloc(n + 1, sizeof *g);
	by_expert = calloc(n + 1, sizeof *g);
	a = array_like(m, i, g, MOE_F64);
	if (m->open && !m->pending) {
		expect_status(moe_experts_get_gradient(m->l, array_of(i), &a), MOE_OK, "gradient");
		for (size_t j = 0; j < n; j++)
			by_expert[j] = g[caller_index(m, i, (int64_t)j)];
		error = error_of_doubles(by_expert, m->sum[i], (int64_t)n, m->slack.grad[i]);
		if (!CHECK(error <= random_bound()))
			say("a gradient is off by", error);
	} else {
		expect_status(moe_experts_get_gradient(m->l, array_of(i), &a), MOE_ERR_STATE,
			      "gradient of a closed window");
	}
	free(by_expert);
	free(g);
}

void do_memory(struct layer_model *m)
{
	enum moe_status want = m->n_kept || m->pending ? MOE_ERR_STATE : MOE_OK;

	expect_status(moe_experts_release_memory(m->l), want, "release_memory");
}

void do_drop(struct layer_model *m)
{
	do_wait(m);
	expect_status(moe_experts_drop(m->l), m->n_kept ? MOE_OK : MOE_ERR_STATE, "drop");
	if (m->n_kept)
		call_free(&m->kept[--m->n_kept].d);
}

/* Submitted, and waited for or not; twice is once. */
void do_repack(struct layer_model *m)
{
	for (int i = 1 + any(2); i > 0; i--)
		expect_status(moe_experts_repack_async(m->l), MOE_OK, "repack");
	if (any(2))
		do_wait(m);
}
