/* SPDX-License-Identifier: Apache-2.0 */
/* LoRA of a model: initial values, and adapters to and from disk. */
#include "api/lora_init.h"
#include "api/model.h"

#include "codelets/router_lora.h"
#include "model/adapters/adapter_form.h"

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

/* Rows beyond a projection's own rank stay 0, as the B that meets them does. */
static enum moe_status init_experts(struct moe_model *m, int layer, struct moe_experts *e)
{
	static const enum moe_lora_array arrays[3] = { MOE_GATE_A, MOE_UP_A, MOE_DOWN_A };
	float *a = moe_calloc((size_t)e->r * (size_t)MOE_MAX(e->H, e->I), sizeof *a);

	if (!a)
		return moe_fail(MOE_ERR_NOMEM, "no memory for LoRA");
	for (int j = 0; j < 3; j++) {
		int rank = j == 2 ? m->lora.down_rank : m->lora.gate_up_rank;
		int64_t in = j == 2 ? e->I : e->H;

		if (j == 1 && m->lora.share_a)
			continue;
		memset(a, 0, (size_t)(e->r * in) * sizeof *a);
		for (int x = 0; x < e->E; x++) {
			moe_lora_init_a(m->params.seed, layer, MOE_ADAPTER_EXPERTS + j, x, rank, in, a);
			moe_experts_set(e, arrays[j], MOE_VALUE, x, a);
		}
	}
	moe_free(a);
	return MOE_OK;
}

/* LoRA that is in the graph, of one matrix [out, in]: attention's projections and dense MLPs. */
struct single_lora {
	struct moe_param *a, *b;
	int64_t in, out;
};

/* false: the target is another, or not adapted in the layer. */
static bool find_single(struct moe_model *m, int layer, enum moe_adapter_target t, struct single_lora *out)
{
	struct moe_decoder_layer *l = &m->decoder.layers[layer];
	struct moe_matrix_lora *f;
	int which;

	memset(out, 0, sizeof *out);
	if (t == MOE_ADAPTER_EXPERTS || t == MOE_ADAPTER_ROUTER || !moe_lora_rank(&m->lora, t, layer))
		return false;
	if (t < MOE_ADAPTER_ATTENTION) {
		*out = (struct single_lora){ &l->linear[t].lora_a, &l->linear[t].lora_b,
						 l->linear[t].weight.k, l->linear[t].weight.n };
		return true;
	}
	which = moe_ffn_matrix_of(t);
	f = &l->ffn->lora[which];
	out->a = &f->a;
	out->b = &f->b;
	moe_ffn_shape(l->ffn, which, &out->out, &out->in);
	return true;
}

/* Of the random numbers of A; attention's and the experts' are below it, and the router's. */
#define FFN_SEED 17

static enum moe_status init_single(struct moe_model *m, int layer, enum moe_adapter_target t)
{
	int target = t < MOE_ADAPTER_ATTENTION ? (int)t : FFN_SEED + (int)moe_ffn_matrix_of(t);
	struct single_lora p;

	if (!find_single(m, layer, t, &p))
		return MOE_OK;
	MOE_TRY(alloc_param(m, p.a));
	MOE_TRY(alloc_param(m, p.b));
	if (!moe_engine_is_dry(m->engine))
		moe_lora_init_a(m->params.seed, layer, target, 0, m->lora.rank[t], p.in, p.a->value);
	return MOE_OK;
}

enum moe_status moe_model_init_lora(struct moe_model *m)
{
	for (int i = 0; i < m->decoder.n_layers; i++) {
		struct moe_decoder_layer *l = &m->decoder.layers[i];

		for (int t = 0; t < MOE_ADAPTER_TARGETS; t++)
			MOE_TRY(init_single(m, i, (enum moe_adapter_target)t));
		if (l->experts && l->experts->r && !moe_engine_is_dry(m->engine))
			MOE_TRY(init_experts(m, i, l->experts));
	}
	return MOE_OK;
}

static enum moe_status other_rank(const struct moe_adapter_entry *e, int64_t rank, double scale,
				  int own, double own_scale)
{
	return moe_fail(
		MOE_ERR_ARG,
		"the adapter's %s has rank %lld and scale %g, the model's %d and %g: open the "
		"model with this adapter instead",
		moe_adapter_target_name(e->target), (long long)rank, scale, own, own_scale);
}

static bool same(double a, double b)
{
	return fabs(a - b) <= 1e-6 * fabs(b);
}

/* What the engine computes B A with. */
static double scale_of(const struct moe_model *m, enum moe_adapter_target t)
{
	return m->lora.rank[t] ? moe_lora_scaling(m->lora.rslora, m->lora.rank[t], m->lora.alpha[t])
			       : 0;
}

static enum moe_status check_experts(const struct moe_model *m, const struct moe_adapter *adapter,
				     const struct moe_adapter_entry *e)
{
	double scale = scale_of(m, e->target);

	if (e->gate_up_rank != m->lora.gate_up_rank)
		return other_rank(e, e->gate_up_rank, moe_adapter_gate_up_scaling(adapter, e),
				  m->lora.gate_up_rank, scale);
	if (e->rank != m->lora.down_rank)
		return other_rank(e, e->rank, moe_adapter_scaling(adapter, e), m->lora.down_rank,
				  scale);
	if (e->gate_up_rank && !same(moe_adapter_gate_up_scaling(adapter, e), scale))
		return other_rank(e, e->gate_up_rank, moe_adapter_gate_up_scaling(adapter, e),
				  m->lora.gate_up_rank, scale);
	if (m->lora.share_a && !adapter->share_a)
		return moe_fail(MOE_ERR_ARG,
				"the adapter has an A each for gate and up; the model's "
				"share one");
	return MOE_OK;
}

static enum moe_status check_fit(const struct moe_model *m, const struct moe_adapter *adapter)
{
	MOE_TRY(moe_adapter_check(adapter, &m->arch));
	for (size_t i = 0; i < adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &adapter->entries[i];
		int rank = moe_lora_rank(&m->lora, e->target, e->layer);

		if (e->weight)
			continue;
		if (e->target == MOE_ADAPTER_EXPERTS) {
			MOE_TRY(check_experts(m, adapter, e));
			continue;
		}
		if (rank != e->rank ||
		    !same(moe_adapter_scaling(adapter, e), scale_of(m, e->target)))
			return other_rank(e, e->rank, moe_adapter_scaling(adapter, e), rank,
					  scale_of(m, e->target));
	}
	return MOE_OK;
}

/* The routers' own weights are not kept where an adapter has others. */
static enum moe_status check_routers(const struct moe_model *m, const struct moe_adapter *adapter)
{
	int want = m->lora.router_weights ? moe_arch_moe_layers(&m->arch) : 0, n = 0;

	for (size_t i = 0; i < adapter->n_entries; i++)
		n += adapter->entries[i].weight != NULL;
	return n == want ? MOE_OK
			 : moe_fail(MOE_ERR_ARG,
				    "the adapter has the weights of %d routers, the model has %d from elsewhere: "
				    "open the model with this adapter instead",
				    n, want);
}

/*
 * One array of all experts between an adapter's own rank, [E, rows, columns] with rank rows (A) or
 * columns (B), and the engine's, at least as large: zeros beyond. grow: factor on the way in.
 */
static enum moe_status copy_experts(struct moe_experts *e, enum moe_lora_array a, int64_t rank,
				    float *all, double grow, bool set)
{
	bool is_b = a >= MOE_GATE_B;
	int64_t n = moe_lora_elements(e, a), lines = is_b ? n / e->r : 1;
	int64_t wide = n / lines, narrow = wide / e->r * rank; /* of a line */
	float *piece;

	if (!rank)
		return MOE_OK;
	piece = moe_calloc((size_t)n, sizeof *piece);
	if (!piece)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter");
	for (int x = 0; x < e->E; x++, all += lines * narrow) {
		if (!set)
			moe_experts_get(e, a, MOE_VALUE, x, piece);
		for (int64_t line = 0; line < lines; line++)
			for (int64_t i = 0; i < narrow; i++)
				if (set)
					piece[line * wide + i] =
						(float)(all[line * narrow + i] * grow);
				else
					all[line * narrow + i] = piece[line * wide + i];
		if (set)
			moe_experts_set(e, a, MOE_VALUE, x, piece);
	}
	moe_free(piece);
	return MOE_OK;
}

static enum moe_status set_experts(struct moe_model *m, const struct moe_adapter *adapter,
				   const struct moe_adapter_entry *e)
{
	struct moe_experts *x = m->decoder.layers[e->layer].experts;
	int64_t R = e->gate_up_rank;
	/* the engine has one scale; down's B takes up a difference */
	double grow = e->rank ? moe_adapter_scaling(adapter, e) / scale_of(m, e->target) : 1;

	if (same(grow, 1))
		grow = 1;
	MOE_TRY(copy_experts(x, MOE_GATE_A, R, e->gate_a, 1, true));
	if (!m->lora.share_a)
		MOE_TRY(copy_experts(x, MOE_UP_A, R, e->up_a ? e->up_a : e->gate_a, 1, true));
	MOE_TRY(copy_experts(x, MOE_DOWN_A, e->rank, e->down_a, 1, true));
	MOE_TRY(copy_experts(x, MOE_GATE_B, R, e->gate_b, 1, true));
	MOE_TRY(copy_experts(x, MOE_UP_B, R, e->up_b, 1, true));
	return copy_experts(x, MOE_DOWN_B, e->rank, e->down_b, grow, true);
}

/* A router's weight from f32 [E, H]; its memory has room for F32. */
static void set_router(struct moe_experts *x, const float *weight)
{
	size_t bytes = (size_t)x->E * (size_t)x->H * sizeof(float);

	if (x->router_param.value)
		memcpy(x->router_param.value, weight, bytes);
	else
		moe_kernels()->weight_pack(&x->router_weight, weight, MOE_F32, x->E, x->H, x->H,
					   MOE_USE_EXACT);
}

static enum moe_status set_entry(struct moe_model *m, const struct moe_adapter *adapter,
				 const struct moe_adapter_entry *e)
{
	size_t a = (size_t)(e->rank * e->in) * sizeof(float),
	       b = (size_t)(e->rank * e->out) * sizeof(float);
	struct single_lora p;

	if (e->target == MOE_ADAPTER_EXPERTS)
		return set_experts(m, adapter, e);
	if (e->weight) {
		set_router(m->decoder.layers[e->layer].experts, e->weight);
		return MOE_OK;
	}
	if (find_single(m, e->layer, e->target, &p)) {
		memcpy(p.a->value, e->a, a);
		memcpy(p.b->value, e->b, b);
	} else {
		memcpy(m->folded[e->layer].a, e->a, a);
		memcpy(m->folded[e->layer].b, e->b, b);
	}
	return MOE_OK;
}

/* B = 0 where the adapter has nothing for a target: it then changes nothing there. */
static void clear_absent(struct moe_model *m, const struct moe_adapter *adapter)
{
	for (int i = 0; i < m->decoder.n_layers; i++) {
		struct moe_decoder_layer *l = &m->decoder.layers[i];
		struct moe_experts *e = l->experts;

		if (m->folded && m->folded[i].r && !moe_adapter_find(adapter, i, MOE_ADAPTER_ROUTER))
			memset(m->folded[i].b, 0,
			       (size_t)(m->folded[i].n * m->folded[i].r) * sizeof(float));
		for (int j = 0; j < MOE_ADAPTER_TARGETS; j++) {
			enum moe_adapter_target t = (enum moe_adapter_target)j;
			struct single_lora p;

			if (find_single(m, i, t, &p) && !moe_adapter_find(adapter, i, t))
				memset(p.b->value, 0, (size_t)p.b->piece * sizeof(float));
		}
		if (!e || !e->r || moe_adapter_find(adapter, i, MOE_ADAPTER_EXPERTS))
			continue;
		memset(e->down_b.value, 0, (size_t)(e->E * e->down_b.piece) * sizeof(float));
		moe_param_pack_all(&e->down_b, 0, e->E);
		for (int p = 0; p < e->P; p++) {
			const struct moe_experts_part *part = &e->part[p];

			memset(part->gate_b.value, 0,
			       (size_t)(e->E * part->gate_b.piece) * sizeof(float));
			memset(part->up_b.value, 0,
			       (size_t)(e->E * part->up_b.piece) * sizeof(float));
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

		if (e)
			clear_moments(&e->router_param, 1);
		if (e && e->router_lora) {
			clear_moments(&e->router_lora->a, 1);
			clear_moments(&e->router_lora->b, 1);
		}
		for (int j = 0; j < MOE_ADAPTER_TARGETS; j++) {
			struct single_lora p;

			if (!find_single(m, i, (enum moe_adapter_target)j, &p))
				continue;
			clear_moments(p.a, 1);
			clear_moments(p.b, 1);
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
		MOE_TRY(set_entry(m, adapter, &adapter->entries[i]));
	MOE_TRY(moe_model_fold(m));
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
		st = moe_adapter_read(dir, &adapter);
	if (st == MOE_OK)
		st = check_routers(m, adapter);
	if (st == MOE_OK)
		st = moe_model_set_adapter(m, adapter);
	moe_adapter_free(adapter);
	moe_model_leave(m);
	return st;
}

static enum moe_status get_experts(struct moe_model *m, struct moe_experts *x,
				   struct moe_adapter_entry *e)
{
	bool share_a = m->lora.share_a;
	int64_t R = m->lora.gate_up_rank, r = m->lora.down_rank;
	double scale = scale_of(m, MOE_ADAPTER_EXPERTS);

	e->n_experts = x->E;
	e->hidden = x->H;
	e->intermediate = x->I;
	e->gate_up_rank = R;
	e->rank = r;
	e->gate_up_alpha = R ? moe_lora_alpha(m->lora.rslora, R, scale) : 0;
	e->alpha = r ? moe_lora_alpha(m->lora.rslora, r, scale) : 0;
	MOE_TRY(moe_adapter_alloc_experts(e, share_a));
	MOE_TRY(copy_experts(x, MOE_GATE_A, R, e->gate_a, 1, false));
	if (!share_a)
		MOE_TRY(copy_experts(x, MOE_UP_A, R, e->up_a, 1, false));
	MOE_TRY(copy_experts(x, MOE_DOWN_A, r, e->down_a, 1, false));
	MOE_TRY(copy_experts(x, MOE_GATE_B, R, e->gate_b, 1, false));
	MOE_TRY(copy_experts(x, MOE_UP_B, R, e->up_b, 1, false));
	return copy_experts(x, MOE_DOWN_B, r, e->down_b, 1, false);
}

static void get_folded(const struct moe_folded_lora *g, struct moe_adapter_entry *e)
{
	e->in = g->k;
	e->out = g->n;
	e->a = g->a;
	e->b = g->b;
}

static enum moe_status get_layer(struct moe_model *m, int i, struct moe_adapter *out)
{
	struct moe_decoder_layer *l = &m->decoder.layers[i];
	struct single_lora p;

	for (int j = 0; j < MOE_ADAPTER_TARGETS; j++) {
		struct moe_adapter_entry *e = &out->entries[out->n_entries];

		e->layer = i;
		e->target = (enum moe_adapter_target)j;
		if (j == MOE_ADAPTER_ROUTER && l->experts && m->lora.router_weights) {
			e->in = l->experts->H;
			e->out = l->experts->E;
			e->weight = l->experts->router_weight.data; /* exact F32: rows as they are */
			out->n_entries++;
			continue;
		}
		if (!moe_lora_rank(&m->lora, e->target, i))
			continue;
		e->rank = m->lora.rank[j];
		e->alpha = m->lora.alpha[j];
		out->n_entries++;
		if (find_single(m, i, e->target, &p)) {
			e->in = p.in;
			e->out = p.out;
			e->a = p.a->value;
			e->b = p.b->value;
		} else if (j == MOE_ADAPTER_EXPERTS) {
			MOE_TRY(get_experts(m, l->experts, e));
		} else {
			get_folded(&m->folded[i], e);
		}
	}
	return MOE_OK;
}

/* The configuration's r and lora_alpha: attention's first, else the experts' own rank. */
static void get_defaults(const struct moe_model *m, struct moe_adapter *out)
{
	const struct moe_lora_plan *p = &m->lora;

	for (int j = MOE_ADAPTER_TARGETS - 1; j >= 0; j--) {
		if (!p->rank[j])
			continue;
		out->rank = p->rank[j];
		out->alpha = p->alpha[j];
		if (j != MOE_ADAPTER_EXPERTS)
			continue;
		out->rank = p->down_rank ? p->down_rank : p->gate_up_rank;
		out->alpha = moe_lora_alpha(p->rslora, out->rank, scale_of(m, MOE_ADAPTER_EXPERTS));
	}
}

/* A snapshot; values of attention are borrowed, so nothing may be outstanding. */
static enum moe_status get_adapter(struct moe_model *m, struct moe_adapter **result)
{
	size_t most = (size_t)m->decoder.n_layers * MOE_ADAPTER_TARGETS;
	struct moe_adapter *out = moe_calloc(1, sizeof *out);
	/* beside experts that are trained themselves it belongs to where they were saved, if they were */
	const char *base = m->params.method == MOE_METHOD_LORA ? m->params.dir : m->written;

	*result = out;
	if (out) {
		out->entries = moe_calloc(most, sizeof *out->entries);
		out->base_model = base ? moe_strdup(base) : NULL;
	}
	if (!out || !out->entries || (base && !out->base_model))
		return moe_fail(MOE_ERR_NOMEM, "no memory for an adapter");
	out->rslora = m->lora.rslora;
	out->share_a = m->lora.share_a;
	out->dropout = m->params.lora_dropout;
	out->mixtral = !strcmp(m->arch.name, "mixtral");
	memcpy(out->partial, m->lora.partial, sizeof out->partial);
	get_defaults(m, out);
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
		st = moe_adapter_write(dir, adapter, m->params.adapter_format);
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
