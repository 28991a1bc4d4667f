/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adapters of the router and of the shared expert's gate. Both matrices are small and kept in exact
 * f32, so A and B are folded into them: W = base + scale B A.
 */
#include "api/model.h"

static const enum moe_adapter_target targets[MOE_GATES] = { MOE_ADAPTER_ROUTER,
							    MOE_ADAPTER_SHARED_GATE };
static const enum moe_role roles[MOE_GATES] = { MOE_ROLE_ROUTER, MOE_ROLE_SHARED_ROUTER };

static enum moe_status make_gate(struct moe_model *m, const struct moe_safetensors *st, int layer,
				 int which, struct moe_gate_lora *g)
{
	const struct moe_st_tensor *t;
	int64_t shape[MOE_MAX_NDIM], lora;

	if (moe_arch_tensor_shape(&m->arch, roles[which], layer, shape) != 2)
		return MOE_OK;
	g->n = shape[0];
	g->k = shape[1];
	g->r = moe_lora_rank(&m->lora, targets[which], layer);
	g->scale = (float)moe_lora_scaling(m->lora.rslora, g->r, m->lora.alpha[targets[which]]);
	lora = g->r * (g->n + g->k);
	g->a = moe_memory_alloc(m->engine, (size_t)(lora + g->n * g->k) * sizeof *g->a, -1, "lora");
	if (!g->a)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a gate's adapter");
	g->b = g->a + g->r * g->k;
	g->base = g->a + lora;
	if (!st)
		return MOE_OK;
	memset(g->b, 0, (size_t)(g->n * g->r) * sizeof *g->b);
	MOE_TRY(moe_model_find(m, st, roles[which], layer, -1, &t));
	moe_to_f32(g->base, t->data, t->dtype, (size_t)(g->n * g->k));
	return MOE_OK;
}

enum moe_status moe_model_make_gates(struct moe_model *m, const struct moe_safetensors *st)
{
	if (!m->lora.rank[MOE_ADAPTER_ROUTER] && !m->lora.rank[MOE_ADAPTER_SHARED_GATE])
		return MOE_OK;
	m->gates = moe_calloc((size_t)m->arch.n_layers, sizeof *m->gates);
	if (!m->gates)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a gate's adapter");
	for (int l = 0; l < m->arch.n_layers; l++)
		for (int w = 0; w < MOE_GATES; w++)
			if (moe_lora_rank(&m->lora, targets[w], l))
				MOE_TRY(make_gate(m, st, l, w, &m->gates[l][w]));
	return MOE_OK;
}

/* out = base + scale B A, [n, k] */
static void fold(const struct moe_gate_lora *g, float *out)
{
	memcpy(out, g->base, (size_t)(g->n * g->k) * sizeof *out);
	for (int64_t i = 0; i < g->n; i++)
		for (int64_t j = 0; j < g->r; j++) {
			float b = g->scale * g->b[i * g->r + j];

			for (int64_t c = 0; c < g->k; c++)
				out[i * g->k + c] += b * g->a[j * g->k + c];
		}
}

enum moe_status moe_model_fold_gates(struct moe_model *m)
{
	for (int l = 0; m->gates && l < m->arch.n_layers; l++) {
		struct moe_decoder_layer *layer = &m->decoder.layers[l];
		const struct moe_gate_lora *router = &m->gates[l][MOE_GATE_ROUTER];
		const struct moe_gate_lora *shared = &m->gates[l][MOE_GATE_SHARED];

		if (router->r) {
			float *w = moe_alloc((size_t)(router->n * router->k), sizeof *w);

			if (!w)
				return moe_fail(MOE_ERR_NOMEM, "no memory for a router");
			fold(router, w);
			moe_kernels()->weight_pack(&layer->experts->router_weight, w, MOE_F32,
						   router->n, router->k, router->k, MOE_USE_EXACT);
			moe_free(w);
		}
		if (shared->r)
			fold(shared, layer->ffn->sigmoid_weight);
	}
	return MOE_OK;
}

void moe_model_free_gates(struct moe_model *m)
{
	for (int l = 0; m->gates && l < m->arch.n_layers; l++)
		for (int w = 0; w < MOE_GATES; w++)
			moe_memory_free(m->engine, m->gates[l][w].a);
	moe_free(m->gates);
	m->gates = NULL;
}
