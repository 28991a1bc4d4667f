/* SPDX-License-Identifier: Apache-2.0 */
/* The public MoE block: checks, buffers that grow, and one pass at a time through graphs/moe_graph. */
#include "api/block.h"
#include "api/machine.h"
#include "api/pass.h"
#include "engine/available.h"

/* Before what is submitted later, above any distance within a layer's tasks. */
#define BACKWARD_PRIORITY 100

static enum moe_status check_params(const struct moe_block_params *p)
{
	int widest;

	if (!p || p->struct_size < sizeof *p)
		return moe_fail(MOE_ERR_ARG, "block params: struct_size is not set");
	if (p->hidden < 1 || p->intermediate < 1 || p->experts < 1)
		return moe_fail(MOE_ERR_ARG, "block of hidden %d, intermediate %d, %d experts; positive sizes are possible",
				p->hidden, p->intermediate, p->experts);
	if (p->experts > MOE_MAX_EXPERTS)
		return moe_fail(MOE_ERR_ARG, "%d experts; at most %d are possible", p->experts,
				MOE_MAX_EXPERTS);
	if (p->experts_per_token < 1 || p->experts_per_token > MOE_MAX_EXPERTS)
		return moe_fail(MOE_ERR_ARG, "experts_per_token is %d; 1 to %d are possible",
				p->experts_per_token, MOE_MAX_EXPERTS);
	if (p->lora_rank < 0 || p->shared_intermediate < 0 || p->expected_tokens < 0 ||
	    p->group_size < 0 || p->slices_i < 0 || p->slices_h < 0)
		return moe_fail(MOE_ERR_ARG,
				"block params: lora_rank %d, shared_intermediate %d, expected_tokens %d, group_size %d, slices %d and %d; "
				"none may be negative",
				p->lora_rank, p->shared_intermediate, p->expected_tokens, p->group_size, p->slices_i, p->slices_h);
	widest = MOE_MAX(MOE_MAX(p->lora_rank, p->shared_intermediate), p->hidden);
	if (24.0 * p->experts * p->intermediate * p->hidden > MOE_MAX_BYTES ||
	    24.0 * p->experts * MOE_MAX(p->intermediate, p->hidden) * p->lora_rank > MOE_MAX_BYTES ||
	    24.0 * widest * p->hidden > MOE_MAX_BYTES)
		return moe_fail(
			MOE_ERR_NOFIT,
			"a block of %d experts, hidden %d, intermediate %d, shared %d, rank %d "
			"is too large",
			p->experts, p->hidden, p->intermediate, p->shared_intermediate,
			p->lora_rank);
	if ((unsigned)p->activations > MOE_ACTIVATIONS_RECOMPUTE)
		return moe_fail(MOE_ERR_ARG, "activations is %d; 0 (retain) and 1 (recompute) are possible",
				(int)p->activations);
	if (moe_dtype_size(p->weight_dtype) < 2 || p->weight_dtype > MOE_F64)
		return moe_fail(MOE_ERR_ARG, "weight_dtype %s is not a float type",
				moe_dtype_name(p->weight_dtype));
	if (p->router && !moe_router_find(p->router))
		return moe_fail(MOE_ERR_ARG, "unknown router \"%s\"", p->router);
	MOE_TRY(moe_check_glu(p->swiglu_limit, p->swiglu_alpha, p->swiglu_shift));
	return moe_block_check_format(p);
}

/* Shared experts: gradients, and where the base is trained, what that takes. */
static enum moe_status train_ffn(struct moe_block *b)
{
	struct moe_ffn_training t = { .update = b->params.train_base,
				      .slice_elements = MOE_SLICE_ELEMENTS,
				      .part = -1 };

	MOE_TRY(moe_ffn_train(b->engine, &b->ffn, &t));
	MOE_TRY(moe_tensors_create(b->engine, "shared", MOE_FFN_MATRICES, true, &b->ffn_ready));
	for (int i = 0; i < MOE_FFN_MATRICES; i++)
		MOE_TRY(moe_trained_tensors_create(b->engine, &b->ffn.trained[i], b->ffn_ready[i],
						   &b->ffn_trained[i]));
	return MOE_OK;
}

static enum moe_status alloc_layer(struct moe_block *b)
{
	const struct moe_block_params *p = &b->params;
	int tokens = p->expected_tokens ? p->expected_tokens : MOE_DEFAULT_TOKENS;
	struct moe_experts_shape s = {
		.E = p->experts,
		.k = p->experts_per_token,
		.H = p->hidden,
		.I = p->intermediate,
		.r = p->lora_rank,
		.group_size = moe_block_group_size(b, tokens),
		.scale = p->lora_rank ? p->lora_alpha / (float)p->lora_rank : 0,
		.glu = moe_glu_of(p->swiglu_limit, p->swiglu_alpha, p->swiglu_shift),
		.share_a = p->lora_share_a,
		.trainable = p->lora_rank > 0,
		.base_grads = p->base_gradients,
		.train_base = p->train_base,
		.recompute = p->activations == MOE_ACTIVATIONS_RECOMPUTE,
		.coded_later = p->weight_format != NULL,
	};

	MOE_TRY(moe_block_choose_backward(b, tokens));
	s.backward = b->backward.mode;
	if (p->router) {
		b->layer.router = moe_router_find(p->router);
		b->layer.router_config =
			(struct moe_router_config){ p->experts, p->experts_per_token,
						    p->router_normalise };
		b->layer.aux_coef = p->aux_loss_coef;
		b->layer.z_coef = p->z_loss_coef;
		MOE_TRY(b->layer.router->check(&b->layer.router_config));
	}
	MOE_TRY(moe_experts_alloc(b->engine, &s, p->weight_dtype, &b->layer));
	if (s.backward == MOE_BACKWARD_SHARED)
		MOE_TRY(moe_backward_ring_create(b->engine, &b->layer, p->weight_dtype, 1, &b->ring));
	if (p->shared_intermediate)
		MOE_TRY(moe_ffn_alloc(b->engine, p->hidden, p->shared_intermediate, p->weight_dtype,
				      p->shared_sigmoid, &b->ffn));
	b->ffn.glu = s.glu;
	if (p->shared_intermediate && p->base_gradients)
		MOE_TRY(train_ffn(b));
	b->cut = moe_cut_choose(&b->layer, tokens, moe_engine_workers(b->engine), p->slices_i,
				p->slices_h);
	return moe_layer_tensors_create(b->engine, &b->layer, b->cut.slices_i, p->base_gradients,
					&b->layer_tensors);
}

enum moe_status moe_block_create(struct moe_engine *engine, const struct moe_block_params *params,
				 struct moe_block **out)
{
	struct moe_block *b;
	enum moe_status st;

	if (!out)
		return moe_fail(MOE_ERR_ARG, "out is NULL");
	*out = NULL;
	MOE_TRY(moe_engine_check(engine));
	MOE_TRY(check_params(params));
	MOE_TRY(moe_machine_use(engine));
	b = moe_calloc(1, sizeof *b);
	if (!b)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a block");
	b->engine = engine;
	b->params = *params;
	if (params->train_base) { /* masters are F32, and so is what is packed from them */
		b->params.base_gradients = 1;
		b->params.weight_dtype = MOE_F32;
	}
	b->capacity = b->tokens = -1;
	b->params.router = params->router ? moe_router_find(params->router)->name : NULL;
	if (params->weight_format)
		b->params.weight_format = moe_format_find(params->weight_format)->name;
	MOE_TRY_GOTO(moe_ticket_create(engine, &b->ticket), st, fail);
	MOE_TRY_GOTO(alloc_layer(b), st, fail);
	MOE_TRY_GOTO(moe_memory_check(engine, "block"), st, fail);
	for (int moments = 0; moments < 2; moments++) /* a block has no optimizer but moesaic's */
		moe_experts_touch(engine, &b->layer, &b->ffn, moments, &b->touched);
	*out = b;
	return MOE_OK;
fail:
	moe_block_destroy(b);
	return st;
}

static void free_buffers(struct moe_block *b)
{
	struct moe_engine *e = b->engine;

	if (b->capacity < 0)
		return;
	moe_slot_tensors_destroy(e, &b->slot);
	moe_tensor_destroy(b->plan);
	b->plan = NULL;
	for (int i = 0; i < MOE_BLOCK_STREAMS; i++)
		moe_stream_destroy(e, &b->stream[i]);
	moe_experts_state_free(e, &b->state, b->layer.P);
	moe_experts_scratch_free(e, &b->scratch, b->layer.P);
	moe_ffn_state_free(e, &b->ffn_state);
	b->capacity = b->tokens = -1;
}

void moe_block_destroy(struct moe_block *b)
{
	if (!b)
		return;
	if (b->ticket && moe_engine_check(b->engine) == MOE_OK) {
		if (moe_engine_check_not_task("destroying a block") != MOE_OK)
			return; /* it would wait for itself */
		moe_ticket_drain(b->ticket);
		free_buffers(b);
		moe_layer_tensors_destroy(&b->layer_tensors);
		moe_backward_ring_destroy(b->engine, &b->ring);
		if (b->params.weight_format)
			moe_experts_drop_matrices(b->engine, &b->layer);
		moe_experts_free(b->engine, &b->layer);
		for (int i = 0; i < MOE_FFN_MATRICES; i++)
			moe_trained_tensors_destroy(&b->ffn_trained[i]);
		moe_tensors_destroy(b->ffn_ready, MOE_FFN_MATRICES);
		moe_ffn_free(b->engine, &b->ffn);
		moe_ticket_destroy(b->ticket);
	}
	moe_free(b);
}

static size_t ffn_scratch(const struct moe_ffn *f)
{
	size_t most = moe_ffn_scratch(f);

	for (int i = 0; f->trained && i < MOE_FFN_MATRICES; i++)
		most = MOE_MAX(most, moe_dense_grad_scratch(&f->trained[i]));
	return most;
}

static enum moe_status alloc_buffers(struct moe_block *b, int T)
{
	static const char *const names[MOE_BLOCK_STREAMS] = { "x", "out", "grad_out", "grad_x" };
	struct moe_engine *e = b->engine;
	int H = b->params.hidden;

	b->capacity = T;
	for (int i = 0; i < MOE_BLOCK_STREAMS; i++)
		MOE_TRY(moe_stream_create(e, names[i], T, H, &b->stream[i]));
	MOE_TRY(moe_experts_state_alloc(e, &b->layer, T, &b->state));
	MOE_TRY(moe_experts_scratch_alloc(e, &b->layer, T, true, &b->scratch));
	if (b->params.shared_intermediate)
		MOE_TRY(moe_ffn_state_alloc(e, &b->ffn, T, &b->ffn_state));
	MOE_TRY(moe_slot_tensors_create(e, b->layer.P, b->layer.G, T, H, &b->cut,
					b->params.shared_intermediate > 0, &b->slot));
	MOE_TRY(moe_memory_check(e, "buffers of a block's tokens"));
	MOE_TRY(moe_tensor_create(e, "plan", 0, -1, &b->plan));
	moe_tensor_set_initialised(b->plan);
	MOE_TRY(moe_engine_reserve_scratch(e, moe_experts_worker_scratch(&b->layer, T)));
	return b->params.shared_intermediate
		       ? moe_engine_reserve_scratch(e, ffn_scratch(&b->ffn))
		       : MOE_OK;
}

/* Buffers for T tokens; they only grow. */
static enum moe_status ensure_capacity(struct moe_block *b, int T)
{
	enum moe_status st;

	if (T <= b->capacity)
		return MOE_OK;
	MOE_TRY(moe_ticket_wait(b->ticket));
	free_buffers(b);
	b->saved = false;
	st = alloc_buffers(b, T);
	if (st != MOE_OK)
		free_buffers(b);
	return st;
}

enum moe_status moe_block_enter(struct moe_block *b)
{
	if (!b)
		return moe_fail(MOE_ERR_ARG, "block is NULL");
	MOE_TRY(moe_engine_check(b->engine));
	if (atomic_flag_test_and_set(&b->busy))
		return moe_fail(MOE_ERR_BUSY, "another thread is in this block");
	return MOE_OK;
}

void moe_block_leave(struct moe_block *b)
{
	atomic_flag_clear(&b->busy);
}

static enum moe_status check_forward(struct moe_block *b, const struct moe_array *x,
				     const struct moe_array *ids, const struct moe_array *weights,
				     const struct moe_array *out)
{
	MOE_TRY(moe_check_tokens(&b->layer, x, out));
	if (!b->layer.router)
		return moe_check_routing(&b->layer, x->shape[0], ids, weights);
	if (ids || weights)
		return moe_fail(MOE_ERR_ARG, "ids and weights are given, but the block has a router");
	return MOE_OK;
}

static struct moe_moe_pass pass_of(struct moe_block *b)
{
	struct moe_moe_pass p = {
		.layer = &b->layer,
		.state = &b->state,
		.ffn = b->params.shared_intermediate ? &b->ffn : NULL,
		.ffn_state = &b->ffn_state,
		.ffn_lora = b->ffn_ready,
		.ffn_trained = b->ffn_ready ? b->ffn_trained : NULL,
		.lt = &b->layer_tensors,
		.st = &b->slot,
		.plan = b->plan,
		.has_grads = b->layer.r > 0,
	};

	moe_pass_set_copies(&p, &b->ring, 0);
	return p;
}

/* Orders the loads of x after everything of earlier passes that reads it without naming its blocks. */
static enum moe_status begin_x(const struct moe_context *c, struct moe_block *b)
{
	struct moe_tensor *users = b->stream[MOE_BLOCK_X].users;

	if (b->layer.grad_router)
		MOE_TRY(moe_task_join(c, NULL, 0, b->plan, users));
	return moe_task_join(c, NULL, 0, b->slot.scratch, users);
}

static enum moe_status begin_grad_out(const struct moe_context *c, struct moe_block *b)
{
	return moe_task_join(c, NULL, 0, b->stream[MOE_BLOCK_GRAD_OUT].users,
			     b->slot.grad_out[0].out);
}

static struct moe_context context_of(struct moe_block *b, enum moe_phase phase, int priority)
{
	return (struct moe_context){ .engine = b->engine,
				     .ticket = b->ticket,
				     .layer = 0,
				     .step = (int)b->steps + 1,
				     .phase = phase,
				     .priority = priority };
}

static enum moe_status submit_forward(struct moe_block *b, const struct moe_array *x,
				      const struct moe_array *out)
{
	struct moe_context c = context_of(b, MOE_PHASE_FORWARD, 0);
	struct moe_moe_pass pass = pass_of(b);

	MOE_TRY(begin_x(&c, b));
	MOE_TRY(moe_submit_copy(&c, &b->stream[MOE_BLOCK_X], x, true, b->state.x16));
	MOE_TRY(moe_graph_moe_forward(&c, &pass, &b->stream[MOE_BLOCK_X], NULL,
				      &b->stream[MOE_BLOCK_OUT]));
	return moe_submit_copy(&c, &b->stream[MOE_BLOCK_OUT], out, false, NULL);
}

/* A graph that was submitted in part still uses the caller's buffers, which the error frees. */
static void undo_on_error(struct moe_block *b, enum moe_status st)
{
	if (st != MOE_OK)
		moe_ticket_drain(b->ticket);
}

/* Sync calls: refused while held, when nothing is submitted yet. */
static enum moe_status finish(struct moe_block *b, enum moe_status st)
{
	if (st != MOE_OK)
		return st;
	st = moe_ticket_wait(b->ticket);
	undo_on_error(b, st);
	return st;
}

static enum moe_status forward(struct moe_block *b, const struct moe_array *x,
			       const struct moe_array *ids, const struct moe_array *weights,
			       int save, const struct moe_array *out)
{
	enum moe_status st;
	int T;

	MOE_TRY(check_forward(b, x, ids, weights, out));
	MOE_TRY(moe_block_check_set(b));
	T = (int)x->shape[0];
	MOE_TRY(ensure_capacity(b, T));
	/* the last pass may still read ids and weights, and its late tasks the old T */
	if (!b->layer.router || b->tokens != T)
		MOE_TRY(moe_ticket_wait(b->ticket));
	if (b->tokens != T) {
		moe_experts_state_bind(&b->state, &b->layer, &b->scratch, 0, T);
		b->state.grad_out = b->stream[MOE_BLOCK_GRAD_OUT].data; /* while no task reads it */
	}
	b->tokens = T;
	if (!b->layer.router)
		moe_take_routing(&b->layer, &b->state.plan, ids, weights, T);
	for (int i = 0; i < MOE_BLOCK_STREAMS; i++)
		moe_stream_resize(&b->stream[i], T);
	b->saved = false;
	MOE_TRY(moe_submit_begin(b->engine));
	st = submit_forward(b, x, out);
	moe_submit_end(b->engine);
	undo_on_error(b, st);
	b->saved = st == MOE_OK && save;
	return st;
}

enum moe_status moe_block_forward_async(struct moe_block *b, const struct moe_array *x,
					const struct moe_array *ids,
					const struct moe_array *weights, int save,
					const struct moe_array *out)
{
	enum moe_status st;

	MOE_TRY(moe_block_enter(b));
	st = forward(b, x, ids, weights, save, out);
	moe_block_leave(b);
	return st;
}

enum moe_status moe_block_forward(struct moe_block *b, const struct moe_array *x,
				  const struct moe_array *ids, const struct moe_array *weights,
				  int save, const struct moe_array *out)
{
	enum moe_status st;

	MOE_TRY(moe_block_enter(b));
	st = moe_engine_check_running(b->engine);
	if (st == MOE_OK)
		st = finish(b, forward(b, x, ids, weights, save, out));
	moe_block_leave(b);
	return st;
}

static enum moe_status submit_backward(struct moe_block *b, const struct moe_array *grad_out,
				       const struct moe_array *grad_x,
				       const struct moe_array *grad_weights)
{
	struct moe_context c = context_of(b, MOE_PHASE_BACKWARD, BACKWARD_PRIORITY);
	struct moe_moe_pass pass = pass_of(b);
	struct moe_stream *gx = &b->stream[MOE_BLOCK_GRAD_X];
	struct moe_norm_bwd norm = { 0 };

	MOE_TRY(begin_grad_out(&c, b));
	MOE_TRY(moe_submit_copy(&c, &b->stream[MOE_BLOCK_GRAD_OUT], grad_out, true, NULL));
	MOE_TRY(moe_graph_moe_backward(&c, &pass, &b->stream[MOE_BLOCK_X],
				       &b->stream[MOE_BLOCK_GRAD_OUT], &norm, NULL, !b->grads_open,
				       gx));
	MOE_TRY(moe_submit_copy(&c, gx, grad_x, false, NULL));
	return grad_weights ? moe_submit_grad_weights(&c, &b->layer, &b->state.plan, &b->slot, gx->T,
						      grad_weights)
			    : MOE_OK;
}

static enum moe_status check_backward(struct moe_block *b, const struct moe_array *grad_out,
				      const struct moe_array *grad_x,
				      const struct moe_array *grad_weights)
{
	int T = b->tokens;

	if (!b->saved)
		return moe_fail(MOE_ERR_STATE, "backward needs a forward with save before it");
	MOE_TRY(moe_check_float_matrix("grad_out", grad_out, T, b->layer.H));
	MOE_TRY(moe_check_written_matrix("grad_x", grad_x, T, b->layer.H));
	return grad_weights ? moe_check_written_matrix("grad_weights", grad_weights, T, b->layer.k)
			    : MOE_OK;
}

static enum moe_status backward(struct moe_block *b, const struct moe_array *grad_out,
				const struct moe_array *grad_x,
				const struct moe_array *grad_weights)
{
	enum moe_status st;

	MOE_TRY(check_backward(b, grad_out, grad_x, grad_weights));
	MOE_TRY(moe_submit_begin(b->engine));
	st = submit_backward(b, grad_out, grad_x, grad_weights);
	moe_submit_end(b->engine);
	undo_on_error(b, st);
	b->saved = false;
	b->grads_open = st == MOE_OK; /* what was added in part is dropped */
	return st;
}

enum moe_status moe_block_backward_async(struct moe_block *b, const struct moe_array *grad_out,
					 const struct moe_array *grad_x,
					 const struct moe_array *grad_weights)
{
	enum moe_status st;

	MOE_TRY(moe_block_enter(b));
	st = backward(b, grad_out, grad_x, grad_weights);
	moe_block_leave(b);
	return st;
}

enum moe_status moe_block_backward(struct moe_block *b, const struct moe_array *grad_out,
				   const struct moe_array *grad_x,
				   const struct moe_array *grad_weights)
{
	enum moe_status st;

	MOE_TRY(moe_block_enter(b));
	st = moe_engine_check_running(b->engine);
	if (st == MOE_OK)
		st = finish(b, backward(b, grad_out, grad_x, grad_weights));
	moe_block_leave(b);
	return st;
}

static enum moe_status update(struct moe_block *b, const struct moe_adamw_params *p)
{
	struct moe_context c = context_of(b, MOE_PHASE_UPDATE, 0);
	struct moe_optimizer_step o = {
		.adamw = moe_adamw_of(p, b->steps),
	};
	enum moe_status st;

	if (!b->layer.r && !b->params.train_base)
		return moe_fail(MOE_ERR_STATE, "the block has nothing to update: no LoRA, no train_base");
	if (!b->grads_open)
		return moe_fail(MOE_ERR_STATE, "update needs a backward since the last update");
	MOE_TRY(moe_submit_begin(b->engine));
	st = b->layer.r ? moe_graph_moe_update(&c, &b->layer, &b->layer_tensors, &o) : MOE_OK;
	if (st == MOE_OK && b->params.train_base)
		st = moe_graph_moe_update_base(&c, &b->layer, &b->layer_tensors, &o);
	for (int i = 0; st == MOE_OK && i < MOE_FFN_MATRICES; i++)
		st = moe_trained_update(&c, &b->ffn_trained[i], &o.adamw, NULL, NULL);
	moe_submit_end(b->engine);
	undo_on_error(b, st);
	if (st != MOE_OK)
		moe_fail_in(st, "the update was applied in part");
	b->grads_open = false;
	b->steps = o.adamw.step;
	return st;
}

enum moe_status moe_block_update(struct moe_block *b, const struct moe_adamw_params *params)
{
	enum moe_status st;

	MOE_TRY(moe_check_adamw(params));
	MOE_TRY(moe_block_enter(b));
	st = update(b, params);
	moe_block_leave(b);
	return st;
}

enum moe_status moe_block_zero_gradients(struct moe_block *b)
{
	MOE_TRY(moe_block_enter(b));
	b->grads_open = false; /* the next backward overwrites */
	moe_block_leave(b);
	return MOE_OK;
}

enum moe_status moe_block_wait(struct moe_block *b)
{
	if (!b)
		return moe_fail(MOE_ERR_ARG, "block is NULL");
	return moe_ticket_wait(b->ticket);
}
