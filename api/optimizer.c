/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW over several layers' experts: one gradient norm, one submission, two steps in flight. */
#include "api/experts.h"

#include <math.h>

#define IN_FLIGHT 2

/* A step that was submitted. */
struct flight {
	struct moe_ticket *ticket;
	double *squares; /* [n_squares] */
	struct moe_grad_norm norm;
	int64_t step;
	bool clipped; /* norm is, or will be, known */
};

struct moe_optimizer {
	struct moe_engine *engine;
	atomic_flag busy;
	struct moe_expert_layer **layer; /* [n] */
	int n;
	int n_done, n_params; /* grad_norm tasks; tensors that the updates write */
	int64_t n_squares;
	struct moe_tensor **done;   /* [n_done] */
	struct moe_tensor **params; /* [n_params] not owned */
	struct moe_join norms, end;
	struct moe_tensor *norm_ready;
	struct flight flight[IN_FLIGHT];
	int64_t steps;
};

static int groups_of(const struct moe_expert_layer *l)
{
	return l->layer.P * l->layer.G;
}

static enum moe_status take_layers(struct moe_optimizer *o, struct moe_expert_layer *const *layers)
{
	for (int i = 0; i < o->n; i++) {
		struct moe_expert_layer *l = layers[i];
		bool lora, base;

		if (!l || l->engine != o->engine)
			return moe_fail(MOE_ERR_ARG, "optimizer: layer %d of %d is %s", i, o->n,
					l ? "of another engine" : "NULL");
		for (int j = 0; j < i; j++)
			if (layers[j] == l)
				return moe_fail(MOE_ERR_ARG,
						"optimizer: layers %d and %d are the same", j, i);
		lora = l->layer.r > 0;
		base = l->params.train_base;
		if (!lora && !base)
			return moe_fail(
				MOE_ERR_ARG,
				"optimizer: layer %d trains nothing: no LoRA, no train_base", i);
		o->layer[i] = l;
		o->n_done += groups_of(l) * (lora + base);
		o->n_params += groups_of(l) * (lora + base);
		o->n_squares +=
			(lora ? MOE_SQUARES_PER_EXPERT(l->layer.P) : 0) * (int64_t)l->layer.E;
		o->n_squares += (base ? 3 * l->layer.P : 0) * (int64_t)l->layer.E;
	}
	return MOE_OK;
}

static void list_params(struct moe_optimizer *o)
{
	int at = 0;

	for (int i = 0; i < o->n; i++) {
		const struct moe_expert_layer *l = o->layer[i];

		for (int g = 0; g < groups_of(l); g++) {
			if (l->layer.r)
				o->params[at++] = l->tensors.lora_i[g];
			if (l->params.train_base)
				o->params[at++] = l->tensors.weights[g];
		}
	}
}

static enum moe_status make(struct moe_optimizer *o, struct moe_expert_layer *const *layers)
{
	o->layer = moe_calloc((size_t)o->n, sizeof(struct moe_expert_layer *));
	if (!o->layer)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an optimizer");
	MOE_TRY(take_layers(o, layers));
	o->params = moe_calloc((size_t)o->n_params, sizeof(struct moe_tensor *));
	if (!o->params)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an optimizer");
	list_params(o);
	for (int i = 0; i < IN_FLIGHT; i++) {
		o->flight[i].squares = moe_calloc((size_t)o->n_squares, sizeof(double));
		if (!o->flight[i].squares)
			return moe_fail(MOE_ERR_NOMEM, "no memory for an optimizer");
		MOE_TRY(moe_ticket_create(o->engine, &o->flight[i].ticket));
	}
	MOE_TRY(moe_tensors_create(o->engine, "norm", o->n_done, false, &o->done));
	MOE_TRY(moe_join_create(o->engine, "norms", o->n_done, &o->norms));
	MOE_TRY(moe_join_create(o->engine, "step", o->n_params, &o->end));
	return moe_tensor_create(o->engine, "norm", 0, -1, &o->norm_ready);
}

enum moe_status moe_optimizer_create(struct moe_engine *engine,
				     struct moe_expert_layer *const *layers, int n,
				     struct moe_optimizer **out)
{
	struct moe_optimizer *o;
	enum moe_status st;

	if (!out)
		return moe_fail(MOE_ERR_ARG, "out is NULL");
	*out = NULL;
	MOE_TRY(moe_engine_check(engine));
	if (!layers || n < 1 || n > INT16_MAX)
		return moe_fail(MOE_ERR_ARG, "optimizer: %d layers; at least one is needed", n);
	o = moe_calloc(1, sizeof *o);
	if (!o)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an optimizer");
	o->engine = engine;
	o->n = n;
	st = make(o, layers);
	for (int i = 0; i < n && st == MOE_OK; i++)
		moe_experts_touch_moments(layers[i]);
	if (st != MOE_OK)
		moe_optimizer_destroy(o);
	else
		*out = o;
	return st;
}

void moe_optimizer_destroy(struct moe_optimizer *o)
{
	if (!o)
		return;
	if (moe_engine_check(o->engine) == MOE_OK) {
		if (moe_engine_check_not_task("destroying an optimizer") != MOE_OK)
			return; /* it would wait for itself */
		for (int i = 0; i < IN_FLIGHT; i++)
			if (o->flight[i].ticket) {
				moe_ticket_drain(o->flight[i].ticket);
				moe_ticket_destroy(o->flight[i].ticket);
			}
		moe_tensors_destroy(o->done, o->n_done);
		moe_join_destroy(&o->norms);
		moe_join_destroy(&o->end);
		moe_tensor_destroy(o->norm_ready);
	}
	for (int i = 0; i < IN_FLIGHT; i++)
		moe_free(o->flight[i].squares);
	moe_free(o->params);
	moe_free(o->layer);
	moe_free(o);
}

static enum moe_status enter(struct moe_optimizer *o)
{
	if (!o)
		return moe_fail(MOE_ERR_ARG, "optimizer is NULL");
	MOE_TRY(moe_engine_check(o->engine));
	if (atomic_flag_test_and_set(&o->busy))
		return moe_fail(MOE_ERR_BUSY, "another thread is in this optimizer");
	return MOE_OK;
}

/* ---- a step ---- */

/* Sums of squares per (part, group) as soon as its gradient is complete, then the norm of all. */
static enum moe_status submit_norm(struct moe_optimizer *o, struct flight *f, float max_norm)
{
	struct moe_context all = { .engine = o->engine,
				   .ticket = f->ticket,
				   .layer = -1,
				   .step = (int)f->step,
				   .phase = MOE_PHASE_UPDATE,
				   .priority = MOE_PRIORITY_UPDATE };
	struct moe_grad_total_args total = { .squares = f->squares,
					     .n_experts = o->n_squares,
					     .n = o->n_squares,
					     .max_norm = max_norm,
					     .out = &f->norm };
	struct moe_tensor **done = o->done;
	double *squares = f->squares;

	for (int i = 0; i < o->n; i++) {
		struct moe_expert_layer *l = o->layer[i];
		struct moe_context c = all;

		c.layer = l->params.layer;
		if (l->layer.r) {
			MOE_TRY(moe_graph_moe_grad_norm(&c, &l->layer, &l->tensors, l->window_scale,
							squares, done));
			squares += (int64_t)MOE_SQUARES_PER_EXPERT(l->layer.P) * l->layer.E;
			done += groups_of(l);
		}
		if (l->params.train_base) {
			MOE_TRY(moe_graph_moe_base_norm(&c, &l->layer, &l->tensors, l->window_scale,
							squares, done));
			squares += (int64_t)3 * l->layer.P * l->layer.E;
			done += groups_of(l);
		}
	}
	MOE_TRY(moe_join_submit(&all, &o->norms, o->done, o->n_done, NULL));
	return moe_task_grad_total(&all, &total, o->norms.out, o->norm_ready);
}

static enum moe_status submit(struct moe_optimizer *o, struct flight *f,
			      const struct moe_adamw_params *p)
{
	struct moe_context c = { .engine = o->engine,
				 .ticket = f->ticket,
				 .layer = -1,
				 .step = (int)f->step,
				 .phase = MOE_PHASE_UPDATE,
				 .priority = MOE_PRIORITY_UPDATE };

	if (f->clipped)
		MOE_TRY(submit_norm(o, f, (float)p->max_grad_norm));
	for (int i = 0; i < o->n; i++) {
		struct moe_optimizer_step step = { .adamw = moe_adamw_of(p, o->layer[i]->steps),
						   .norm = f->clipped ? &f->norm : NULL,
						   .norm_ready = o->norm_ready };

		MOE_TRY(moe_window_submit_update(o->layer[i], o->layer[i]->ticket, &step));
	}
	return moe_join_submit(&c, &o->end, o->params, o->n_params, NULL);
}

/* All layers are entered. */
static enum moe_status step(struct moe_optimizer *o, const struct moe_adamw_params *p)
{
	struct flight *f = &o->flight[(o->steps + 1) % IN_FLIGHT];
	enum moe_status st;

	for (int i = 0; i < o->n; i++)
		if (moe_window_check_update(o->layer[i]) != MOE_OK)
			return moe_fail_in(MOE_ERR_STATE, "layer %d", o->layer[i]->params.layer);
	MOE_TRY(moe_ticket_wait(f->ticket));
	f->step = o->steps + 1;
	f->clipped = p->max_grad_norm > 0;
	f->norm = (struct moe_grad_norm){ .norm = NAN };
	MOE_TRY(moe_submit_begin(o->engine));
	st = submit(o, f, p);
	moe_submit_end(o->engine);
	o->steps++;
	for (int i = 0; i < o->n; i++)
		moe_window_updated(o->layer[i], moe_adamw_of(p, o->layer[i]->steps).step);
	if (st == MOE_OK)
		return MOE_OK;
	moe_ticket_drain(f->ticket);
	for (int i = 0; i < o->n; i++)
		moe_ticket_drain(o->layer[i]->ticket);
	return moe_fail_in(st, "the update was applied in part");
}

enum moe_status moe_optimizer_step(struct moe_optimizer *o, const struct moe_adamw_params *p)
{
	enum moe_status st = MOE_OK;
	struct moe_adamw_params rest;
	int entered = 0;

	if (p && p->struct_size >= sizeof *p) {
		if (!(p->max_grad_norm >= 0 && isfinite(p->max_grad_norm)))
			return moe_fail(MOE_ERR_ARG,
					"adamw params: max_grad_norm is %g; 0 (no clipping) or a "
					"positive number is possible",
					p->max_grad_norm);
		rest = *p;
		rest.max_grad_norm = 0;
		MOE_TRY(moe_check_adamw(&rest));
	} else {
		MOE_TRY(moe_check_adamw(p));
	}
	MOE_TRY(enter(o));
	while (st == MOE_OK && entered < o->n) {
		st = moe_experts_enter(o->layer[entered]);
		entered += st == MOE_OK;
	}
	if (st == MOE_OK)
		st = step(o, p);
	while (entered > 0)
		moe_experts_leave(o->layer[--entered]);
	atomic_flag_clear(&o->busy);
	return st;
}

static enum moe_status wait_step(struct moe_optimizer *o, int64_t number, double *norm)
{
	const struct flight *f = &o->flight[number % IN_FLIGHT];

	if (number < 0 || number > o->steps)
		return moe_fail(MOE_ERR_ARG, "optimizer: step %lld; 0 (the last one) to %lld are possible",
				(long long)number, (long long)o->steps);
	if (norm)
		*norm = NAN;
	for (int64_t s = MOE_MAX(o->steps - IN_FLIGHT + 1, 1); s <= (number ? number : o->steps);
	     s++)
		MOE_TRY(moe_ticket_wait(o->flight[s % IN_FLIGHT].ticket));
	if (!number)
		f = &o->flight[o->steps % IN_FLIGHT];
	if (norm && f->clipped && f->step == (number ? number : o->steps))
		*norm = f->norm.norm;
	return MOE_OK;
}

enum moe_status moe_optimizer_wait(struct moe_optimizer *o, int64_t number, double *norm)
{
	enum moe_status st;

	MOE_TRY(enter(o));
	st = wait_step(o, number, norm);
	atomic_flag_clear(&o->busy);
	return st;
}
