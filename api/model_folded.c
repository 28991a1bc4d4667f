/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adapters of routers, gates and MLPs, which have no LoRA in the graph: A and B are folded into the
 * matrix in f32, once when the model is opened. Routers and gates, small, keep their base, so that
 * other values can be loaded later.
 */
#include "api/lora_init.h"
#include "api/model.h"

#include "codelets/router_lora.h"

static enum moe_adapter_target target_of(int i)
{
	return (enum moe_adapter_target)(MOE_ADAPTER_EXPERTS + 1 + i);
}

/* Of the random numbers of A; differs from the experts' and attention's. */
#define ROUTER_SEED 16

static bool is_small(enum moe_adapter_target t)
{
	return t < MOE_ADAPTER_SHARED_FFN;
}

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
			    enum moe_adapter_target t, struct moe_folded_lora *f)
{
	enum moe_role role = moe_adapter_target_role(t);
	const struct moe_st_tensor *tensor;
	int64_t shape[MOE_MAX_NDIM];

	if (moe_arch_tensor_shape(&m->arch, role, layer, shape) != 2)
		return moe_fail(MOE_ERR_FORMAT, "layer %d has no %s", layer,
				moe_adapter_target_name(t));
	f->n = shape[0];
	f->k = shape[1];
	f->r = moe_lora_rank(&m->lora, t, layer);
	f->scale = (float)moe_lora_scaling(m->lora.rslora, f->r, m->lora.alpha[t]);
	f->a = moe_memory_alloc(m->engine, (size_t)(f->r * (f->n + f->k)) * sizeof *f->a, -1,
				"lora");
	f->base = moe_memory_alloc(m->engine, (size_t)(f->n * f->k) * sizeof *f->a, -1, "lora");
	if (!f->a || !f->base)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter of %s",
				moe_adapter_target_name(t));
	f->b = f->a + f->r * f->k;
	if (!m->params.inference_only)
		MOE_TRY(train_router(m, layer, f));
	if (!st)
		return MOE_OK;
	memset(f->a, 0, (size_t)(f->r * (f->n + f->k)) * sizeof *f->a);
	MOE_TRY(moe_model_find(m, st, role, layer, -1, &tensor));
	moe_to_f32(f->base, tensor->data, tensor->dtype, (size_t)(f->n * f->k));
	if (f->trained) /* as a new adapter starts: B is 0 */
		moe_lora_init_a(m->params.seed, layer, ROUTER_SEED, 0, f->r, f->k, f->a);
	return MOE_OK;
}

enum moe_status moe_model_make_folded(struct moe_model *m, const struct moe_safetensors *st)
{
	bool any = false;

	for (int i = 0; i < MOE_FOLDED; i++)
		any |= m->lora.rank[target_of(i)] != 0;
	if (!any)
		return MOE_OK;
	m->folded = moe_calloc((size_t)m->arch.n_layers, sizeof *m->folded);
	if (!m->folded)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter");
	for (int l = 0; l < m->arch.n_layers; l++)
		for (int i = 0; i < MOE_FOLDED; i++)
			if (moe_lora_rank(&m->lora, target_of(i), l))
				MOE_TRY(make(m, st, l, target_of(i), &m->folded[l][i]));
	return MOE_OK;
}

/* out = base + scale B A, [n, k] */
static void fold(const struct moe_folded_lora *f, float *out)
{
	memcpy(out, f->base, (size_t)(f->n * f->k) * sizeof *out);
	for (int64_t i = 0; i < f->n; i++)
		for (int64_t j = 0; j < f->r; j++) {
			float b = f->scale * f->b[i * f->r + j];

			for (int64_t c = 0; c < f->k; c++)
				out[i * f->k + c] += b * f->a[j * f->k + c];
		}
}

/* Packed anew from f32: its own dtype would round A and B away. */
static enum moe_status replace(struct moe_model *m, struct moe_weight *w,
			       const struct moe_folded_lora *f, const float *value,
			       enum moe_weight_use use)
{
	size_t bytes = moe_kernels()->weight_bytes(MOE_F32, f->n, f->k, use);

	if (use != MOE_USE_EXACT) {
		moe_memory_free(m->engine, w->data);
		w->data = moe_memory_alloc(m->engine, bytes, -1, "weights");
		if (!w->data)
			return moe_fail(MOE_ERR_NOMEM, "no memory for %zu bytes of weights", bytes);
	}
	moe_kernels()->weight_pack(w, value, MOE_F32, f->n, f->k, f->k, use);
	return MOE_OK;
}

static enum moe_status set(struct moe_model *m, int layer, enum moe_adapter_target t,
			   const struct moe_folded_lora *f)
{
	struct moe_decoder_layer *l = &m->decoder.layers[layer];
	struct moe_weight *ffn[3] = { NULL };
	enum moe_status status;
	float *value;

	if (!f->base)
		return moe_fail(
			MOE_ERR_ARG,
			"the adapter's %s is folded into the weights: open the model with this "
			"adapter instead",
			moe_adapter_target_name(t));
	if (t == MOE_ADAPTER_SHARED_GATE) {
		fold(f, l->ffn->sigmoid_weight);
		return MOE_OK;
	}
	value = moe_alloc((size_t)(f->n * f->k), sizeof *value);
	if (!value)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter");
	fold(f, value);
	if (l->ffn) {
		ffn[0] = &l->ffn->gate;
		ffn[1] = &l->ffn->up;
		ffn[2] = &l->ffn->down;
	}
	if (t == MOE_ADAPTER_ROUTER)
		status = replace(m, &l->experts->router_weight, f, value, MOE_USE_EXACT);
	else
		status = replace(m, ffn[(t - MOE_ADAPTER_SHARED_FFN) % 3], f, value, MOE_USE_GEMM);
	moe_free(value);
	return status;
}

enum moe_status moe_model_fold(struct moe_model *m)
{
	for (int l = 0; m->folded && l < m->arch.n_layers; l++)
		for (int i = 0; i < MOE_FOLDED; i++)
			if (m->folded[l][i].r)
				MOE_TRY(set(m, l, target_of(i), &m->folded[l][i]));
	return MOE_OK;
}

void moe_model_folded_done(struct moe_model *m)
{
	for (int l = 0; m->folded && l < m->arch.n_layers; l++)
		for (int i = 0; i < MOE_FOLDED; i++)
			if (!is_small(target_of(i))) {
				moe_memory_free(m->engine, m->folded[l][i].base);
				m->folded[l][i].base = NULL;
			}
}

void moe_model_free_folded(struct moe_model *m)
{
	for (int l = 0; m->folded && l < m->arch.n_layers; l++)
		for (int i = 0; i < MOE_FOLDED; i++) {
			moe_memory_free(m->engine, m->folded[l][i].a);
			moe_memory_free(m->engine, m->folded[l][i].base);
			free_trained(m->engine, m->folded[l][i].trained);
		}
	moe_free(m->folded);
	m->folded = NULL;
}
