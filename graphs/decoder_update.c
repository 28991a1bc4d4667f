/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of a decoder, gradient norm and update. */
#include "graphs/decoder.h"

#include "codelets/router_lora.h"

static bool trains_experts(const struct moe_decoder_layer *l)
{
	return l->experts && l->experts->a_gu.grad;
}

static bool trains_base(const struct moe_decoder_layer *l)
{
	return l->experts && l->experts->part[0].base[MOE_GATE].m;
}

static bool trains_whole_router(const struct moe_decoder_layer *l)
{
	return l->experts && l->experts->router_param.m;
}

static bool trains_router(const struct moe_decoder_layer *l)
{
	return l->experts && l->experts->router_lora;
}

static bool trains_ffn(const struct moe_decoder_layer *l, int matrix)
{
	return l->ffn && moe_ffn_trains(l->ffn, matrix);
}

/* Places among the results of grad_norm: attention, MLP, experts, router. */
#define EXPERTS_NORM MOE_DENSE_TAGS
static int router_norm(const struct moe_decoder_layer *l)
{
	return EXPERTS_NORM + l->experts->P * l->experts->G;
}

/*
 * Results of grad_norm: expert parameters first, then two per router and dense matrix. Their handles
 * are shared by the layers, (part, group) by (part, group): the tasks are short, and 48 layers of
 * handles of their own would be a quarter of all handles.
 */
static void count_norms(const struct moe_decoder *d, struct moe_decoder_tensors *t)
{
	int64_t others = 0;

	for (int i = 0; i < d->n_layers; i++) {
		const struct moe_decoder_layer *l = &d->layers[i];

		if (trains_experts(l)) {
			t->n_norms = MOE_MAX(t->n_norms, router_norm(l));
			t->n_expert_squares +=
				(int64_t)MOE_SQUARES_PER_EXPERT(l->experts->P) * l->experts->E;
		}
		if (trains_base(l)) {
			t->n_norms = MOE_MAX(t->n_norms, router_norm(l));
			t->n_expert_squares += (int64_t)MOE_EXPERT_MATRICES * l->experts->P * l->experts->E;
		}
		if (trains_router(l) || trains_whole_router(l)) {
			t->n_norms = MOE_MAX(t->n_norms, router_norm(l) + 1);
			others += trains_router(l) ? 2 : 1;
		}
		for (int j = 0; j < MOE_ATTN_LINEARS; j++)
			if (moe_decoder_trains(l, j)) {
				t->n_norms = MOE_MAX(t->n_norms, (int)MOE_ATTN_LINEARS);
				others += 2;
			}
		for (int j = 0; j < MOE_FFN_MATRICES; j++)
			if (trains_ffn(l, j)) {
				t->n_norms = MOE_MAX(t->n_norms, EXPERTS_NORM);
				others += 2;
			}
	}
	t->full.first_norm = t->n_norms;
	if (t->full.n_squares)
		t->n_norms += (int)MOE_MIN(t->full.n_squares, (int64_t)MOE_FULL_NORMS);
	t->n_squares = t->n_expert_squares + others + t->full.n_squares;
}

enum moe_status moe_decoder_tensors_create(struct moe_engine *e, const struct moe_decoder *d,
					   const struct moe_cut *cut, struct moe_decoder_tensors *t)
{
	int n = d->n_layers * MOE_ATTN_LINEARS;
	enum moe_status st = MOE_OK;

	memset(t, 0, sizeof *t);
	t->n_layers = d->n_layers;
	t->lowest = moe_decoder_lowest(d);
	t->cut = *cut;
	t->full.n_squares = moe_full_slices(d);
	count_norms(d, t);
	t->moe = moe_calloc((size_t)d->n_layers, sizeof *t->moe);
	t->squares = moe_calloc((size_t)t->n_squares, sizeof *t->squares);
	t->ffn_lora = moe_calloc((size_t)d->n_layers, sizeof *t->ffn_lora);
	t->ffn_grad = moe_calloc((size_t)d->n_layers, sizeof *t->ffn_grad);
	if (!t->moe || !t->squares || !t->ffn_lora || !t->ffn_grad) {
		st = moe_fail(MOE_ERR_NOMEM, "no memory for a decoder's tensors");
		goto fail;
	}
	MOE_TRY_GOTO(moe_tensors_create(e, "lora", n, true, &t->lora), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "grad", n, false, &t->grad), st, fail);
	for (int i = 0; i < d->n_layers; i++)
		if (d->layers[i].experts)
			MOE_TRY_GOTO(moe_layer_tensors_create(e, d->layers[i].experts,
							      cut->slices_i, trains_base(&d->layers[i]),
							      &t->moe[i]),
				     st, fail);
	for (int i = 0; i < d->n_layers; i++)
		if (d->layers[i].ffn &&
		    (d->layers[i].ffn->trained || moe_ffn_adapted(d->layers[i].ffn))) {
			MOE_TRY_GOTO(moe_tensors_create(e, "ffn_lora", MOE_FFN_MATRICES, true,
							&t->ffn_lora[i]), st, fail);
			MOE_TRY_GOTO(moe_tensors_create(e, "ffn_grad", MOE_FFN_MATRICES, false,
							&t->ffn_grad[i]), st, fail);
		}
	MOE_TRY_GOTO(moe_full_tensors_create(e, d, t), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "norm", t->n_norms, false, &t->norm), st, fail);
	MOE_TRY_GOTO(moe_join_create(e, "norms", t->n_norms, &t->norm_all), st, fail);
	MOE_TRY_GOTO(moe_tensor_create(e, "norm", 0, -1, &t->norm_ready), st, fail);
	return MOE_OK;
fail:
	moe_decoder_tensors_destroy(e, t);
	return st;
}

void moe_decoder_tensors_destroy(struct moe_engine *e, struct moe_decoder_tensors *t)
{
	int n = t->n_layers * MOE_ATTN_LINEARS;

	moe_backward_ring_destroy(e, &t->ring);
	moe_full_tensors_destroy(&t->full);
	moe_tensors_destroy(t->lora, n);
	moe_tensors_destroy(t->grad, n);
	for (int i = 0; t->moe && i < t->n_layers; i++)
		moe_layer_tensors_destroy(&t->moe[i]);
	for (int i = 0; t->ffn_lora && t->ffn_grad && i < t->n_layers; i++) {
		moe_tensors_destroy(t->ffn_lora[i], MOE_FFN_MATRICES);
		moe_tensors_destroy(t->ffn_grad[i], MOE_FFN_MATRICES);
	}
	moe_free(t->ffn_lora);
	moe_free(t->ffn_grad);
	moe_tensors_destroy(t->norm, t->n_norms);
	moe_join_destroy(&t->norm_all);
	moe_tensor_destroy(t->norm_ready);
	moe_free(t->moe);
	moe_free(t->squares);
	memset(t, 0, sizeof *t);
}

/* Of a matrix's LoRA. */
static struct moe_update_args update_of(const struct moe_param *a, const struct moe_param *b)
{
	struct moe_update_args args = { .n = 2 };

	args.range[0] = (struct moe_range){ a, 0, 1 };
	args.range[1] = (struct moe_range){ b, 0, 1 };
	return args;
}

/* The gradients of the routers' A and B, once those of their weights are complete. */
static enum moe_status submit_router_grads(const struct moe_context *c, const struct moe_decoder *d,
					   struct moe_decoder_tensors *t)
{
	for (int i = 0; i < d->n_layers; i++) {
		struct moe_context lc = *c;

		lc.layer = i;
		if (trains_router(&d->layers[i]))
			MOE_TRY(moe_task_router_lora_grad(&lc, d->layers[i].experts,
							  t->moe[i].grad_router, t->moe[i].router,
							  t->moe[i].grad_router_lora));
	}
	return MOE_OK;
}

static enum moe_status update_router(const struct moe_context *c, const struct moe_decoder_layer *l,
				     struct moe_layer_tensors *lt, const struct moe_decoder_step *o,
				     struct moe_tensor *norm_ready)
{
	struct moe_update_args a = update_of(&l->experts->router_lora->a, &l->experts->router_lora->b);

	a.adamw = o->adamw;
	a.norm = o->norm;
	MOE_TRY(moe_task_update(c, &a, -1, -1, &lt->grad_router_lora, 1, o->norm ? norm_ready : NULL,
				&lt->router, 1));
	return moe_task_router_fold(c, l->experts, lt->router);
}

/* Two results each into *squares, which moves on. */
static enum moe_status norm_of_ffn(const struct moe_context *c, const struct moe_decoder_layer *l,
				   struct moe_tensor *const *grad, struct moe_tensor *const *norm,
				   double **squares)
{
	for (int j = 0; j < MOE_FFN_MATRICES; j++) {
		struct moe_update_args a;

		if (!trains_ffn(l, j))
			continue;
		a = update_of(&l->ffn->lora[j].a, &l->ffn->lora[j].b);
		a.squares[0] = (*squares)++;
		a.squares[1] = (*squares)++;
		MOE_TRY(moe_task_grad_norm(c, &a, MOE_FFN_TAG + j, -1, &grad[j], 1,
					   norm[MOE_FFN_TAG + j]));
	}
	return MOE_OK;
}

static enum moe_status update_ffn(const struct moe_context *c, const struct moe_decoder_layer *l,
				  struct moe_tensor *const *grad, struct moe_tensor *const *lora,
				  const struct moe_decoder_step *o, struct moe_tensor *norm_ready)
{
	for (int j = 0; j < MOE_FFN_MATRICES; j++) {
		struct moe_update_args a;

		if (!trains_ffn(l, j))
			continue;
		a = update_of(&l->ffn->lora[j].a, &l->ffn->lora[j].b);
		a.adamw = o->adamw;
		a.norm = o->norm;
		MOE_TRY(moe_task_update(c, &a, MOE_FFN_TAG + j, -1, &grad[j], 1,
					o->norm ? norm_ready : NULL, &lora[j], 1));
	}
	return MOE_OK;
}

static enum moe_status norm_of_router(const struct moe_context *c, const struct moe_decoder_layer *l,
				      struct moe_decoder_tensors *t, int layer, double *square)
{
	struct moe_update_args a = { .n = 1, .squares[0] = square };

	a.range[0] = (struct moe_range){ &l->experts->router_param, 0, 1 };
	return moe_task_grad_norm(c, &a, -1, -1, &t->moe[layer].grad_router, 1, t->norm[router_norm(l)]);
}

static enum moe_status submit_norm(const struct moe_context *c, const struct moe_decoder *d,
				   struct moe_decoder_tensors *t, const struct moe_decoder_step *o)
{
	double *experts = t->squares, *rest = t->squares + t->n_expert_squares;
	struct moe_grad_total_args total = { .squares = t->squares,
					     .n_experts = t->n_expert_squares,
					     .n = t->n_squares,
					     .max_norm = o->max_norm,
					     .after = o->after,
					     .out = o->norm };

	for (int i = 0; i < d->n_layers; i++) {
		const struct moe_decoder_layer *l = &d->layers[i];
		struct moe_context lc = *c;

		lc.layer = i;
		if (trains_experts(l)) {
			MOE_TRY(moe_graph_moe_grad_norm(&lc, l->experts, &t->moe[i], 1, experts,
							t->norm + EXPERTS_NORM));
			experts += (int64_t)MOE_SQUARES_PER_EXPERT(l->experts->P) * l->experts->E;
		}
		if (trains_base(l)) {
			MOE_TRY(moe_graph_moe_base_norm(&lc, l->experts, &t->moe[i], 1, experts,
							t->norm + EXPERTS_NORM));
			experts += (int64_t)MOE_EXPERT_MATRICES * l->experts->P * l->experts->E;
		}
		if (trains_whole_router(l))
			MOE_TRY(norm_of_router(&lc, l, t, i, rest++));
		if (trains_router(l)) {
			struct moe_update_args a = update_of(&l->experts->router_lora->a, &l->experts->router_lora->b);

			a.squares[0] = rest++;
			a.squares[1] = rest++;
			MOE_TRY(moe_task_grad_norm(&lc, &a, -1, -1, &t->moe[i].grad_router_lora, 1,
						   t->norm[router_norm(l)]));
		}
		MOE_TRY(norm_of_ffn(&lc, l, t->ffn_grad[i], t->norm, &rest));
		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			struct moe_update_args a = update_of(&l->linear[j].lora_a, &l->linear[j].lora_b);

			if (!moe_decoder_trains(l, j))
				continue;
			a.squares[0] = rest++;
			a.squares[1] = rest++;
			MOE_TRY(moe_task_grad_norm(
				&lc, &a, j, -1, &t->grad[i * MOE_ATTN_LINEARS + j], 1, t->norm[j]));
		}
	}
	MOE_TRY(moe_full_grad_norm(c, &t->full, t->norm, rest));
	for (int i = 0; i < t->n_norms; i++)
		moe_tensor_set_initialised(t->norm[i]); /* projections that nothing trains */
	MOE_TRY(moe_join_submit(c, &t->norm_all, t->norm, t->n_norms, NULL));
	return moe_task_grad_total(c, &total, t->norm_all.out, t->norm_ready);
}

enum moe_status moe_graph_decoder_update(const struct moe_context *c, const struct moe_decoder *d,
					 struct moe_decoder_tensors *t,
					 const struct moe_decoder_step *o)
{
	struct moe_optimizer_step step = { .adamw = o->adamw,
					   .norm = o->norm,
					   .norm_ready = t->norm_ready };
	struct moe_context nc = *c;

	nc.layer = -1;
	nc.priority = MOE_PRIORITY_UPDATE;
	MOE_TRY(submit_router_grads(&nc, d, t));
	if (o->norm)
		MOE_TRY(submit_norm(&nc, d, t, o));
	MOE_TRY(moe_full_update_embed(c, &t->full, o, t->norm_ready));
	for (int i = 0; i < d->n_layers; i++) {
		const struct moe_decoder_layer *l = &d->layers[i];
		struct moe_context lc = *c;

		lc.layer = i;
		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			struct moe_update_args a = update_of(&l->linear[j].lora_a, &l->linear[j].lora_b);
			int at = i * MOE_ATTN_LINEARS + j;

			if (!moe_decoder_trains(l, j))
				continue;
			a.adamw = o->adamw;
			a.norm = o->norm;
			MOE_TRY(moe_task_update(&lc, &a, j, -1, &t->grad[at], 1,
						o->norm ? t->norm_ready : NULL, &t->lora[at], 1));
		}
		MOE_TRY(update_ffn(&lc, l, t->ffn_grad[i], t->ffn_lora[i], o, t->norm_ready));
		MOE_TRY(moe_full_update_layer(&lc, &t->full, i, o, t->norm_ready));
		if (trains_base(l))
			MOE_TRY(moe_graph_moe_update_base(&lc, l->experts, &t->moe[i], &step));
		else if (trains_whole_router(l))
			MOE_TRY(moe_graph_moe_update_router(&lc, l->experts, &t->moe[i], &step));
		if (trains_experts(l))
			MOE_TRY(moe_graph_moe_update(&lc, l->experts, &t->moe[i], &step));
		if (trains_router(l))
			MOE_TRY(update_router(&lc, l, &t->moe[i], o, t->norm_ready));
	}
	return moe_full_update_head(c, &t->full, o, t->norm_ready);
}
