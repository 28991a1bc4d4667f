/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradient windows, bound parameters and updates. Sums are f32 and inside, divided by window_scale; what a caller's
 * optimizer sees is the grad of its struct moe_gradient, which both sides may change between calls.
 */
#include "api/experts.h"

static bool trains(const struct moe_expert_layer *l)
{
	return l->layer.r > 0 || l->params.train_base;
}

static const char *name_of(const struct moe_expert_layer *l, int i)
{
	return l->bound[i]->name ? l->bound[i]->name
	       : i < MOE_BOUND_LORA
		       ? moe_experts_array_name((enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i))
		       : moe_experts_array_name((enum moe_block_array)(i - MOE_BOUND_LORA));
}

/* The buffer is what was bound. */
static enum moe_status check_unchanged(const struct moe_expert_layer *l, int i)
{
	const struct moe_array *now = &l->bound[i]->buffer, *then = &l->buffer[i];
	bool same = now->data == then->data && now->dtype == then->dtype && now->ndim == then->ndim;

	for (int d = 0; same && d < then->ndim; d++)
		same = now->shape[d] == then->shape[d] && now->strides[d] == then->strides[d];
	return same ? MOE_OK
		    : moe_fail(MOE_ERR_STATE,
			       "%s: the gradient buffer was replaced or resized after it was bound",
			       name_of(l, i));
}

/* What the bound entries say: how many have a gradient, of how many. */
static enum moe_status count_bound(const struct moe_expert_layer *l, int *set, int *all)
{
	*set = *all = 0;
	for (int i = 0; i < MOE_BOUND; i++) {
		const struct moe_gradient *g = l->bound[i];

		if (!g || !l->buffer[i].data)
			continue;
		MOE_TRY(check_unchanged(l, i));
		if (g->grad && g->grad != g->buffer.data)
			return moe_fail(MOE_ERR_STATE,
					"%s: grad was replaced; it must be NULL or the bound buffer",
					name_of(l, i));
		++*all;
		*set += g->grad != NULL;
	}
	return MOE_OK;
}

enum moe_status moe_window_state(struct moe_expert_layer *l, enum moe_window *out)
{
	int set, all;

	*out = MOE_WINDOW_EMPTY;
	if (!trains(l))
		return MOE_OK;
	MOE_TRY(count_bound(l, &set, &all));
	if (set && set != all)
		return moe_fail(MOE_ERR_STATE,
				"mixed gradients: %d of %d bound parameters have one; set all grads to NULL "
				"or call moe_experts_release_gradients",
				set, all);
	if (set && !l->open)
		return moe_fail(MOE_ERR_STATE,
				"grads are set, but no gradient was published; set them to NULL");
	if (all && !set)
		l->open = false; /* the caller's optimizer has closed it */
	*out = l->open ? MOE_WINDOW_OPEN : MOE_WINDOW_CLOSED;
	return MOE_OK;
}

enum moe_status moe_experts_get_window(struct moe_expert_layer *l, enum moe_window *out)
{
	enum moe_status st;

	if (!out)
		return moe_fail(MOE_ERR_ARG, "out is NULL");
	MOE_TRY(moe_experts_enter(l));
	st = moe_window_state(l, out);
	moe_experts_leave(l);
	return st;
}

static void show(struct moe_expert_layer *l, bool published)
{
	for (int i = 0; i < MOE_BOUND; i++)
		if (l->bound[i])
			l->bound[i]->grad = published ? l->buffer[i].data : NULL;
	l->open = published;
}

void moe_window_close(struct moe_expert_layer *l)
{
	show(l, false);
	l->pending = (struct moe_pending){ 0 };
}

enum moe_status moe_window_publish(struct moe_expert_layer *l)
{
	struct moe_pending p = l->pending;
	enum moe_window window;
	enum moe_status st;

	if (!p.pass)
		return MOE_OK;
	l->pending = (struct moe_pending){ 0 };
	if (p.taken) /* by an update */
		return MOE_OK;
	st = moe_window_state(l, &window);
	if (st == MOE_OK && (window == MOE_WINDOW_OPEN) != p.accumulate)
		st = moe_fail(MOE_ERR_STATE, "the gradient window was %s during the backward",
			      p.accumulate ? "closed" : "opened");
	if (st != MOE_OK) {
		moe_window_close(l);
		return moe_fail_in(st, "gradients are not published, the window is closed");
	}
	show(l, true);
	return MOE_OK;
}

static enum moe_status release(struct moe_expert_layer *l)
{
	int set, all;
	enum moe_status st;

	if (l->pending.pass)
		return moe_fail(MOE_ERR_STATE,
				"a backward is pending: call moe_experts_wait before releasing gradients");
	st = count_bound(l, &set, &all); /* mixed is what this call is for */
	if (st == MOE_OK)
		show(l, false);
	return st;
}

enum moe_status moe_experts_release_gradients(struct moe_expert_layer *l)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = release(l);
	moe_experts_leave(l);
	return st;
}

/* ---- binding ---- */

static enum moe_status check_entry(const struct moe_expert_layer *l, enum moe_block_array which,
				   const struct moe_gradient *g)
{
	const char *name = g->name ? g->name : moe_experts_array_name(which);
	int64_t shape[3];

	if (!moe_experts_shape(l, which, shape))
		return moe_fail(MOE_ERR_STATE, "%s: lora_rank is 0", name);
	MOE_TRY(moe_check_shape(name, &g->param, 3, shape));
	if (g->param.dtype != MOE_F32 && g->param.dtype != MOE_BF16)
		return moe_fail(MOE_ERR_ARG, "%s has dtype %s; F32 or BF16 is expected", name,
				moe_dtype_name(g->param.dtype));
	if (!g->buffer.data)
		return MOE_OK;
	MOE_TRY(moe_check_shape(name, &g->buffer, 3, shape));
	if (g->buffer.dtype != g->param.dtype)
		return moe_fail(MOE_ERR_ARG, "%s is %s and its gradient buffer %s; they must be alike",
				name, moe_dtype_name(g->param.dtype), moe_dtype_name(g->buffer.dtype));
	return MOE_OK;
}

/* No array twice, among the new entries and those bound before. */
static enum moe_status check_distinct(const struct moe_expert_layer *l, struct moe_gradient *g, int n)
{
	const struct moe_gradient *all[2 * MOE_BOUND];
	int m = 0;

	for (int i = 0; i < MOE_BOUND; i++)
		if (l->bound[i])
			all[m++] = l->bound[i];
	for (int i = 0; i < n; i++) {
		for (int j = 0; j < m; j++)
			if (all[j]->param.data == g[i].param.data ||
			    (g[i].buffer.data && (all[j]->buffer.data == g[i].buffer.data ||
						  all[j]->param.data == g[i].buffer.data)))
				return moe_fail(MOE_ERR_ARG,
						"binding %d (%s): its parameter or gradient buffer is bound "
						"already",
						i, g[i].name ? g[i].name : "unnamed");
		all[m++] = &g[i];
	}
	return MOE_OK;
}

static enum moe_status check_binding(struct moe_expert_layer *l, struct moe_gradient *g, int n,
				     int first, enum moe_block_array which)
{
	enum moe_window window;
	bool buffers;

	if (!g)
		return moe_fail(MOE_ERR_ARG, "the parameters to bind are NULL");
	if (l->bound[first])
		return moe_fail(MOE_ERR_STATE, "%s is bound already", name_of(l, first));
	MOE_TRY(moe_window_state(l, &window));
	if (window == MOE_WINDOW_OPEN || l->pending.pass)
		return moe_fail(MOE_ERR_STATE,
				"binding needs a closed gradient window: release the gradients first");
	buffers = g[0].buffer.data != NULL;
	for (int i = 0; i < n; i++) {
		MOE_TRY(check_entry(l, (enum moe_block_array)(which + i), &g[i]));
		if ((g[i].buffer.data != NULL) != buffers)
			return moe_fail(MOE_ERR_ARG,
					"binding %d: either all parameters have gradient buffers or none", i);
	}
	return check_distinct(l, g, n);
}

static void take_binding(struct moe_expert_layer *l, struct moe_gradient *g, int n, int first)
{
	for (int i = 0; i < n; i++) {
		g[i].grad = NULL;
		l->bound[first + i] = &g[i];
		l->buffer[first + i] = g[i].buffer;
	}
}

static void unbind(struct moe_expert_layer *l, int n, int first)
{
	memset(l->bound + first, 0, (size_t)n * sizeof(struct moe_gradient *));
}

/* ---- the caller's values ---- */

static struct moe_caller_array caller_array(const struct moe_expert_layer *l, int i, bool gradient)
{
	const struct moe_array *a = gradient ? &l->buffer[i] : &l->bound[i]->param;

	return (struct moe_caller_array){ a->data, a->dtype };
}

enum moe_status moe_window_submit_exchange(const struct moe_context *c, struct moe_expert_layer *l,
					   enum moe_exchange what, bool lora, bool base)
{
	struct moe_exchange_args a = { .what = what, .scale = l->window_scale, .map = l->map };
	bool gradient = what == MOE_PUBLISH;

	lora = lora && l->bound[0] && (!gradient || l->buffer[0].data);
	base = base && l->bound[MOE_BOUND_LORA] && (!gradient || l->buffer[MOE_BOUND_LORA].data);
	for (int i = 0; lora && i < MOE_BOUND_LORA; i++)
		a.lora[i] = caller_array(l, i, gradient);
	for (int i = 0; base && i < MOE_EXPERT_MATRICES; i++)
		a.base[i] = caller_array(l, MOE_BOUND_LORA + i, gradient);
	return lora || base ? moe_graph_moe_exchange(c, &l->layer, &l->tensors, &a, lora, base) : MOE_OK;
}

static enum moe_status update_lora(struct moe_expert_layer *l)
{
	struct moe_context c = moe_experts_context(l, l->ticket, MOE_PHASE_UPDATE, 0);
	enum moe_status st;

	if (!l->layer.r)
		return MOE_OK; /* full fine-tuning without LoRA, or frozen */
	if (!l->bound[0])
		return moe_fail(MOE_ERR_STATE, "no LoRA is bound: call moe_experts_bind_lora first");
	MOE_TRY(moe_engine_reserve_scratch(l->engine, moe_exchange_scratch(&l->layer)));
	MOE_TRY(moe_submit_begin(l->engine));
	st = moe_window_submit_exchange(&c, l, MOE_TAKE, true, false);
	moe_submit_end(l->engine);
	l->values++;
	if (st != MOE_OK)
		moe_ticket_drain(l->ticket);
	return st;
}

static enum moe_status update_base(struct moe_expert_layer *l)
{
	struct moe_context c = moe_experts_context(l, l->ticket, MOE_PHASE_UPDATE, 0);
	struct moe_repack_args a = { 0 };
	enum moe_status st;

	if (!l->loaded)
		return moe_fail(MOE_ERR_STATE, "layer %d has no weights: load them first",
				l->params.layer);
	if (!l->params.train_base)
		return MOE_OK;
	if (!l->bound[MOE_BOUND_LORA])
		return moe_fail(MOE_ERR_STATE,
				"no base parameters are bound: call moe_experts_bind_base first");
	for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
		a.source[i] = l->source + i * l->layer.E;
	a.dtype = l->bound[MOE_BOUND_LORA]->param.dtype;
	MOE_TRY(moe_submit_begin(l->engine));
	st = moe_graph_moe_take_base(&c, &l->layer, &l->tensors, &a);
	moe_submit_end(l->engine);
	l->version++;
	l->values++;
	if (st != MOE_OK)
		moe_ticket_drain(l->ticket);
	return st;
}

static enum moe_status changed(struct moe_expert_layer *l, enum moe_status (*fn)(struct moe_expert_layer *),
			       bool wait)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = wait ? moe_engine_check_running(l->engine) : MOE_OK;
	if (st == MOE_OK)
		st = fn(l);
	if (st == MOE_OK && wait) {
		st = moe_ticket_wait(l->ticket);
		if (st != MOE_OK) /* held meanwhile */
			moe_ticket_drain(l->ticket);
	}
	moe_experts_leave(l);
	return st;
}

enum moe_status moe_experts_update_lora(struct moe_expert_layer *l)
{
	return changed(l, update_lora, true);
}

enum moe_status moe_experts_update_lora_async(struct moe_expert_layer *l)
{
	return changed(l, update_lora, false);
}

enum moe_status moe_experts_update_base(struct moe_expert_layer *l)
{
	return changed(l, update_base, true);
}

enum moe_status moe_experts_update_base_async(struct moe_expert_layer *l)
{
	return changed(l, update_base, false);
}

static enum moe_status bind_lora(struct moe_expert_layer *l, struct moe_gradient *six)
{
	enum moe_status st;

	MOE_TRY(moe_engine_check_running(l->engine));
	MOE_TRY(check_binding(l, six, MOE_BOUND_LORA, 0, MOE_BLOCK_GATE_LORA_A));
	take_binding(l, six, MOE_BOUND_LORA, 0);
	st = update_lora(l);
	if (st == MOE_OK)
		st = moe_ticket_wait(l->ticket);
	if (st != MOE_OK)
		unbind(l, MOE_BOUND_LORA, 0);
	else
		l->lora_ready = true;
	return st;
}

enum moe_status moe_experts_bind_lora(struct moe_expert_layer *l, struct moe_gradient six[6])
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = bind_lora(l, six);
	moe_experts_leave(l);
	return st;
}

static enum moe_status bind_base(struct moe_expert_layer *l, struct moe_gradient *three)
{
	size_t E = (size_t)l->layer.E, bytes;

	if (!l->params.train_base)
		return moe_fail(MOE_ERR_STATE, "base weights are frozen: create with train_base");
	if (!l->loaded)
		return moe_fail(MOE_ERR_STATE, "load the weights before binding them: the map comes then");
	MOE_TRY(check_binding(l, three, MOE_EXPERT_MATRICES, MOE_BOUND_LORA, MOE_BLOCK_GATE_PROJ));
	for (int i = 1; i < MOE_EXPERT_MATRICES; i++)
		if (three[i].param.dtype != three[0].param.dtype)
			return moe_fail(MOE_ERR_ARG, "base parameters are %s and %s; they must be alike",
					moe_dtype_name(three[0].param.dtype),
					moe_dtype_name(three[i].param.dtype));
	l->source = moe_calloc(E * MOE_EXPERT_MATRICES, sizeof *l->source);
	if (!l->source)
		return moe_fail(MOE_ERR_NOMEM, "no memory for base parameters");
	bytes = (size_t)l->layer.I * (size_t)l->layer.H * moe_dtype_size(three[0].param.dtype);
	for (size_t i = 0; i < MOE_EXPERT_MATRICES * E; i++) {
		size_t e = i % E, row = l->map ? (size_t)l->map[e] : e;

		l->source[i] = (const char *)three[i / E].param.data + row * bytes;
	}
	take_binding(l, three, MOE_EXPERT_MATRICES, MOE_BOUND_LORA);
	return MOE_OK;
}

enum moe_status moe_experts_bind_base(struct moe_expert_layer *l, struct moe_gradient three[3])
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = bind_base(l, three);
	moe_experts_leave(l);
	return st;
}

/* ---- moesaic's AdamW ---- */

static bool has_buffers(const struct moe_expert_layer *l)
{
	return (l->bound[0] && l->buffer[0].data) ||
	       (l->bound[MOE_BOUND_LORA] && l->buffer[MOE_BOUND_LORA].data);
}

bool moe_window_takes_several(const struct moe_expert_layer *l)
{
	return l->params.micro_batches > 1 && !has_buffers(l);
}

enum moe_status moe_window_check_update(struct moe_expert_layer *l)
{
	enum moe_window window;

	if (!trains(l))
		return moe_fail(MOE_ERR_STATE, "nothing is trained here: no LoRA, no train_base");
	if (l->pending.pass && (has_buffers(l) || l->pending.taken))
		return moe_fail(MOE_ERR_STATE, "a backward is pending: call moe_experts_wait first");
	if (l->pending.pass)
		return MOE_OK;
	MOE_TRY(moe_window_state(l, &window));
	return window == MOE_WINDOW_OPEN
		       ? MOE_OK
		       : moe_fail(MOE_ERR_STATE, "update needs a backward since the last update");
}

enum moe_status moe_window_submit_update(struct moe_expert_layer *l, struct moe_ticket *ticket,
					 const struct moe_optimizer_step *step)
{
	struct moe_context c = moe_experts_context(l, ticket, MOE_PHASE_UPDATE, 0);
	struct moe_optimizer_step o = *step;

	o.adamw.grad_scale = l->window_scale;
	if (l->layer.r)
		MOE_TRY(moe_graph_moe_update(&c, &l->layer, &l->tensors, &o));
	if (l->params.train_base)
		MOE_TRY(moe_graph_moe_update_base(&c, &l->layer, &l->tensors, &o));
	return moe_window_submit_exchange(&c, l, MOE_GIVE, true, true);
}

void moe_window_updated(struct moe_expert_layer *l, int64_t step)
{
	struct moe_pending pending = l->pending;

	l->version += l->params.train_base;
	l->values++;
	moe_window_close(l);
	if (pending.pass) { /* wait has nothing to publish then */
		l->pending = pending;
		l->pending.taken = true;
	}
	l->steps = step;
	l->micro = 0;
}

static enum moe_status update(struct moe_expert_layer *l, const struct moe_adamw_params *p)
{
	struct moe_optimizer_step o = { .adamw = moe_adamw_of(p, l->steps) };
	enum moe_status st;

	MOE_TRY(moe_window_check_update(l));
	moe_experts_touch_moments(l);
	MOE_TRY(moe_submit_begin(l->engine));
	st = moe_window_submit_update(l, l->ticket, &o);
	moe_submit_end(l->engine);
	moe_window_updated(l, o.adamw.step);
	if (st == MOE_OK)
		return MOE_OK;
	moe_ticket_drain(l->ticket);
	return moe_fail_in(st, "the update was applied in part");
}

enum moe_status moe_experts_update(struct moe_expert_layer *l, const struct moe_adamw_params *params)
{
	enum moe_status st;

	MOE_TRY(moe_check_adamw(params));
	MOE_TRY(moe_experts_enter(l));
	st = update(l, params);
	moe_experts_leave(l);
	return st;
}
