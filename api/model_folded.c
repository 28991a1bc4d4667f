/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters of routers: A and B are folded into the weight, whose base is kept. */
#include "api/lora_init.h"
#include "api/model.h"

#include "codelets/router_lora.h"

/* Of the random numbers of A; differs from the experts' and attention's. */
#define ROUTER_SEED 16

static enum moe_status alloc_moments(struct moe_engine *e, struct moe_param *p, float *value,
				     int64_t piece)
{
	size_t bytes = (size_t)piece * sizeof(float);

	p->value = value;
	p->piece = piece;
	p->grad = moe_memory_alloc(e, bytes, -1, "gradients");
	p->m = moe_memory_alloc(e, bytes, -1, "moments");
	p->v = moe_memory_alloc(e, bytes, -1, "moments");
	return p->grad && p->m && p->v
		       ? MOE_OK
		       : moe_fail(MOE_ERR_NOMEM, "no memory for a router's adapter");
}

/* The graph finds it in the layer, which has the gradient of the whole weight from then on. */
static enum moe_status train_router(struct moe_model *m, int layer, struct moe_folded_lora *f)
{
	struct moe_experts *e = m->decoder.layers[layer].experts;
	struct moe_router_lora *t = moe_calloc(1, sizeof *t);

	f->trained = t;
	if (!t)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a router's adapter");
	t->r = f->r;
	t->scale = f->scale;
	t->base = f->base;
	MOE_TRY(alloc_moments(m->engine, &t->a, f->a, f->r * f->k));
	MOE_TRY(alloc_moments(m->engine, &t->b, f->b, f->r * f->n));
	e->grad_router =
		moe_memory_alloc(m->engine, (size_t)(f->n * f->k) * sizeof(float), -1, "gradients");
	if (!e->grad_router)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a router's gradient");
	e->router_lora = t;
	return MOE_OK;
}

static void free_trained(struct moe_engine *e, struct moe_router_lora *t)
{
	struct moe_param *const both[] = { t ? &t->a : NULL, t ? &t->b : NULL };

	for (int i = 0; t && i < 2; i++) {
		moe_memory_free(e, both[i]->grad);
		moe_memory_free(e, both[i]->m);
		moe_memory_free(e, both[i]->v);
	}
	moe_free(t);
}

static enum moe_status make(struct moe_model *m, const struct moe_safetensors *st, int layer,
			    struct moe_folded_lora *f)
{
	const enum moe_adapter_target t = MOE_ADAPTER_ROUTER;
	const struct moe_st_tensor *tensor;

	f->n = m->arch.n_experts;
	f->k = m->arch.hidden;
	f->r = moe_lora_rank(&m->lora, t, layer);
	f->scale = (float)moe_lora_scaling(m->lora.rslora, f->r, m->lora.alpha[t]);
	f->a = moe_memory_alloc(m->engine, (size_t)(f->r * (f->n + f->k)) * sizeof *f->a, -1,
				"lora");
	f->base = moe_memory_alloc(m->engine, (size_t)(f->n * f->k) * sizeof *f->a, -1, "lora");
	if (!f->a || !f->base)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a router's adapter");
	f->b = f->a + f->r * f->k;
	if (!m->params.inference_only)
		MOE_TRY(train_router(m, layer, f));
	if (!st)
		return MOE_OK;
	memset(f->a, 0, (size_t)(f->r * (f->n + f->k)) * sizeof *f->a);
	MOE_TRY(moe_model_find(m, st, MOE_ROLE_ROUTER, layer, -1, &tensor));
	moe_to_f32(f->base, tensor->data, tensor->dtype, (size_t)(f->n * f->k));
	if (f->trained) /* as a new adapter starts: B is 0 */
		moe_lora_init_a(m->params.seed, layer, ROUTER_SEED, 0, f->r, f->k, f->a);
	return MOE_OK;
}

enum moe_status moe_model_make_folded(struct moe_model *m, const struct moe_safetensors *st)
{
	if (!m->lora.rank[MOE_ADAPTER_ROUTER])
		return MOE_OK;
	m->folded = moe_calloc((size_t)m->arch.n_layers, sizeof *m->folded);
	if (!m->folded)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter");
	for (int l = 0; l < m->arch.n_layers; l++)
		if (moe_lora_rank(&m->lora, MOE_ADAPTER_ROUTER, l))
			MOE_TRY(make(m, st, l, &m->folded[l]));
	return MOE_OK;
}

/* base + scale B A, packed anew from f32: its own dtype would round A and B away. */
static enum moe_status fold(struct moe_weight *w, const struct moe_folded_lora *f)
{
	float *value = moe_alloc((size_t)(f->n * f->k), sizeof *value);

	if (!value)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter");
	memcpy(value, f->base, (size_t)(f->n * f->k) * sizeof *value);
	for (int64_t i = 0; i < f->n; i++)
		for (int64_t j = 0; j < f->r; j++) {
			float b = f->scale * f->b[i * f->r + j];

			for (int64_t c = 0; c < f->k; c++)
				value[i * f->k + c] += b * f->a[j * f->k + c];
		}
	moe_kernels()->weight_pack(w, value, MOE_F32, f->n, f->k, f->k, MOE_USE_EXACT);
	moe_free(value);
	return MOE_OK;
}

enum moe_status moe_model_fold(struct moe_model *m)
{
	for (int l = 0; m->folded && l < m->arch.n_layers; l++)
		if (m->folded[l].r)
			MOE_TRY(fold(&m->decoder.layers[l].experts->router_weight, &m->folded[l]));
	return MOE_OK;
}

void moe_model_free_folded(struct moe_model *m)
{
	for (int l = 0; m->folded && l < m->arch.n_layers; l++) {
		moe_memory_free(m->engine, m->folded[l].a);
		moe_memory_free(m->engine, m->folded[l].base);
		free_trained(m->engine, m->folded[l].trained);
	}
	moe_free(m->folded);
	m->folded = NULL;
}
