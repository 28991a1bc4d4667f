/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward of a layer's experts. */
#include "api/experts.h"

static enum moe_status check_ready(const struct moe_expert_layer *l)
{
	if (!l->loaded)
		return moe_fail(MOE_ERR_STATE,
				"layer %d has no weights: call moe_experts_load or moe_experts_load_file",
				l->params.layer);
	if (l->layer.r && !l->lora_ready)
		return moe_fail(MOE_ERR_STATE,
				"layer %d has no LoRA values: call moe_experts_init_lora or "
				"moe_experts_bind_lora",
				l->params.layer);
	return MOE_OK;
}

static enum moe_status check_forward(const struct moe_expert_layer *l, const struct moe_array *x,
				     const struct moe_array *ids, const struct moe_array *weights,
				     bool save, const struct moe_array *out)
{
	const struct moe_experts_params *p = &l->params;

	MOE_TRY(check_ready(l));
	MOE_TRY(moe_check_tokens(&l->layer, x, out));
	if (p->max_tokens && x->shape[0] > p->max_tokens)
		return moe_fail(MOE_ERR_ARG,
				"x has %lld tokens, max_tokens is %d: split the call or raise max_tokens",
				(long long)x->shape[0], p->max_tokens);
	MOE_TRY(moe_check_routing(&l->layer, x->shape[0], ids, weights));
	if (save && l->kept >= p->max_cache_depth)
		return moe_fail(MOE_ERR_STATE,
				"%d forwards wait for their backward and max_cache_depth is %d: run a "
				"backward first or raise it",
				l->kept, p->max_cache_depth);
	return MOE_OK;
}

/*
 * One that nothing is kept in: idle if there is one, else the one used longest ago. That one at once where
 * micro-batches have buffers of their own: then those of all layers take turns in the same order.
 */
static struct moe_experts_pass *choose_pass(struct moe_expert_layer *l)
{
	struct moe_experts_pass *best = NULL;

	for (int i = 0; i < l->n_passes; i++) {
		struct moe_experts_pass *p = &l->pass[i];

		if (p->kept)
			continue;
		if (l->params.micro_batches == 1 && moe_ticket_done(p->ticket))
			return p;
		if (!best || p->used < best->used)
			best = p;
	}
	return best; /* there is one pass more than may be kept */
}

static enum moe_status pass_alloc(struct moe_expert_layer *l, struct moe_experts_pass *p, int T)
{
	struct moe_engine *e = l->engine;

	p->capacity = T;
	MOE_TRY((moe_kernels()->x16 ? moe_stream_create_order : moe_stream_create)(e, "x", T, l->layer.H,
										   &p->x));
	MOE_TRY(moe_experts_state_alloc(e, &l->layer, T, &p->state));
	MOE_TRY(moe_tensor_create(e, "plan", 0, -1, &p->plan));
	moe_tensor_set_initialised(p->plan);
	return MOE_OK;
}

static void pass_free(struct moe_expert_layer *l, struct moe_experts_pass *p)
{
	if (p->capacity >= 0) {
		moe_experts_state_free(l->engine, &p->state, l->layer.P);
		moe_stream_destroy(l->engine, &p->x);
		moe_tensor_destroy(p->plan);
		p->plan = NULL;
	}
	p->capacity = p->T = -1;
	p->generation = -1;
}

/* Buffers of an idle pass for T tokens, bound to those of the space. */
static enum moe_status pass_prepare(struct moe_expert_layer *l, struct moe_experts_pass *p, int T)
{
	struct moe_space *s = l->space;
	enum moe_status st;

	MOE_TRY(moe_space_reserve(s, l, MOE_MAX(T, 1)));
	if (T > p->capacity) {
		pass_free(l, p);
		st = pass_alloc(l, p, MOE_MAX(T, 1));
		if (st != MOE_OK) {
			pass_free(l, p);
			return st;
		}
	}
	if (p->T != T || p->generation != s->generation) {
		moe_experts_state_bind(&p->state, &l->layer, &s->slot[p->slot].scratch, p->ring, T);
		p->state.grad_out = s->slot[p->slot].grad_out[p->ring].data;
		p->T = T;
		p->generation = s->generation;
	}
	return MOE_OK;
}

static struct moe_moe_pass graph_pass(struct moe_expert_layer *l, struct moe_experts_pass *p)
{
	struct moe_space *s = l->space;
	struct moe_moe_pass g = {
		.layer = &l->layer,
		.state = &p->state,
		.lt = &l->tensors,
		.st = &s->slot[p->slot].tensors,
		.plan = p->plan,
		.ring = p->ring,
		.has_grads = l->layer.r > 0,
		.drop = p->drop,
	};

	moe_pass_set_copies(&g, &s->ring, l->number);
	return g;
}

/* Deeper is more urgent: up the layers, then down again, whatever their number. */
static int depth_of(const struct moe_expert_layer *l, bool backward)
{
	return MOE_PRIORITY_LAYER * (backward ? 2 * (INT16_MAX + 1) - l->params.layer : l->params.layer);
}

static enum moe_status submit_forward(struct moe_expert_layer *l, struct moe_experts_pass *p,
				      const struct moe_array *x, const struct moe_array *out)
{
	struct moe_context c = moe_experts_context(l, p->ticket, MOE_PHASE_FORWARD, depth_of(l, false));
	struct moe_moe_pass g = graph_pass(l, p);
	struct moe_stream *y = &moe_space_slot(l, p)->out;

	c.micro = p->micro;
	/* the pass is idle: nothing reads the x of its last forward any more */
	MOE_TRY(moe_submit_copy(&c, &p->x, x, true, p->state.x16));
	MOE_TRY(moe_graph_moe_forward(&c, &g, &p->x, NULL, y));
	return moe_submit_copy(&c, y, out, false, NULL);
}

/* A graph that was submitted in part still uses the caller's arrays, which the error frees. */
static enum moe_status run_forward(struct moe_expert_layer *l, struct moe_experts_pass *p,
				   const struct moe_array *x, const struct moe_array *ids,
				   const struct moe_array *weights, bool save,
				   const struct moe_array *out)
{
	enum moe_status st;
	int T = (int)x->shape[0];

	MOE_TRY(pass_prepare(l, p, T));
	p->drop = (struct moe_drop_pass){
		.on = l->layer.dropout > 0 &&
		      (l->dropout == MOE_DROPOUT_ON || (l->dropout == MOE_DROPOUT_SAVED && save)),
		.seed = l->layer.dropout_seed,
		.step = l->dropout_step < 0 ? l->steps : l->dropout_step,
		.position = l->dropout_position,
	};
	moe_take_routing(&l->layer, &p->state.plan, ids, weights, T);
	moe_stream_resize(&p->x, T);
	moe_stream_resize(&moe_space_slot(l, p)->out, T);
	p->micro = l->micro;
	MOE_TRY(moe_submit_begin(l->engine));
	st = submit_forward(l, p, x, out);
	moe_submit_end(l->engine);
	if (st != MOE_OK)
		moe_ticket_drain(p->ticket);
	return st;
}

static enum moe_status forward(struct moe_expert_layer *l, const struct moe_array *x,
			       const struct moe_array *ids, const struct moe_array *weights, bool save,
			       const struct moe_array *out, struct moe_experts_pass **used)
{
	struct moe_experts_pass *p;
	enum moe_status st;

	MOE_TRY(check_forward(l, x, ids, weights, save, out));
	p = choose_pass(l);
	MOE_TRY(moe_ticket_wait(p->ticket));
	pthread_mutex_lock(&l->space->lock);
	st = run_forward(l, p, x, ids, weights, save, out);
	pthread_mutex_unlock(&l->space->lock);
	MOE_TRY(st);
	p->used = ++l->forwards;
	l->micro++;
	p->values = l->values;
	p->kept = save;
	l->kept += save;
	*used = p;
	return MOE_OK;
}

enum moe_status moe_experts_forward_async(struct moe_expert_layer *l, const struct moe_array *x,
					  const struct moe_array *ids,
					  const struct moe_array *weights, int save,
					  const struct moe_array *out)
{
	struct moe_experts_pass *p;
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = forward(l, x, ids, weights, save, out, &p);
	moe_experts_leave(l);
	return st;
}

static void forget(struct moe_expert_layer *l, struct moe_experts_pass *p)
{
	p->kept = false;
	l->kept--;
}

/* The end of a synchronous call on a pass, which nothing stops: refused while held before it began. */
static enum moe_status finish(struct moe_experts_pass *p)
{
	enum moe_status st = moe_ticket_wait(p->ticket);

	if (st != MOE_OK) /* held meanwhile: the caller's arrays must not be used after the call */
		moe_ticket_drain(p->ticket);
	return st;
}

enum moe_status moe_experts_forward(struct moe_expert_layer *l, const struct moe_array *x,
				    const struct moe_array *ids, const struct moe_array *weights,
				    int save, const struct moe_array *out)
{
	struct moe_experts_pass *p;
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = moe_engine_check_running(l->engine);
	if (st == MOE_OK)
		st = forward(l, x, ids, weights, save, out, &p);
	if (st == MOE_OK) {
		st = finish(p);
		if (st != MOE_OK && save)
			forget(l, p);
	}
	moe_experts_leave(l);
	return st;
}

/* ---- backward ---- */

/* The latest forward that is kept. */
static struct moe_experts_pass *latest(struct moe_expert_layer *l)
{
	struct moe_experts_pass *best = NULL;

	for (int i = 0; i < l->n_passes; i++)
		if (l->pass[i].kept && (!best || l->pass[i].used > best->used))
			best = &l->pass[i];
	return best;
}

static enum moe_status check_backward(struct moe_expert_layer *l, const struct moe_experts_pass *p,
				      const struct moe_array *grad_out, double scale,
				      const struct moe_array *grad_x,
				      const struct moe_array *grad_weights)
{
	int H = l->layer.H, k = l->layer.k;

	if (!p)
		return moe_fail(MOE_ERR_STATE,
				"no forward is kept: run moe_experts_forward with save first");
	if (l->pending.pass && !moe_window_takes_several(l))
		return moe_fail(MOE_ERR_STATE,
				"a backward is pending: call moe_experts_wait before the next one");
	if (!(scale > 0 && scale <= 3e38))
		return moe_fail(MOE_ERR_ARG, "scale is %g; it must be finite and positive", scale);
	if (grad_out && grad_out->ndim == 2 && grad_out->shape[0] != p->T)
		return moe_fail(MOE_ERR_ARG, "grad_out has %lld rows, its forward had %d tokens",
				(long long)grad_out->shape[0], p->T);
	MOE_TRY(moe_check_float_matrix("grad_out", grad_out, p->T, H));
	MOE_TRY(moe_check_written_matrix("grad_x", grad_x, p->T, H));
	return grad_weights ? moe_check_written_matrix("grad_weights", grad_weights, p->T, k) : MOE_OK;
}

/* Whether the ring's entry holds this layer's copies of all experts; what this backward leaves there. */
static bool copies_ready(struct moe_expert_layer *l)
{
	struct moe_space *s = l->space;
	struct moe_ring_owner *o = s->ring.n ? &s->owner[l->number % s->ring.n] : NULL;

	if (!o)
		return false;
	if (o->layer == l && o->version == l->version)
		return true;
	o->layer = NULL; /* copies of the experts with rows only */
	return false;
}

static enum moe_status submit_backward(struct moe_expert_layer *l, struct moe_experts_pass *p,
				       bool first, double scale, const struct moe_array *grad_out,
				       const struct moe_array *grad_x,
				       const struct moe_array *grad_weights)
{
	struct moe_context c = moe_experts_context(l, p->ticket, MOE_PHASE_BACKWARD, depth_of(l, true));
	struct moe_moe_pass g = graph_pass(l, p);
	struct moe_space_slot *s = moe_space_slot(l, p);
	struct moe_stream *go = &s->grad_out[p->ring];
	struct moe_norm_bwd norm = { 0 };

	c.micro = p->micro;
	g.copies_ready = copies_ready(l);
	if (!first && (float)scale != l->window_scale)
		MOE_TRY(moe_graph_moe_rescale(&c, &l->layer, &l->tensors,
					      l->window_scale / (float)scale));
	l->window_scale = (float)scale;
	/* the late readers of what this ring entry held name its join */
	MOE_TRY(moe_task_join(&c, NULL, 0, go->users, s->tensors.grad_out[p->ring].out));
	MOE_TRY(moe_submit_copy(&c, go, grad_out, true, NULL));
	MOE_TRY(moe_graph_moe_backward(&c, &g, &p->x, go, &norm, NULL, first, &s->grad_x));
	MOE_TRY(moe_submit_copy(&c, &s->grad_x, grad_x, false, NULL));
	if (grad_weights)
		MOE_TRY(moe_submit_grad_weights(&c, &l->layer, &p->state.plan, &s->tensors, p->T,
						grad_weights));
	return moe_window_submit_exchange(&c, l, MOE_PUBLISH, true, true);
}

static enum moe_status run_backward(struct moe_expert_layer *l, struct moe_experts_pass *p, bool first,
				    double scale, const struct moe_array *grad_out,
				    const struct moe_array *grad_x,
				    const struct moe_array *grad_weights)
{
	struct moe_space_slot *s;
	enum moe_status st;

	MOE_TRY(pass_prepare(l, p, p->T)); /* the space's buffers may be others since the forward */
	s = moe_space_slot(l, p);
	moe_stream_resize(&s->grad_out[p->ring], p->T);
	moe_stream_resize(&s->grad_x, p->T);
	MOE_TRY(moe_submit_begin(l->engine));
	st = submit_backward(l, p, first, scale, grad_out, grad_x, grad_weights);
	moe_submit_end(l->engine);
	if (st != MOE_OK)
		moe_ticket_drain(p->ticket);
	return st;
}

static enum moe_status backward(struct moe_expert_layer *l, const struct moe_array *grad_out,
				double scale, const struct moe_array *grad_x,
				const struct moe_array *grad_weights, struct moe_experts_pass **used)
{
	struct moe_experts_pass *p = latest(l);
	enum moe_window window;
	enum moe_status st;
	bool more; /* it adds to one that is pending */

	MOE_TRY(check_backward(l, p, grad_out, scale, grad_x, grad_weights));
	MOE_TRY(moe_window_state(l, &window));
	if (p->values != l->values) {
		forget(l, p);
		return moe_fail(MOE_ERR_STATE, "weights or LoRA were changed after the forward, which is used "
					       "up: run it again");
	}
	more = l->pending.pass && !l->pending.taken;
	pthread_mutex_lock(&l->space->lock);
	st = run_backward(l, p, window != MOE_WINDOW_OPEN && !more, scale, grad_out, grad_x, grad_weights);
	pthread_mutex_unlock(&l->space->lock);
	forget(l, p);
	if (st != MOE_OK) {
		moe_window_close(l); /* what was added in part is dropped */
		return moe_fail_in(st, "the backward failed, its forward is used up and the gradient "
				       "window is closed");
	}
	if (window != MOE_WINDOW_EMPTY)
		l->pending = (struct moe_pending){
			.pass = p,
			.accumulate = more ? l->pending.accumulate : window == MOE_WINDOW_OPEN,
		};
	*used = p;
	return MOE_OK;
}

enum moe_status moe_experts_backward_async(struct moe_expert_layer *l, const struct moe_array *grad_out,
					   double scale, const struct moe_array *grad_x,
					   const struct moe_array *grad_weights)
{
	struct moe_experts_pass *p;
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = backward(l, grad_out, scale, grad_x, grad_weights, &p);
	moe_experts_leave(l);
	return st;
}

enum moe_status moe_experts_backward(struct moe_expert_layer *l, const struct moe_array *grad_out,
				     double scale, const struct moe_array *grad_x,
				     const struct moe_array *grad_weights)
{
	struct moe_experts_pass *p;
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = moe_engine_check_running(l->engine);
	if (st == MOE_OK)
		st = backward(l, grad_out, scale, grad_x, grad_weights, &p);
	if (st == MOE_OK) {
		st = finish(p);
		if (st == MOE_OK)
			st = moe_window_publish(l);
		else
			moe_window_close(l);
	}
	moe_experts_leave(l);
	return st;
}

enum moe_status moe_experts_drop(struct moe_expert_layer *l)
{
	struct moe_experts_pass *p;
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_experts_enter(l));
	p = latest(l);
	if (p)
		forget(l, p);
	else
		st = moe_fail(MOE_ERR_STATE, "no forward is kept");
	moe_experts_leave(l);
	return st;
}

static enum moe_status wait_all(struct moe_expert_layer *l)
{
	for (int i = 0; i < l->n_passes; i++)
		MOE_TRY(moe_ticket_wait(l->pass[i].ticket));
	MOE_TRY(moe_ticket_wait(l->ticket));
	return moe_window_publish(l);
}

enum moe_status moe_experts_wait(struct moe_expert_layer *l)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = wait_all(l);
	moe_experts_leave(l);
	return st;
}

/* ---- copies ahead of the backward ---- */

static enum moe_status repack(struct moe_expert_layer *l)
{
	struct moe_context c = moe_experts_context(l, l->ticket, MOE_PHASE_BACKWARD, depth_of(l, true));
	struct moe_space *s = l->space;
	struct moe_ring_owner *o = s->ring.n ? &s->owner[l->number % s->ring.n] : NULL;
	enum moe_status st;

	MOE_TRY(check_ready(l));
	if (!o || (o->layer == l && o->version == l->version))
		return MOE_OK;
	MOE_TRY(moe_submit_begin(l->engine));
	st = moe_graph_moe_repack_bwd(&c, &l->layer, &l->tensors, &s->ring, l->number);
	moe_submit_end(l->engine);
	*o = (struct moe_ring_owner){ st == MOE_OK ? l : NULL, l->version };
	return st;
}

enum moe_status moe_experts_repack_async(struct moe_expert_layer *l)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	pthread_mutex_lock(&l->space->lock);
	st = repack(l);
	pthread_mutex_unlock(&l->space->lock);
	moe_experts_leave(l);
	return st;
}
