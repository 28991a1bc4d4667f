/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Updates of one MoE layer, a task per (part, group): gradient norms, AdamW, weights that are packed again, and
 * gradients and values to and from the caller's arrays.
 */
#include "graphs/moe_graph.h"

/* The parameters that (part, group) updates: its I side, and the H side where it is the owner. */
static int update_ranges(const struct moe_experts *l, int p, int g, struct moe_range *r)
{
	const struct moe_experts_part *part = &l->part[p];
	const struct moe_param *params[MOE_UPDATE_RANGES] = { &part->gate_b, &part->up_b,
							      &part->down_a, &l->a_gu, &l->down_b };
	int n = moe_group_owner(l, g) == p ? 5 : 3;

	for (int i = 0; i < n; i++)
		r[i] = (struct moe_range){ params[i], l->group_first[g], l->group_first[g + 1] };
	return n;
}

static int update_grads(struct moe_layer_tensors *lt, const struct moe_experts *l, int p, int g,
			struct moe_tensor **grads)
{
	int n = 0;

	for (int j = 0; j < lt->slices_i && n < MOE_MAX_TASK_HANDLES - 1; j++)
		grads[n++] = lt->grad_i[(p * l->G + g) * lt->slices_i + j];
	if (moe_group_owner(l, g) == p)
		grads[n++] = lt->grad_h[g];
	return n;
}

static struct moe_range base_range(const struct moe_experts *l, int i, int matrix)
{
	int g = i % l->G;

	return (struct moe_range){ &l->part[i / l->G].base[matrix], l->group_first[g], l->group_first[g + 1] };
}

/* Parameters of (part, group) i that base weights are; tensors of their gradients. */
static struct moe_tensor **base_ranges(const struct moe_experts *l, struct moe_layer_tensors *lt, int i,
				       struct moe_update_args *a)
{
	a->n = MOE_EXPERT_MATRICES;
	for (int j = 0; j < a->n; j++)
		a->range[j] = base_range(l, i, j);
	return lt->grad_base + i * MOE_EXPERT_MATRICES;
}

enum moe_status moe_graph_moe_base_norm(const struct moe_context *c, const struct moe_experts *l,
					struct moe_layer_tensors *lt, float scale, double *squares,
					struct moe_tensor **done)
{
	for (int i = 0; i < l->P * l->G; i++) {
		int p = i / l->G, g = i % l->G;
		struct moe_update_args a = { .adamw.grad_scale = scale };

		struct moe_tensor **grads = base_ranges(l, lt, i, &a);

		for (int j = 0; j < a.n; j++)
			a.squares[j] = squares + (size_t)(3 * p + j) * (size_t)l->E + l->group_first[g];
		MOE_TRY(moe_task_grad_norm(c, &a, g, p, grads, a.n, done[i]));
	}
	return MOE_OK;
}

enum moe_status moe_graph_moe_grad_norm(const struct moe_context *c, const struct moe_experts *l,
					struct moe_layer_tensors *lt, float scale, double *squares,
					struct moe_tensor **done)
{
	for (int i = 0; i < l->P * l->G; i++) {
		int p = i / l->G, g = i % l->G, n;
		struct moe_tensor *grads[MOE_MAX_TASK_HANDLES];
		struct moe_update_args a = { .adamw.grad_scale = scale };

		a.n = update_ranges(l, p, g, a.range);
		n = update_grads(lt, l, p, g, grads);
		for (int j = 0; j < a.n; j++) {
			int row = j < 3 ? 3 * p + j : 3 * l->P + j - 3;

			a.squares[j] = squares + (size_t)row * (size_t)l->E + l->group_first[g];
		}
		MOE_TRY(moe_task_grad_norm(c, &a, g, p, grads, n, done[i]));
	}
	return MOE_OK;
}

enum moe_status moe_graph_moe_update(const struct moe_context *c, const struct moe_experts *l,
				     struct moe_layer_tensors *lt,
				     const struct moe_optimizer_step *o)
{
	for (int i = 0; i < l->P * l->G; i++) {
		int p = i / l->G, g = i % l->G, n;
		struct moe_tensor *grads[MOE_MAX_TASK_HANDLES];
		struct moe_tensor *params[2] = { lt->lora_i[i], lt->lora_h[g] };
		struct moe_update_args a = { .adamw = o->adamw, .norm = o->norm };

		a.n = update_ranges(l, p, g, a.range);
		n = update_grads(lt, l, p, g, grads);
		MOE_TRY(moe_task_update(c, &a, g, p, grads, n, o->norm ? o->norm_ready : NULL,
					params, moe_group_owner(l, g) == p ? 2 : 1));
	}
	return MOE_OK;
}

/* All parts of a group at once: blocks may lie in several. */
static enum moe_status requantise(const struct moe_context *c, const struct moe_experts *l,
				  struct moe_layer_tensors *lt, const struct moe_repack_args *args)
{
	for (int g = 0; g < l->G; g++) {
		struct moe_tensor *masters[MOE_MAX_LAYER_PARTS], *weights[MOE_MAX_LAYER_PARTS];
		struct moe_repack_args a = *args;

		a.layer = l;
		a.part = -1;
		a.group = g;
		for (int p = 0; p < l->P; p++) {
			masters[p] = lt->masters[p * l->G + g];
			weights[p] = lt->weights[p * l->G + g];
		}
		MOE_TRY(moe_task_requantise(c, &a, masters, weights, l->P));
	}
	return MOE_OK;
}

enum moe_status moe_graph_moe_update_base(const struct moe_context *c, const struct moe_experts *l,
					  struct moe_layer_tensors *lt,
					  const struct moe_optimizer_step *o)
{
	struct moe_tensor *norm = o->norm ? o->norm_ready : NULL;

	for (int i = 0; i < l->P * l->G; i++) {
		int p = i / l->G, g = i % l->G;
		struct moe_update_args a = { .adamw = o->adamw, .norm = o->norm, .n = 1 };
		struct moe_repack_args again = { .layer = l, .part = p, .group = g };
		struct moe_tensor *params[2] = { lt->masters ? lt->masters[i] : NULL, lt->weights[i] };
		/* plain bf16 weights change in place; quantised ones have masters in any case */
		bool own = l->part[p].base[MOE_GATE].own != NULL && !l->requantise;
		bool packs = l->part[p].base[MOE_GATE].weight != NULL;

		for (int j = 0; j < MOE_EXPERT_MATRICES; j++) {
			a.range[0] = base_range(l, i, j);
			MOE_TRY(moe_task_update(c, &a, g, p, &lt->grad_base[i * MOE_EXPERT_MATRICES + j], 1,
						norm, own ? params + 1 : params, packs ? 2 : 1));
		}
		if (!l->requantise && (l->transposed || (!own && !packs)))
			MOE_TRY(moe_task_repack(c, &again, own ? NULL : lt->masters[i], lt->weights[i]));
	}
	if (l->requantise == MOE_REQUANTISE_WHOLE)
		MOE_TRY(requantise(c, l, lt, &(struct moe_repack_args){ 0 }));
	return moe_graph_moe_update_router(c, l, lt, o);
}

enum moe_status moe_graph_moe_update_router(const struct moe_context *c, const struct moe_experts *l,
					    struct moe_layer_tensors *lt,
					    const struct moe_optimizer_step *o)
{
	struct moe_update_args router = { .adamw = o->adamw, .norm = o->norm, .n = 1 };

	if (!l->router_param.m)
		return MOE_OK;
	router.range[0] = (struct moe_range){ &l->router_param, 0, 1 };
	return moe_task_update(c, &router, -1, -1, &lt->grad_router, 1, o->norm ? o->norm_ready : NULL,
			       &lt->router, 1);
}

enum moe_status moe_graph_moe_take_base(const struct moe_context *c, const struct moe_experts *l,
					struct moe_layer_tensors *lt,
					const struct moe_repack_args *args)
{
	if (l->requantise)
		return requantise(c, l, lt, args);
	for (int i = 0; i < l->P * l->G; i++) {
		struct moe_repack_args a = *args;

		a.layer = l;
		a.part = i / l->G;
		a.group = i % l->G;
		MOE_TRY(moe_task_repack(c, &a, lt->masters ? lt->masters[i] : NULL,
					lt->weights ? lt->weights[i] : NULL));
	}
	return MOE_OK;
}

/* Gradients of (part, group) i: LoRA's and base weights'. */
static int all_grads(struct moe_layer_tensors *lt, const struct moe_experts *l, int i, bool lora,
		     bool base, struct moe_tensor **grads)
{
	int n = lora ? update_grads(lt, l, i / l->G, i % l->G, grads) : 0;

	for (int j = 0; base && lt->grad_base && j < MOE_EXPERT_MATRICES && n < MOE_MAX_TASK_HANDLES; j++)
		grads[n++] = lt->grad_base[i * MOE_EXPERT_MATRICES + j];
	return n;
}

enum moe_status moe_graph_moe_exchange(const struct moe_context *c, const struct moe_experts *l,
				       struct moe_layer_tensors *lt,
				       const struct moe_exchange_args *args, bool lora, bool base)
{
	for (int i = 0; i < l->P * l->G; i++) {
		struct moe_tensor *grads[MOE_MAX_TASK_HANDLES], *params[3];
		struct moe_exchange_args a = *args;
		int n_grads = 0, n = 0;

		a.layer = l;
		a.part = i / l->G;
		a.group = i % l->G;
		if (a.what == MOE_PUBLISH)
			n_grads = all_grads(lt, l, i, lora, base, grads);
		else {
			if (lora)
				params[n++] = lt->lora_i[i];
			if (lora && moe_group_owner(l, a.group) == a.part)
				params[n++] = lt->lora_h[a.group];
			if (base)
				params[n++] = lt->masters[i];
		}
		MOE_TRY(moe_task_exchange(c, &a, grads, n_grads, params, n));
	}
	return MOE_OK;
}

enum moe_status moe_graph_moe_rescale(const struct moe_context *c, const struct moe_experts *l,
				      struct moe_layer_tensors *lt, float factor)
{
	for (int i = 0; i < l->P * l->G; i++) {
		int p = i / l->G, g = i % l->G, n;
		struct moe_tensor *grads[MOE_MAX_TASK_HANDLES];
		struct moe_update_args a = { .adamw.grad_scale = factor };

		if (l->r) {
			a.n = update_ranges(l, p, g, a.range);
			n = update_grads(lt, l, p, g, grads);
			MOE_TRY(moe_task_rescale(c, &a, g, p, grads, n));
		}
		if (!lt->grad_base)
			continue;
		MOE_TRY(moe_task_rescale(c, &a, g, p, base_ranges(l, lt, i, &a), MOE_EXPERT_MATRICES));
	}
	return MOE_OK;
}
