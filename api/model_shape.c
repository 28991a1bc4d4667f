/* SPDX-License-Identifier: Apache-2.0 */
/* From config.json to a decoder without weights, and what its memory will be. */
#include "api/model.h"

#include "codelets/ffn_bwd.h"
#include "engine/available.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_MOE_HANDLES 36000 /* of 50,000: attention and the LM head need some too */

static void shape_linear(const struct moe_model *m, int layer, enum moe_adapter_target t, int64_t n,
			 int64_t k, struct moe_linear *l)
{
	int r = moe_lora_rank(&m->lora, t, layer);

	l->weight.n = n;
	l->weight.k = k;
	l->r = r;
	if (r)
		l->scale = (float)moe_lora_scaling(m->lora.rslora, r, m->lora.alpha[t]);
	l->lora_a.piece = r * k;
	l->lora_b.piece = r * n;
}

/* LoRA of the layer's shared experts or dense MLP; its memory comes later. */
static void shape_ffn_lora(const struct moe_model *m, int layer, struct moe_ffn *f)
{
	bool moe = m->arch.layer_is_moe[layer];

	for (int i = 0; i < MOE_FFN_MATRICES; i++) {
		enum moe_adapter_target t = (enum moe_adapter_target)(
			i != MOE_FFN_SIGMOID ? (moe ? MOE_ADAPTER_SHARED_FFN : MOE_ADAPTER_DENSE_FFN) + i
					     : (int)MOE_ADAPTER_SHARED_GATE);
		struct moe_matrix_lora *l = &f->lora[i];
		int64_t n, k;

		if ((i == MOE_FFN_SIGMOID && !moe) || !moe_lora_rank(&m->lora, t, layer))
			continue;
		moe_ffn_shape(f, i, &n, &k);
		l->r = m->lora.rank[t];
		l->scale = (float)moe_lora_scaling(m->lora.rslora, l->r, m->lora.alpha[t]);
		l->a.piece = l->r * k;
		l->b.piece = l->r * n;
	}
}

static enum moe_status shape_layer(struct moe_model *m, int i)
{
	const struct moe_arch *a = &m->arch;
	struct moe_decoder_layer *l = &m->decoder.layers[i];
	int64_t q = (int64_t)a->n_heads * a->head_dim, kv = (int64_t)a->n_kv_heads * a->head_dim;
	int64_t ffn = a->layer_is_moe[i] ? a->shared_intermediate : a->intermediate;

	shape_linear(m, i, MOE_ADAPTER_Q, q, a->hidden, &l->linear[MOE_ATTN_Q]);
	shape_linear(m, i, MOE_ADAPTER_K, kv, a->hidden, &l->linear[MOE_ATTN_K]);
	shape_linear(m, i, MOE_ADAPTER_V, kv, a->hidden, &l->linear[MOE_ATTN_V]);
	shape_linear(m, i, MOE_ADAPTER_O, a->hidden, q, &l->linear[MOE_ATTN_O]);
	if (a->qk_norm != MOE_QK_NORM_NONE) {
		bool head = a->qk_norm == MOE_QK_NORM_HEAD;

		l->q_norm_n = head ? a->head_dim : (int)q;
		l->k_norm_n = head ? a->head_dim : (int)kv;
	}
	if (ffn) {
		l->ffn = moe_calloc(1, sizeof *l->ffn);
		if (!l->ffn)
			return moe_fail(MOE_ERR_NOMEM, "no memory for a layer");
		l->ffn->H = (int)a->hidden;
		l->ffn->I = (int)ffn;
		shape_ffn_lora(m, i, l->ffn);
	}
	if (!a->layer_is_moe[i])
		return MOE_OK;
	l->experts = moe_calloc(1, sizeof *l->experts);
	if (!l->experts)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a layer");
	l->experts->E = a->n_experts;
	l->experts->k = a->top_k;
	l->experts->H = (int)a->hidden;
	l->experts->I = (int)a->moe_intermediate;
	l->experts->P = moe_engine_parts(m->engine);
	l->experts->r = moe_lora_rank(&m->lora, MOE_ADAPTER_EXPERTS, i);
	l->experts->G = (a->n_experts - 1) / m->group_size + 1;
	l->experts->ra = (m->lora.share_a ? 1 : 2) * l->experts->r;
	for (int p = 0; p < l->experts->P; p++)
		l->experts->part[p].I = a->moe_intermediate * (p + 1) / l->experts->P -
					a->moe_intermediate * p / l->experts->P;
	l->experts->router = moe_router_find(a->router);
	if (!l->experts->router)
		return moe_fail(MOE_ERR_UNSUPPORTED, "router \"%s\" is not implemented", a->router);
	l->experts->router_config =
		(struct moe_router_config){ a->n_experts, a->top_k, a->norm_topk_prob };
	l->experts->aux_coef = m->params.inference_only ? 0 : (float)m->params.aux_coef;
	return l->experts->router->check(&l->experts->router_config);
}

static struct moe_load load_of(const struct moe_model *m)
{
	const struct moe_arch *a = &m->arch;

	return (struct moe_load){
		.E = MOE_MAX(1, a->n_experts),
		.k = MOE_MAX(1, a->top_k),
		.H = (int)a->hidden,
		.P = moe_engine_parts(m->engine),
		.I = MOE_MAX(a->moe_intermediate, 1),
		.T = m->params.max_tokens,
		.workers = moe_engine_workers(m->engine),
	};
}

/* Most copies of a layer that the backward may take turns in; what is wrong is said later. */
static int ring_entries(const struct moe_model *m)
{
	const char *text = m->params.backward_weights;
	enum moe_backward_mode mode;
	int ring = 2;

	if (m->params.inference_only)
		return 0;
	if (text && strcmp(text, "auto") && moe_backward_mode_parse(text, &mode, &ring) != MOE_OK)
		return 0;
	return MOE_MIN(ring, moe_arch_moe_layers(&m->arch));
}

/*
 * From the work per task, then larger until the tensors of all layers and slots stay below
 * MAX_MOE_HANDLES (a handle is 4 KB with Debian's StarPU), with the few slices that many groups have.
 */
static int choose_group_size(const struct moe_model *m)
{
	const struct moe_arch *a = &m->arch;
	struct moe_load load = load_of(m);
	int E = load.E, P = load.P;
	int size = moe_group_size_choose(&load, moe_machine()), ring = ring_entries(m);
	struct moe_cut cut = { 1, 3, 1 };

	for (; size < E; size++) {
		int G = (E - 1) / size + 1;
		int64_t n = moe_arch_moe_layers(a) * moe_layer_tensors_count(P, G, 1, false);

		n += m->params.slots * moe_slot_tensors_count(P, G, m->params.max_tokens, &cut) +
		     (int64_t)ring * P * G;
		if (n <= MAX_MOE_HANDLES)
			break;
	}
	return size;
}

enum moe_status moe_model_shape(struct moe_model *m)
{
	const struct moe_arch *a = &m->arch;
	struct moe_decoder *d = &m->decoder;
	int chunks = (int)((a->vocab + MOE_VOCAB_CHUNK - 1) / MOE_VOCAB_CHUNK);

	d->n_layers = a->n_layers;
	d->H = (int)a->hidden;
	d->heads = a->n_heads;
	d->kv_heads = a->n_kv_heads;
	d->dim = a->head_dim;
	d->V = a->vocab;
	d->eps = (float)a->rms_eps;
	d->positions = (int)MOE_MIN((int64_t)m->params.max_tokens, a->max_positions);
	if (d->heads % d->kv_heads || d->dim % 2)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%d heads over %d kv heads of %d", d->heads,
				d->kv_heads, d->dim);
	d->layers = moe_calloc((size_t)d->n_layers, sizeof *d->layers);
	d->head.chunk = moe_calloc((size_t)chunks, sizeof *d->head.chunk);
	d->head.n_chunks = chunks;
	d->embed = d->head;
	if (!a->tie_embeddings)
		d->embed.chunk = moe_calloc((size_t)chunks, sizeof *d->embed.chunk);
	if (!d->layers || !d->head.chunk || !d->embed.chunk)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a decoder");
	m->group_size = choose_group_size(m);
	for (int i = 0; i < d->n_layers; i++)
		MOE_TRY(shape_layer(m, i));
	return MOE_OK;
}

static size_t pair_bytes(const struct moe_model *m, const struct moe_param *a, const struct moe_param *b)
{
	return (size_t)(a->piece + b->piece) * sizeof(float) * (m->params.inference_only ? 1 : 4);
}

/* A router's: base and the gradient of its weight too. */
static size_t router_bytes(const struct moe_model *m, int layer)
{
	size_t E = (size_t)m->arch.n_experts, H = (size_t)m->arch.hidden;
	size_t r = (size_t)moe_lora_rank(&m->lora, MOE_ADAPTER_ROUTER, layer);
	bool trained = !m->params.inference_only;

	return r ? ((trained ? 2 : 1) * E * H + (trained ? 4 : 1) * r * (E + H)) * sizeof(float) : 0;
}

/* LoRA with gradients and moments. */
static size_t lora_bytes(const struct moe_model *m)
{
	size_t bytes = 0;

	for (int i = 0; i < m->decoder.n_layers; i++) {
		const struct moe_decoder_layer *l = &m->decoder.layers[i];
		const struct moe_experts *e = l->experts;

		for (int j = 0; j < MOE_ATTN_LINEARS; j++)
			bytes += pair_bytes(m, &l->linear[j].lora_a, &l->linear[j].lora_b);
		for (int j = 0; l->ffn && j < MOE_FFN_MATRICES; j++)
			bytes += pair_bytes(m, &l->ffn->lora[j].a, &l->ffn->lora[j].b);
		bytes += router_bytes(m, i);
		if (e)
			bytes += (size_t)e->E * ((size_t)(e->ra + e->r) * (size_t)e->H +
						 3 * (size_t)e->r * (size_t)e->I) *
				 sizeof(float) * (m->params.inference_only ? 1 : 4);
	}
	return bytes;
}

/* Bytes of StarPU's handles; Debian's build takes 4 KB each (design.md 3). */
static size_t handle_bytes(const struct moe_model *m, int lowest)
{
	struct moe_cut cut = { 1, 1, 1 };
	int64_t n = 0, ring = 0;

	for (int i = 0; i < m->decoder.n_layers; i++) {
		const struct moe_experts *e = m->decoder.layers[i].experts;

		if (!e)
			continue;
		cut = moe_cut_choose(e, m->params.max_tokens, moe_engine_workers(m->engine), 0, 0);
		n += moe_layer_tensors_count(e->P, e->G, cut.slices_i, false);
		ring = ring_entries(m) * e->P * e->G;
	}
	n += ring;
	n += m->params.slots *
	     moe_decoder_slot_handles(&m->decoder, lowest, &cut, m->params.max_tokens);
	return (size_t)n * 4096;
}

/* memory: bytes that are left for copies, < 0: any. */
static enum moe_status choose_backward(struct moe_model *m, int64_t memory)
{
	const char *text = m->params.backward_weights;
	struct moe_backward_params p = { .load = load_of(m),
					 .layers = moe_arch_moe_layers(&m->arch),
					 .memory = memory };
	int ring;

	if (m->format) { /* quantised weights have no transposed copies */
		if (text && strcmp(text, "auto") && strcmp(text, "direct"))
			return moe_fail(MOE_ERR_UNSUPPORTED,
					"backward weights \"%s\"; the experts are %s, with which \"direct\" is possible",
					text, m->format->name);
		text = "direct";
	}
	if (m->params.inference_only || !p.layers) { /* no backward: only the name is looked at */
		if (text && strcmp(text, "auto"))
			MOE_TRY(moe_backward_mode_parse(text, &m->backward.mode, &ring));
		m->backward = (struct moe_backward_choice){ .mode = MOE_BACKWARD_DIRECT };
	} else {
		MOE_TRY(moe_backward_select(text, &p, moe_machine(), &m->backward));
	}
	m->params.backward_weights =
		moe_backward_text(&m->backward, m->backward_text, sizeof m->backward_text);
	return MOE_OK;
}

/* Experts in the format they are converted to, all else in 16 bits. */
static size_t converted_bytes(const struct moe_model *m, const struct moe_param_count *count)
{
	struct moe_coding c = moe_format_coding(m->convert, m->arch.moe_intermediate);
	double each = c.format->bits / 8.0 + (double)moe_scale_bytes(&c) / (double)c.group;
	int64_t experts = count->groups[MOE_PARAMS_EXPERTS];

	return 2 * (size_t)(count->total - experts) + (size_t)(each * (double)experts);
}

/* Everything that opening would allocate against the limit, before any of it is. */
enum moe_status moe_model_plan_memory(struct moe_model *m, const struct moe_safetensors *st)
{
	size_t weights = 0, lora = lora_bytes(m), slot, handles, total;
	size_t limit = m->params.memory_limit > 0 ? (size_t)m->params.memory_limit
						  : moe_memory_available("");
	int lowest = m->params.inference_only || !lora ? m->decoder.n_layers : 0;
	const char *backward = m->params.backward_weights;
	struct moe_param_count count;

	MOE_TRY(moe_model_choose_format(m, st));
	moe_arch_count_params(&m->arch, &count);
	if (!st)
		weights = 2 * (size_t)count.total;
	for (size_t i = 0; st && i < moe_safetensors_count(st); i++)
		weights += moe_safetensors_at(st, i)->bytes;
	if (m->convert)
		weights = converted_bytes(m, &count);
	slot = moe_decoder_slot_bytes(&m->decoder, lowest, m->params.max_tokens);
	if (m->params.keep_text)
		slot += moe_decoder_text_bytes(&m->decoder, m->decoder.positions);
	handles = handle_bytes(m, lowest);
	total = weights + lora + slot * (size_t)m->params.slots + handles;
	if (total <= limit)
		return choose_backward(m, !st && backward && strcmp(backward, "auto")
						  ? -1
						  : (int64_t)MOE_MIN(limit - total, (size_t)INT64_MAX));
	if (!st) /* an estimate says how much is missing */
		return choose_backward(m, backward && strcmp(backward, "auto") ? -1 : 0);
	return moe_fail(MOE_ERR_NOFIT,
			"the model needs %.2f GiB: weights %.2f, LoRA with gradients and moments %.2f, "
			"activations %d x %.2f, handles %.2f; %.2f GiB %s. Smaller max_tokens or slots, "
			"or fewer LoRA targets or ranks need less",
			(double)total / 0x1p30, (double)weights / 0x1p30, (double)lora / 0x1p30,
			m->params.slots, (double)slot / 0x1p30, (double)handles / 0x1p30,
			(double)limit / 0x1p30,
			m->params.memory_limit > 0 ? "are allowed" : "are available");
}

static void free_linear(struct moe_engine *e, struct moe_linear *l)
{
	float *const all[] = { l->bias,	    l->lora_a.value, l->lora_a.grad, l->lora_a.m, l->lora_a.v,
			       l->lora_b.value, l->lora_b.grad,  l->lora_b.m,    l->lora_b.v };

	moe_memory_free(e, l->weight.data);
	for (size_t i = 0; i < MOE_COUNT(all); i++)
		moe_memory_free(e, all[i]);
}

static void free_layer(struct moe_engine *e, struct moe_decoder_layer *l)
{
	float *const all[] = { l->attn_norm, l->ffn_norm, l->q_norm, l->k_norm };

	for (size_t i = 0; i < MOE_COUNT(all); i++)
		moe_memory_free(e, all[i]);
	for (int j = 0; j < MOE_ATTN_LINEARS; j++)
		free_linear(e, &l->linear[j]);
	if (l->experts)
		moe_experts_free(e, l->experts);
	if (l->ffn)
		moe_ffn_free(e, l->ffn);
	moe_free(l->experts);
	moe_free(l->ffn);
}

static void free_vocab(struct moe_engine *e, struct moe_vocab *v)
{
	for (int i = 0; v->chunk && i < v->n_chunks; i++)
		moe_memory_free(e, v->chunk[i].data);
	moe_free(v->chunk);
}

void moe_model_free_decoder(struct moe_model *m)
{
	struct moe_decoder *d = &m->decoder;

	for (int i = 0; d->layers && i < d->n_layers; i++)
		free_layer(m->engine, &d->layers[i]);
	moe_free(d->layers);
	if (d->embed.chunk != d->head.chunk)
		free_vocab(m->engine, &d->embed);
	free_vocab(m->engine, &d->head);
	moe_memory_free(m->engine, d->final_norm);
	moe_memory_free(m->engine, d->rope);
	memset(d, 0, sizeof *d);
}
