/* SPDX-License-Identifier: Apache-2.0 */
/* From config.json to a decoder without weights, and what its memory will be. */
#include "api/model.h"
#include "api/pass.h"

#include "codelets/ffn_bwd.h"

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
	struct moe_glu glu = moe_glu_of((float)a->swiglu_limit, 0, 0);

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
		l->ffn->glu = glu;
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
	l->experts->glu = glu;
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
	if (!m->params.inference_only) { /* a mean over the layers */
		l->experts->aux_coef = (float)(m->params.aux_coef / moe_arch_moe_layers(a));
		l->experts->z_coef = (float)(m->params.z_coef / moe_arch_moe_layers(a));
	}
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
	int slots = m->params.slots ? m->params.slots : m->params.inference_only ? 1 : 2; /* at most */
	struct moe_cut cut = { .slices_i = 1, .slices_h = 3, .combine_blocks = 1, .lora_groups = 1 };

	for (; size < E; size++) {
		int G = (E - 1) / size + 1;
		int64_t n = moe_arch_moe_layers(a) *
			    moe_layer_tensors_count(P, G, 1, moe_model_trains(m, MOE_ROLE_EXPERT_GATE));

		n += slots * moe_slot_tensors_count(P, G, m->params.max_tokens, &cut) +
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
	return moe_model_shape_trained(m);
}

/* memory: bytes that are left for copies, < 0: any. */
enum moe_status moe_model_choose_backward(struct moe_model *m, int64_t memory)
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

	moe_model_free_trained(m);
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
