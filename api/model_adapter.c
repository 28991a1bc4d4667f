/* SPDX-License-Identifier: Apache-2.0 */
/* LoRA of a model: initial values, and adapters to and from disk. */
#include "api/lora_init.h"
#include "api/model.h"

#include "model/adapters/peft.h"

#include <math.h>

static enum moe_status alloc_param(struct moe_model *m, struct moe_param *p)
{
	size_t bytes = (size_t)p->piece * sizeof(float);
	bool trainable = !m->params.inference_only;

	p->value = moe_memory_alloc(m->engine, bytes, -1, "lora");
	if (trainable) {
		p->grad = moe_memory_alloc(m->engine, bytes, -1, "gradients");
		p->m = moe_memory_alloc(m->engine, bytes, -1, "moments");
		p->v = moe_memory_alloc(m->engine, bytes, -1, "moments");
	}
	if (!p->value || (trainable && (!p->grad || !p->m || !p->v)))
		return moe_fail(MOE_ERR_NOMEM, "no memory for %zu bytes of LoRA", bytes);
	return MOE_OK;
}

static enum moe_status init_experts(struct moe_model *m, int layer, struct moe_experts *e)
{
	static const enum moe_lora_array arrays[3] = { MOE_GATE_A, MOE_UP_A, MOE_DOWN_A };
	float *a = moe_alloc((size_t)e->r * (size_t)MOE_MAX(e->H, e->I), sizeof *a);

	if (!a)
		return moe_fail(MOE_ERR_NOMEM, "no memory for LoRA");
	for (int x = 0; x < e->E; x++)
		for (int j = 0; j < 3; j++) {
			if (j == 1 && m->lora.share_a)
				continue;
			moe_lora_init_a(m->params.seed, layer, MOE_ADAPTER_EXPERTS + j, x, e->r,
			       j == 2 ? e->I : e->H, a);
			moe_experts_set(e, arrays[j], MOE_VALUE, x, a);
		}
	moe_free(a);
	return MOE_OK;
}

enum moe_status moe_model_init_lora(struct moe_model *m)
{
	for (int i = 0; i < m->decoder.n_layers; i++) {
		struct moe_decoder_layer *l = &m->decoder.layers[i];

		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			struct moe_linear *p = &l->linear[j];

			if (!p->r)
				continue;
			p->scale = (float)(m->lora.alpha[j] /
					   (m->lora.rslora ? sqrt(p->r) : (double)p->r));
			MOE_TRY(alloc_param(m, &p->lora_a));
			MOE_TRY(alloc_param(m, &p->lora_b));
			if (!moe_engine_is_dry(m->engine))
				moe_lora_init_a(m->params.seed, i, j, 0, p->r, p->weight.k, p->lora_a.value);
		}
		if (l->experts && l->experts->r && !moe_engine_is_dry(m->engine))
			MOE_TRY(init_experts(m, i, l->experts));
	}
	return MOE_OK;
}

static enum moe_status check_fit(const struct moe_model *m, const struct moe_adapter *adapter)
{
	MOE_TRY(moe_adapter_check(adapter, &m->arch));
	for (size_t i = 0; i < adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &adapter->entries[i];
		int rank = m->lora.rank[e->target];
		double alpha = m->lora.alpha[e->target];
		double scale = rank ? alpha / (m->lora.rslora ? sqrt(rank) : rank) : 0;

		if (rank != e->rank || fabs(scale - moe_adapter_scaling(adapter, e)) > 1e-6 * scale)
			return moe_fail(MOE_ERR_ARG,
					"the adapter's %s has rank %lld and scale %g, the model's %d "
					"and %g: open the model with this adapter instead",
					moe_adapter_target_name(e->target), (long long)e->rank,
					moe_adapter_scaling(adapter, e), rank, scale);
		if (e->target == MOE_ADAPTER_EXPERTS && m->lora.share_a && !adapter->share_a)
			return moe_fail(MOE_ERR_ARG, "the adapter has an A each for gate and up; the "
						     "model's share one");
	}
	return MOE_OK;
}

/* One array of all experts between [E, rows, columns] and the parts. */
static void copy_experts(struct moe_experts *e, enum moe_lora_array a, float *all, bool set)
{
	int64_t n = moe_lora_elements(e, a);

	for (int x = 0; x < e->E; x++)
		if (set)
			moe_experts_set(e, a, MOE_VALUE, x, all + x * n);
		else
			moe_experts_get(e, a, MOE_VALUE, x, all + x * n);
}

static void set_entry(struct moe_model *m, const struct moe_adapter_entry *e)
{
	struct moe_decoder_layer *l = &m->decoder.layers[e->layer];

	if (e->target != MOE_ADAPTER_EXPERTS) {
		struct moe_linear *p = &l->linear[e->target];

		memcpy(p->lora_a.value, e->a, (size_t)p->lora_a.piece * sizeof(float));
		memcpy(p->lora_b.value, e->b, (size_t)p->lora_b.piece * sizeof(float));
		return;
	}
	copy_experts(l->experts, MOE_GATE_A, e->gate_a, true);
	if (!m->lora.share_a)
		copy_experts(l->experts, MOE_UP_A, e->up_a ? e->up_a : e->gate_a, true);
	copy_experts(l->experts, MOE_DOWN_A, e->down_a, true);
	copy_experts(l->experts, MOE_GATE_B, e->gate_b, true);
	copy_experts(l->experts, MOE_UP_B, e->up_b, true);
	copy_experts(l->experts, MOE_DOWN_B, e->down_b, true);
}

/* B = 0 where the adapter has nothing for a target: it then changes nothing there. */
static void clear_absent(struct moe_model *m, const struct moe_adapter *adapter)
{
	for (int i = 0; i < m->decoder.n_layers; i++) {
		struct moe_decoder_layer *l = &m->decoder.layers[i];
		struct moe_experts *e = l->experts;

		for (int j = 0; j < MOE_ATTN_LINEARS; j++)
			if (l->linear[j].r &&
			    !moe_adapter_find(adapter, i, (enum moe_adapter_target)j))
				memset(l->linear[j].lora_b.value, 0,
				       (size_t)l->linear[j].lora_b.piece * sizeof(float));
		if (!e || !e->r || moe_adapter_find(adapter, i, MOE_ADAPTER_EXPERTS))
			continue;
		memset(e->down_b.value, 0, (size_t)(e->E * e->down_b.piece) * sizeof(float));
		moe_param_pack_all(&e->down_b, 0, e->E);
		for (int p = 0; p < e->P; p++) {
			const struct moe_experts_part *part = &e->part[p];

			memset(part->gate_b.value, 0,
			       (size_t)(e->E * part->gate_b.piece) * sizeof(float));
			memset(part->up_b.value, 0, (size_t)(e->E * part->up_b.piece) * sizeof(float));
			moe_param_pack_all(&part->gate_b, 0, e->E);
			moe_param_pack_all(&part->up_b, 0, e->E);
		}
	}
}

static void clear_moments(const struct moe_param *p, int E)
{
	size_t bytes = (size_t)E * (size_t)p->piece * sizeof(float);

	if (!p->m)
		return;
	memset(p->m, 0, bytes);
	memset(p->v, 0, bytes);
}

static void clear_all_moments(struct moe_model *m)
{
	for (int i = 0; i < m->decoder.n_layers; i++) {
		struct moe_decoder_layer *l = &m->decoder.layers[i];
		struct moe_experts *e = l->experts;

		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			clear_moments(&l->linear[j].lora_a, 1);
			clear_moments(&l->linear[j].lora_b, 1);
		}
		if (!e)
			continue;
		clear_moments(&e->a_gu, e->E);
		clear_moments(&e->down_b, e->E);
		for (int p = 0; p < e->P; p++) {
			clear_moments(&e->part[p].gate_b, e->E);
			clear_moments(&e->part[p].up_b, e->E);
			clear_moments(&e->part[p].down_a, e->E);
		}
	}
}

enum moe_status moe_model_set_adapter(struct moe_model *m, const struct moe_adapter *adapter)
{
	MOE_TRY(check_fit(m, adapter));
	clear_absent(m, adapter);
	for (size_t i = 0; i < adapter->n_entries; i++)
		set_entry(m, &adapter->entries[i]);
	clear_all_moments(m);
	return MOE_OK;
}

enum moe_status moe_model_load_adapter(struct moe_model *m, const char *dir)
{
	struct moe_adapter *adapter = NULL;
	enum moe_status st;

	if (!dir)
		return moe_fail(MOE_ERR_ARG, "dir is NULL");
	MOE_TRY(moe_model_enter(m));
	st = moe_engine_wait(m->engine);
	if (st == MOE_OK)
		st = moe_peft_read(dir, &adapter);
	if (st == MOE_OK)
		st = moe_model_set_adapter(m, adapter);
	moe_adapter_free(adapter);
	moe_model_leave(m);
	return st;
}

static enum moe_status get_experts(struct moe_model *m, struct moe_experts *e,
				   struct moe_adapter_entry *out)
{
	float **const to[MOE_LORA_ARRAYS] = { &out->gate_a, &out->up_a,   &out->down_a,
					      &out->gate_b, &out->up_b, &out->down_b };
	int64_t total = 0;
	float *at;

	for (int i = 0; i < MOE_LORA_ARRAYS; i++)
		total += e->E * moe_lora_elements(e, (enum moe_lora_array)i);
	at = out->block = moe_alloc((size_t)total, sizeof *at);
	if (!at)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter");
	for (int i = 0; i < MOE_LORA_ARRAYS; i++) {
		if (i == MOE_UP_A && m->lora.share_a) {
			out->up_a = out->gate_a;
			continue;
		}
		*to[i] = at;
		copy_experts(e, (enum moe_lora_array)i, at, false);
		at += e->E * moe_lora_elements(e, (enum moe_lora_array)i);
	}
	out->n_experts = e->E;
	out->hidden = e->H;
	out->intermediate = e->I;
	return MOE_OK;
}

static enum moe_status get_layer(struct moe_model *m, int i, struct moe_adapter *out)
{
	struct moe_decoder_layer *l = &m->decoder.layers[i];

	for (int j = 0; j < MOE_ADAPTER_TARGETS; j++) {
		struct moe_adapter_entry *e = &out->entries[out->n_entries];
		bool experts = j == MOE_ADAPTER_EXPERTS;

		if (!m->lora.rank[j] || (experts && !l->experts))
			continue;
		e->layer = i;
		e->target = (enum moe_adapter_target)j;
		e->rank = m->lora.rank[j];
		e->alpha = m->lora.alpha[j];
		out->n_entries++;
		if (experts) {
			MOE_TRY(get_experts(m, l->experts, e));
			continue;
		}
		e->in = l->linear[j].weight.k;
		e->out = l->linear[j].weight.n;
		e->a = l->linear[j].lora_a.value;
		e->b = l->linear[j].lora_b.value;
	}
	return MOE_OK;
}

/* A snapshot; values of attention are borrowed, so nothing may be outstanding. */
static enum moe_status get_adapter(struct moe_model *m, struct moe_adapter **result)
{
	size_t most = (size_t)m->decoder.n_layers * MOE_ADAPTER_TARGETS;
	struct moe_adapter *out = moe_calloc(1, sizeof *out);

	*result = out;
	if (out) {
		out->entries = moe_calloc(most, sizeof *out->entries);
		out->base_model = moe_strdup(m->params.dir);
	}
	if (!out || !out->entries || !out->base_model)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter");
	out->rslora = m->lora.rslora;
	out->share_a = m->lora.share_a;
	for (int j = MOE_ADAPTER_TARGETS - 1; j >= 0; j--)
		if (m->lora.rank[j]) {
			out->rank = m->lora.rank[j];
			out->alpha = m->lora.alpha[j];
		}
	for (int i = 0; i < m->decoder.n_layers; i++)
		MOE_TRY(get_layer(m, i, out));
	if (!out->n_entries)
		return moe_fail(MOE_ERR_STATE, "the model has no adapter");
	return MOE_OK;
}

enum moe_status moe_model_write_adapter(struct moe_model *m, const char *dir)
{
	struct moe_adapter *adapter = NULL;
	enum moe_status st = moe_engine_wait(m->engine);

	if (st == MOE_OK)
		st = get_adapter(m, &adapter);
	if (st == MOE_OK)
		st = moe_peft_write(dir, adapter);
	moe_adapter_free(adapter);
	return st;
}

enum moe_status moe_model_save_adapter(struct moe_model *m, const char *dir)
{
	enum moe_status st;

	if (!dir)
		return moe_fail(MOE_ERR_ARG, "dir is NULL");
	MOE_TRY(moe_model_enter(m));
	st = moe_model_write_adapter(m, dir);
	moe_model_leave(m);
	return st;
}
