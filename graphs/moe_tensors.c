/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of MoE layers and slots. */
#include "graphs/moe_graph.h"

int64_t moe_layer_tensors_count(int P, int G, int slices_i, bool base_grads)
{
	return (int64_t)P * G * (1 + slices_i + (2 + MOE_EXPERT_MATRICES) * base_grads) + 2 * (int64_t)G + 2 * base_grads;
}

int64_t moe_slot_tensors_count(int P, int G, int T_max, const struct moe_cut *cut)
{
	int64_t pg = (int64_t)P * G, blocks = moe_token_blocks(T_max);
	int64_t wide = MOE_MAX(pg * cut->slices_h, blocks);

	return 1 + 4 * blocks + pg * (1 + 3 * cut->slices_i + cut->slices_h) +
	       (int64_t)P * cut->combine_blocks + 9 * moe_join_tensors(wide) + 1;
}

/* Where base weights are trained. */
static enum moe_status create_trained(struct moe_engine *e, const struct moe_experts *l,
				      struct moe_layer_tensors *t)
{
	int pg = l->P * l->G;

	if (l->part[0].base[MOE_GATE].m) {
		MOE_TRY(moe_tensors_create(e, "weights", pg, true, &t->weights));
		MOE_TRY(moe_tensors_create(e, "masters", pg, true, &t->masters));
	}
	if (!l->router_param.m)
		return MOE_OK;
	MOE_TRY(moe_tensor_create(e, "router", 0, -1, &t->router));
	moe_tensor_set_initialised(t->router);
	return MOE_OK;
}

enum moe_status moe_layer_tensors_create(struct moe_engine *e, const struct moe_experts *l,
					 int slices_i, bool base_grads, struct moe_layer_tensors *t)
{
	int pg = l->P * l->G;
	enum moe_status st;

	memset(t, 0, sizeof *t);
	t->P = l->P;
	t->G = l->G;
	t->slices_i = slices_i;
	MOE_TRY_GOTO(moe_tensors_create(e, "lora_i", pg, true, &t->lora_i), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "grad_i", pg * slices_i, false, &t->grad_i), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "lora_h", l->G, true, &t->lora_h), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "grad_h", l->G, false, &t->grad_h), st, fail);
	if (base_grads)
		MOE_TRY_GOTO(moe_tensors_create(e, "grad_base", MOE_EXPERT_MATRICES * pg, false, &t->grad_base),
			     st, fail);
	if (l->grad_router)
		MOE_TRY_GOTO(moe_tensor_create(e, "grad_router", 0, -1, &t->grad_router), st, fail);
	MOE_TRY_GOTO(create_trained(e, l, t), st, fail);
	if (l->router_lora) {
		MOE_TRY_GOTO(moe_tensor_create(e, "router", 0, -1, &t->router), st, fail);
		moe_tensor_set_initialised(t->router);
		MOE_TRY_GOTO(moe_tensor_create(e, "grad_router_lora", 0, -1, &t->grad_router_lora),
			     st, fail);
	}
	return MOE_OK;
fail:
	moe_layer_tensors_destroy(t);
	return st;
}

void moe_layer_tensors_destroy(struct moe_layer_tensors *t)
{
	int pg = t->P * t->G;

	moe_tensors_destroy(t->lora_i, pg);
	moe_tensors_destroy(t->grad_i, pg * t->slices_i);
	moe_tensors_destroy(t->lora_h, t->G);
	moe_tensors_destroy(t->grad_h, t->G);
	moe_tensors_destroy(t->grad_base, MOE_EXPERT_MATRICES * pg);
	moe_tensors_destroy(t->weights, pg);
	moe_tensors_destroy(t->masters, pg);
	moe_tensor_destroy(t->router);
	moe_tensor_destroy(t->grad_router);
	moe_tensor_destroy(t->grad_router_lora);
	memset(t, 0, sizeof *t);
}

enum moe_status moe_slot_tensors_create(struct moe_engine *e, int P, int G, int T_max, int H,
					const struct moe_cut *cut, bool shared,
					struct moe_slot_tensors *t)
{
	int pg = P * G, blocks = moe_token_blocks(T_max);
	int nu = pg * cut->slices_i, nr = pg * cut->slices_h, np = P * cut->combine_blocks;
	enum moe_status st;

	memset(t, 0, sizeof *t);
	t->P = P;
	t->G = G;
	t->T_max = T_max;
	t->cut = *cut;
	MOE_TRY_GOTO(moe_tensor_create(e, "scratch", 0, -1, &t->scratch), st, fail);
	moe_tensor_set_initialised(t->scratch);
	MOE_TRY_GOTO(moe_tensors_create(e, "route", blocks, false, &t->route), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "route_bwd", blocks, false, &t->route_bwd), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "ffn", blocks, false, &t->ffn), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "panel", pg, false, &t->panel), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "gate_up", nu, false, &t->up), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "rows", nr, false, &t->rows), st, fail);
	for (int i = 0; i < 2; i++) {
		MOE_TRY_GOTO(moe_tensors_create(e, "down_bwd", nu, false, &t->down_bwd[i]), st,
			     fail);
		MOE_TRY_GOTO(moe_join_create(e, "grad_out", blocks, &t->grad_out[i]), st, fail);
	}
	MOE_TRY_GOTO(moe_tensors_create(e, "part", np, false, &t->part), st, fail);
	MOE_TRY_GOTO(moe_join_create(e, "x", blocks, &t->x), st, fail);
	MOE_TRY_GOTO(moe_join_create(e, "y", nr, &t->y), st, fail);
	MOE_TRY_GOTO(moe_join_create(e, "parts", np, &t->parts), st, fail);
	MOE_TRY_GOTO(moe_join_create(e, "grad_rows", nr, &t->grad_rows), st, fail);
	MOE_TRY_GOTO(moe_join_create(e, "grad_parts", np, &t->grad_parts), st, fail);
	MOE_TRY_GOTO(moe_join_create(e, "route_all", blocks, &t->route_all), st, fail);
	if (!shared)
		return MOE_OK;
	MOE_TRY_GOTO(moe_join_create(e, "shared_all", blocks, &t->shared_all), st, fail);
	MOE_TRY_GOTO(moe_stream_create(e, "shared", T_max, H, &t->shared), st, fail);
	return MOE_OK;
fail:
	moe_slot_tensors_destroy(e, t);
	return st;
}

void moe_slot_tensors_destroy(struct moe_engine *e, struct moe_slot_tensors *t)
{
	int pg = t->P * t->G, blocks = moe_token_blocks(t->T_max);

	moe_tensor_destroy(t->scratch);
	moe_tensors_destroy(t->route, blocks);
	moe_tensors_destroy(t->route_bwd, blocks);
	moe_tensors_destroy(t->ffn, blocks);
	moe_tensors_destroy(t->panel, pg);
	moe_tensors_destroy(t->up, pg * t->cut.slices_i);
	moe_tensors_destroy(t->rows, pg * t->cut.slices_h);
	for (int i = 0; i < 2; i++) {
		moe_tensors_destroy(t->down_bwd[i], pg * t->cut.slices_i);
		moe_join_destroy(&t->grad_out[i]);
	}
	moe_tensors_destroy(t->part, t->P * t->cut.combine_blocks);
	moe_join_destroy(&t->x);
	moe_join_destroy(&t->y);
	moe_join_destroy(&t->parts);
	moe_join_destroy(&t->grad_rows);
	moe_join_destroy(&t->grad_parts);
	moe_join_destroy(&t->route_all);
	moe_join_destroy(&t->shared_all);
	moe_stream_destroy(e, &t->shared);
	memset(t, 0, sizeof *t);
}
