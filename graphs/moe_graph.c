/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward of one MoE layer: what is submitted, in which order. Its update: moe_update.c. */
#include "graphs/moe_graph.h"

/* Chunks s of n slices over `chunks` chunks: a run of whole chunks, possibly empty. */
static void slice_range(int chunks, int n, int s, int *c0, int *c1)
{
	*c0 = (int)((int64_t)chunks * s / n);
	*c1 = (int)((int64_t)chunks * (s + 1) / n);
}

static struct moe_token_args token_args(const struct moe_moe_pass *p, int block, int T)
{
	return (struct moe_token_args){
		.layer = p->layer,
		.state = p->state,
		.ffn = p->ffn,
		.ffn_state = p->ffn_state,
		.drop = p->drop,
		.t0 = moe_block_begin(block),
		.t1 = moe_block_end(block, T),
		.result = p->result,
		.share = p->share > 0 ? p->share : 1,
	};
}

static enum moe_status submit_route(const struct moe_context *c, struct moe_moe_pass *p,
				    struct moe_stream *x)
{
	struct moe_slot_tensors *s = p->st;
	struct moe_token_args all = token_args(p, 0, x->T);
	bool routed = p->layer->router != NULL;

	if (!routed) /* ids and weights are the caller's */
		MOE_TRY(moe_join_submit(c, &s->x, x->block, x->n_blocks, NULL));
	else {
		/* logits, ids and weights of the last pass must be out of use */
		MOE_TRY(moe_task_join(c, NULL, 0, p->plan, NULL));
		for (int b = 0; b < x->n_blocks; b++) {
			struct moe_token_args a = token_args(p, b, x->T);

			MOE_TRY(moe_task_route(c, &a, b, x->block[b], p->lt->router, p->plan,
					       s->route[b]));
		}
		MOE_TRY(moe_join_submit(c, &s->x, s->route, x->n_blocks, NULL));
	}
	all.t1 = x->T;
	return moe_task_plan(c, &all, &s->x.out, 1, s->scratch, p->plan);
}

/* Of trained weights, else NULL. */
static struct moe_tensor *weights_of(const struct moe_moe_pass *p, int i)
{
	return p->lt->weights ? p->lt->weights[i] : NULL;
}

/* x through gate and up of (part, group) i. after: see moe_task_gather. */
static enum moe_status submit_gate_up(const struct moe_context *c, struct moe_moe_pass *p, int i,
				      struct moe_tensor *after)
{
	const struct moe_experts *l = p->layer;
	struct moe_slot_tensors *s = p->st;
	int ni = s->cut.slices_i;
	struct moe_expert_args a = { .layer = l,
				     .state = p->state,
				     .part = i / l->G,
				     .group = i % l->G,
				     .head = ni == 1 };
	struct moe_tensor *lora_h = p->lt->lora_h[a.group], *in = p->plan;

	if (!a.head) {
		MOE_TRY(moe_task_gather(c, &a, p->plan, after, lora_h, s->panel[i]));
		in = s->panel[i];
		after = NULL;
	}
	for (int j = 0; j < ni; j++) {
		slice_range(moe_chunks(l->part[a.part].I), ni, j, &a.c0, &a.c1);
		MOE_TRY(moe_task_gate_up(c, &a, j, in, after, weights_of(p, i), p->lt->lora_i[i],
					 lora_h, s->up[i * ni + j]));
	}
	return MOE_OK;
}

/* gate_up and down of every (part, group) */
static enum moe_status submit_experts(const struct moe_context *c, struct moe_moe_pass *p)
{
	const struct moe_experts *l = p->layer;
	struct moe_slot_tensors *s = p->st;
	int ni = s->cut.slices_i, nh = s->cut.slices_h;

	for (int i = 0; i < l->P * l->G; i++) {
		struct moe_expert_args a = {
			.layer = l, .state = p->state, .part = i / l->G, .group = i % l->G
		};

		MOE_TRY(submit_gate_up(c, p, i, NULL));
		a.last = a.group >= l->G - s->cut.last_groups;
		for (int j = 0; j < nh; j++) {
			slice_range(moe_chunks(l->H), nh, j, &a.c0, &a.c1);
			MOE_TRY(moe_task_down(c, &a, j, s->up + i * ni, ni, weights_of(p, i),
					      p->lt->lora_h[a.group], s->rows[i * nh + j]));
		}
	}
	return moe_join_submit(c, &s->y, s->rows, l->P * l->G * nh, s->scratch);
}

/*
 * Sum over slots of the rows, per part and column block; *out is what combine reads then. One part:
 * combine sums the rows of its tokens itself.
 */
static enum moe_status submit_combine_parts(const struct moe_context *c, struct moe_moe_pass *p,
					    struct moe_tensor *rows, bool weighted,
					    struct moe_join *join, struct moe_tensor **out)
{
	const struct moe_experts *l = p->layer;
	struct moe_slot_tensors *s = p->st;
	int n = s->cut.combine_blocks;

	*out = l->P > 1 ? join->out : rows;
	if (l->P == 1)
		return MOE_OK;
	for (int i = 0; i < l->P * n; i++) {
		struct moe_token_args a = {
			.layer = l, .state = p->state, .part = i / n, .weighted = weighted
		};

		slice_range(moe_chunks(l->H), n, i % n, &a.c0, &a.c1);
		MOE_TRY(moe_task_combine_part(c, &a, i % n, rows, p->plan, s->scratch, s->part[i]));
	}
	return moe_join_submit(c, join, s->part, l->P * n, NULL);
}

static enum moe_status submit_shared(const struct moe_context *c, struct moe_moe_pass *p,
				     struct moe_stream *x)
{
	for (int b = 0; p->ffn && b < x->n_blocks; b++) {
		struct moe_token_args a = token_args(p, b, x->T);

		a.out = p->st->shared.data;
		MOE_TRY(moe_task_ffn_up(c, &a, b, x->block[b], p->ffn_lora, p->st->ffn[b]));
		MOE_TRY(moe_task_ffn_down(c, &a, b, p->st->ffn[b], p->ffn_lora, NULL, NULL,
					  p->st->shared.block[b]));
	}
	return MOE_OK;
}

enum moe_status moe_graph_moe_forward(const struct moe_context *c, struct moe_moe_pass *p,
				      struct moe_stream *x, struct moe_stream *residual,
				      struct moe_stream *out)
{
	struct moe_slot_tensors *s = p->st;
	struct moe_tensor *sums;

	/* written only where it changes: tasks of the last pass may still read it */
	if (p->state->x != x->data)
		p->state->x = x->data;
	if (p->ffn) {
		if (p->ffn_state->x != x->data)
			p->ffn_state->x = x->data;
		moe_stream_resize(&s->shared, x->T);
	}
	MOE_TRY(submit_route(c, p, x));
	MOE_TRY(submit_shared(c, p, x));
	MOE_TRY(submit_experts(c, p));
	MOE_TRY(submit_combine_parts(c, p, s->y.out, true, &s->parts, &sums));
	for (int b = 0; b < x->n_blocks; b++) {
		struct moe_token_args a = token_args(p, b, x->T);

		a.weighted = true;
		a.residual = residual ? residual->data : NULL;
		a.shared = p->ffn ? s->shared.data : NULL;
		a.out = out->data;
		MOE_TRY(moe_task_combine(c, &a, b, sums, p->layer->P == 1 ? p->plan : NULL,
					 p->ffn ? s->shared.block[b] : NULL,
					 residual ? residual->block[b] : NULL, s->scratch,
					 out->users, out->block[b]));
	}
	return MOE_OK;
}

void moe_pass_set_copies(struct moe_moe_pass *p, const struct moe_backward_ring *ring, int index)
{
	p->copy = p->layer->transposed;
	p->copies = NULL;
	if (!ring->n)
		return;
	p->copy = &ring->copy[index % ring->n];
	p->copies = ring->tensor + index % ring->n * ring->groups;
	p->copy_layers = ring->n;
}

/* The ring's entry: it waits only for its last readers, n layers before. */
static enum moe_status submit_repack(const struct moe_context *c, struct moe_moe_pass *p)
{
	const struct moe_experts *l = p->layer;

	for (int i = 0; p->copies && !p->copies_ready && i < l->P * l->G; i++) {
		struct moe_expert_args a = { .layer = l,
					     .state = p->state,
					     .part = i / l->G,
					     .group = i % l->G,
					     .copy = p->copy };

		MOE_TRY(moe_task_repack_bwd(c, &a, p->copy_layers, p->plan, weights_of(p, i),
					    p->copies[i]));
	}
	return MOE_OK;
}

enum moe_status moe_graph_moe_repack_bwd(const struct moe_context *c, const struct moe_experts *l,
					 struct moe_layer_tensors *lt,
					 const struct moe_backward_ring *ring, int index)
{
	for (int i = 0; i < l->P * l->G; i++) {
		struct moe_expert_args a = { .layer = l,
					     .part = i / l->G,
					     .group = i % l->G,
					     .copy = &ring->copy[index % ring->n] };

		MOE_TRY(moe_task_repack_bwd(c, &a, ring->n, NULL, lt->weights ? lt->weights[i] : NULL,
					    ring->tensor[index % ring->n * ring->groups + i]));
	}
	return MOE_OK;
}

/* down_bwd, gate_up_bwd and the gradients of every (part, group) */
static enum moe_status submit_experts_bwd(const struct moe_context *c, struct moe_moe_pass *p,
					  bool first)
{
	const struct moe_experts *l = p->layer;
	struct moe_slot_tensors *s = p->st;
	struct moe_tensor *grad_out = s->grad_out[p->ring].out;
	int ni = s->cut.slices_i, nh = s->cut.slices_h;

	for (int i = 0; i < l->P * l->G; i++) {
		struct moe_expert_args a = { .layer = l,
					     .state = p->state,
					     .part = i / l->G,
					     .group = i % l->G,
					     .head = ni == 1,
					     .first = first,
					     .copy = p->copy };
		struct moe_tensor *lora_h = p->lt->lora_h[a.group], *in = grad_out;
		struct moe_tensor *copy = p->copies ? p->copies[i] : weights_of(p, i);
		struct moe_tensor **db = s->down_bwd[p->ring] + i * ni;

		if (l->recompute)
			MOE_TRY(submit_gate_up(c, p, i, grad_out));
		if (!a.head) {
			MOE_TRY(moe_task_scatter(c, &a, grad_out, p->plan, lora_h, s->panel[i]));
			in = s->panel[i];
		}
		for (int j = 0; j < ni; j++) {
			slice_range(moe_chunks(l->part[a.part].I), ni, j, &a.c0, &a.c1);
			MOE_TRY(moe_task_down_bwd(c, &a, j, in, p->plan,
						  l->recompute ? s->up[i * ni + j] : NULL, copy,
						  p->lt->lora_i[i], lora_h,
						  p->has_grads ? p->lt->grad_i[i * ni + j] : NULL,
						  db[j]));
		}
		for (int j = 0; j < nh; j++) {
			slice_range(moe_chunks(l->H), nh, j, &a.c0, &a.c1);
			MOE_TRY(moe_task_gate_up_bwd(c, &a, j, db, ni, copy, lora_h,
						     s->rows[i * nh + j]));
		}
	}
	return moe_join_submit(c, &s->grad_rows, s->rows, l->P * l->G * nh, s->scratch);
}

/* The H side: groups of one owner (every P-th), cut.lora_groups at a time. */
static enum moe_status submit_lora_grads(const struct moe_context *c, struct moe_moe_pass *p, struct moe_stream *x,
					 bool first)
{
	const struct moe_experts *l = p->layer;
	struct moe_slot_tensors *s = p->st;
	int ni = s->cut.slices_i, most = s->cut.lora_groups;

	for (int g = 0; p->has_grads && g < l->G; g++) {
		struct moe_expert_args a = { .layer = l,
					     .state = p->state,
					     .group = g,
					     .first = first,
					     .part = moe_group_owner(l, g) };
		struct moe_tensor *in[MOE_MAX_TASK_HANDLES], *grads[MOE_MAX_TASK_HANDLES];
		int n = 0;

		if (g / l->P % most)
			continue; /* in an earlier one's task */
		for (int i = g; a.groups < most && i < l->G; i += l->P, a.groups++) {
			for (int part = 0; part < l->P; part++, n += ni)
				memcpy(in + n, s->down_bwd[p->ring] + (part * l->G + i) * ni,
				       (size_t)ni * sizeof *in);
			grads[a.groups] = p->lt->grad_h[i];
		}
		MOE_TRY(moe_task_lora_grad(c, &a, in, n, p->plan, x->users, s->grad_out[p->ring].out, grads));
	}
	return MOE_OK;
}

/* Off the critical path: submitted last, lowest priority. */
static enum moe_status submit_expert_grads(const struct moe_context *c, struct moe_moe_pass *p,
					   struct moe_stream *x, bool first)
{
	const struct moe_experts *l = p->layer;
	struct moe_slot_tensors *s = p->st;
	int ni = s->cut.slices_i;

	MOE_TRY(submit_lora_grads(c, p, x, first));
	/* A matrix at a time: its update, which comes next after the last micro-batch, finds the gradient in L3. */
	for (int i = 0; p->lt->grad_base && i < l->P * l->G * MOE_EXPERT_MATRICES; i++) {
		int group = i / MOE_EXPERT_MATRICES;
		struct moe_expert_args a = { .layer = l,
					     .state = p->state,
					     .part = group / l->G,
					     .group = group % l->G,
					     .first = first,
					     .matrix = (enum moe_expert_matrix)(i % MOE_EXPERT_MATRICES),
					     .copy = p->copy };
		/* grad_out is read here too */
		struct moe_tensor *in[MOE_MAX_TASK_HANDLES] = { s->grad_out[p->ring].out };

		memcpy(in + 1, s->down_bwd[p->ring] + group * ni,
		       (size_t)ni * sizeof(struct moe_tensor *));
		MOE_TRY(moe_task_weight_grad(c, &a, in, ni + 1, p->plan, x->users,
					     p->lt->grad_base[i]));
	}
	return MOE_OK;
}

static enum moe_status submit_shared_bwd(const struct moe_context *c, struct moe_moe_pass *p, struct moe_stream *x,
					 struct moe_stream *grad_out, bool first)
{
	struct moe_slot_tensors *s = p->st;
	struct moe_tensor *in[3];
	struct moe_tensor_list list = { in, 3 };

	for (int b = 0; p->ffn && b < grad_out->n_blocks; b++) {
		struct moe_token_args a = token_args(p, b, grad_out->T);

		a.residual = grad_out->data;
		a.out = s->shared.data;
		MOE_TRY(moe_task_ffn_bwd(c, &a, b, s->ffn[b], s->grad_out[p->ring].out, p->ffn_lora,
					 s->scratch, NULL, s->shared.block[b]));
	}
	if (!p->ffn || !p->ffn_trained)
		return MOE_OK;
	MOE_TRY(moe_join_submit(c, &s->shared_all, s->shared.block, grad_out->n_blocks, NULL));
	in[0] = s->shared_all.out;
	in[1] = s->grad_out[p->ring].out; /* read here too */
	in[2] = x->users;		  /* what the forward left */
	return moe_trained_ffn_grads(c, p->ffn, p->ffn_state, grad_out->data, grad_out->T, first, &list,
				     p->ffn_trained);
}

static enum moe_status submit_route_bwd(const struct moe_context *c, struct moe_moe_pass *p, struct moe_stream *x,
					struct moe_stream *grad_out, bool first)
{
	struct moe_slot_tensors *s = p->st;
	struct moe_token_args all = token_args(p, 0, grad_out->T);

	for (int b = 0; b < grad_out->n_blocks; b++) {
		struct moe_token_args a = token_args(p, b, grad_out->T);

		MOE_TRY(moe_task_route_bwd(c, &a, b, s->grad_rows.out, p->plan, s->scratch,
					   s->route_bwd[b]));
	}
	if (!p->lt->grad_router)
		return MOE_OK;
	all.t1 = grad_out->T;
	all.first = first;
	MOE_TRY(moe_join_submit(c, &s->route_all, s->route_bwd, grad_out->n_blocks, NULL));
	return moe_task_router_grad(c, &all, s->route_all.out, p->plan, s->grad_out[p->ring].out, x->users,
				    p->lt->grad_router);
}

enum moe_status moe_graph_moe_backward(const struct moe_context *c, struct moe_moe_pass *p,
				       struct moe_stream *x, struct moe_stream *grad_out,
				       const struct moe_norm_bwd *norm, struct moe_stream *residual,
				       bool first, struct moe_stream *grad_x)
{
	struct moe_slot_tensors *s = p->st;
	struct moe_tensor *sums;

	if (p->state->grad_out != grad_out->data)
		p->state->grad_out = grad_out->data;
	if (p->again) /* what follows is ordered by scratch */
		MOE_TRY(moe_task_join(c, &p->again, 1, s->scratch, NULL));
	MOE_TRY(moe_join_submit(c, &s->grad_out[p->ring], grad_out->block, grad_out->n_blocks,
				s->scratch));
	MOE_TRY(submit_repack(c, p));
	MOE_TRY(submit_shared_bwd(c, p, x, grad_out, first));
	MOE_TRY(submit_experts_bwd(c, p, first));
	MOE_TRY(submit_route_bwd(c, p, x, grad_out, first));
	MOE_TRY(submit_combine_parts(c, p, s->grad_rows.out, false, &s->grad_parts, &sums));
	for (int b = 0; b < grad_out->n_blocks; b++) {
		struct moe_token_args a = token_args(p, b, grad_out->T);

		a.shared = p->ffn ? s->shared.data : NULL;
		a.norm = *norm;
		a.out = grad_x->data;
		MOE_TRY(moe_task_combine_bwd(c, &a, b, sums, p->layer->P == 1 ? p->plan : NULL,
					     s->route_bwd[b], p->lt->router, p->ffn ? s->shared.block[b] : NULL,
					     residual ? residual->block[b] : NULL, s->scratch,
					     grad_x->users, grad_x->block[b]));
	}
	return submit_expert_grads(c, p, x, first);
}
