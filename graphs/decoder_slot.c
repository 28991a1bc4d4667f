/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers and tensors of one micro-batch in flight. */
#include "graphs/decoder.h"

/* Allocates, or only counts where there is no engine. */
struct maker {
	struct moe_engine *e;
	size_t bytes;
	int64_t handles;
	enum moe_status st;
};

static void *take(struct maker *m, size_t count, size_t size)
{
	void *p;

	m->bytes += count * size;
	if (!m->e || m->st != MOE_OK || !count)
		return NULL;
	p = moe_memory_alloc(m->e, count * size, -1, "activations");
	if (!p)
		m->st = moe_fail(MOE_ERR_NOMEM, "no memory for %zu bytes of activations",
				 count * size);
	return p;
}

static float *rows(struct maker *m, int T, int64_t width)
{
	return take(m, (size_t)T * (size_t)width, sizeof(float));
}

static void tensors(struct maker *m, const char *name, int n, bool initialised,
		    struct moe_tensor ***out)
{
	m->handles += n;
	if (m->e && m->st == MOE_OK)
		m->st = moe_tensors_create(m->e, name, n, initialised, out);
}

static void tensor(struct maker *m, const char *name, struct moe_tensor **out)
{
	m->handles++;
	if (!m->e || m->st != MOE_OK)
		return;
	m->st = moe_tensor_create(m->e, name, 0, -1, out);
	if (m->st == MOE_OK)
		moe_tensor_set_initialised(*out);
}

static void join(struct maker *m, const char *name, int n, struct moe_join *out)
{
	m->handles += moe_join_tensors(n);
	if (m->e && m->st == MOE_OK)
		m->st = moe_join_create(m->e, name, n, out);
}

static void span(struct maker *m, const char *name, int n, struct moe_span *out)
{
	m->handles += n > MOE_SPAN_MAX ? n / 6 : 0; /* one for each 8 of a level */
	if (m->e && m->st == MOE_OK)
		m->st = moe_span_create(m->e, name, n, out);
}

static void stream(struct maker *m, const char *name, int T, int n, struct moe_stream *out)
{
	m->handles += 1 + moe_token_blocks(T);
	if (m->e && m->st == MOE_OK)
		m->st = moe_stream_create(m->e, name, T, n, out);
	if (!m->e || m->st == MOE_OK)
		m->bytes += (size_t)T * (size_t)n * sizeof(float);
}

static void make_blocks(struct maker *m, const struct moe_decoder_slot *s,
			struct moe_attn_blocks *b, struct moe_tensor **mid)
{
	tensors(m, "x", s->blocks, false, &b->x);
	tensors(m, "qkv", s->blocks, false, &b->qkv);
	b->mid = mid;
	if (!mid)
		tensors(m, "mid", s->blocks, false, &b->mid);
	tensors(m, "attn", s->blocks * s->ranges, false, &b->attn);
	span(m, "keys", s->blocks, &b->keys);
}

/* Of norms that are trained: a row per token block. */
static void make_norm_parts(struct maker *m, const struct moe_decoder_slot *s,
			    const struct moe_decoder_layer *l, struct moe_attn_state *a)
{
	if (!l->trained)
		return;
	a->attn_norm_part = rows(m, s->blocks, s->decoder->H);
	a->ffn_norm_part = rows(m, s->blocks, s->decoder->H);
	a->q_norm_part = l->q_norm_n ? rows(m, s->blocks, l->q_norm_n) : NULL;
	a->k_norm_part = l->k_norm_n ? rows(m, s->blocks, l->k_norm_n) : NULL;
}

/* All but x. mid: where x_mid and xn are shared, else NULL. */
static void make_inner(struct maker *m, const struct moe_decoder_slot *s,
		       const struct moe_decoder_layer *l, struct moe_attn_state *a,
		       const struct moe_attn_state *mid)
{
	const struct moe_decoder *d = s->decoder;
	int64_t q = (int64_t)d->heads * d->dim, kv = (int64_t)d->kv_heads * d->dim;

	a->x_mid = mid ? mid->x_mid : rows(m, s->T_max, d->H);
	a->xn = mid ? mid->xn : rows(m, s->T_max, d->H);
	a->q = rows(m, s->T_max, q);
	a->k = rows(m, s->T_max, kv);
	a->v = rows(m, s->T_max, kv);
	a->q_pre = l->q_norm_n ? rows(m, s->T_max, q) : NULL;
	a->k_pre = l->k_norm_n ? rows(m, s->T_max, kv) : NULL;
	a->o = rows(m, s->T_max, q);
	a->lse = rows(m, s->T_max, d->heads);
}

static void make_buffers(struct maker *m, const struct moe_decoder_slot *s,
			 const struct moe_decoder_layer *l, struct moe_layer_buffers *b,
			 const struct moe_attn_state *mid)
{
	tensor(m, "kept", &b->kept);
	b->attn.x = rows(m, s->T_max, s->decoder->H);
	if (!l) /* the last layer has its output only */
		return;
	make_inner(m, s, l, &b->attn, mid);
	make_norm_parts(m, s, l, &b->attn);
}

/* What layers that recompute share: a set per parity, so that one can be filled while the other is read. */
static void make_again(struct maker *m, struct moe_decoder_slot *s)
{
	const struct moe_decoder *d = s->decoder;
	bool any = false, have[2] = { false }, x16 = moe_kernels()->x16;

	for (int i = s->lowest; i < d->n_layers; i++) {
		struct moe_layer_buffers *b = &s->again[i & 1];

		if (!moe_decoder_recomputes(s, i) || have[i & 1])
			continue;
		any = have[i & 1] = true;
		tensor(m, "again", &b->kept);
		make_inner(m, s, &d->layers[i], &b->attn, NULL);
		if (x16 && s->has_moe)
			s->again_x16[i & 1] = take(m, (size_t)s->T_max * (size_t)moe_width(d->H), sizeof(uint16_t));
	}
	if (any)
		join(m, "again_all", s->blocks, &s->again_all);
}

/* x and the norms' gradients of a layer that recomputes; the rest is the set's. */
static void make_x(struct maker *m, struct moe_decoder_slot *s, int layer)
{
	struct moe_layer_buffers unused, *b = s->layer ? &s->layer[layer] : &unused;

	*b = s->again[layer & 1];
	b->attn.x = rows(m, s->T_max, s->decoder->H);
	make_norm_parts(m, s, &s->decoder->layers[layer], &b->attn);
}

/*
 * Frozen layers of both parities share x_mid and xn: their experts' state, shared too, says where
 * the input is.
 */
static void make_layers(struct maker *m, struct moe_decoder_slot *s)
{
	const struct moe_decoder *d = s->decoder;

	for (int i = 0; i < 2; i++)
		for (int parity = 0; parity < 2; parity++)
			if (i || s->lowest > parity)
				make_blocks(m, s, &s->blocks_of[i][parity],
					    i ? NULL : s->blocks_of[0][0].mid);
	for (int i = 0; i < MOE_MIN(2, s->lowest); i++)
		make_buffers(m, s, &d->layers[i], &s->frozen[i], i ? &s->frozen[0].attn : NULL);
	make_again(m, s);
	for (int i = s->lowest; i <= d->n_layers; i++) {
		struct moe_layer_buffers unused = { 0 };

		if (moe_decoder_recomputes(s, i)) {
			make_x(m, s, i);
			continue;
		}
		make_buffers(m, s, i < d->n_layers ? &d->layers[i] : NULL,
			     s->layer ? &s->layer[i] : &unused, NULL);
	}
}

/* The experts with the largest LoRA below layer `last`: buffers that layers share are made for them. */
static const struct moe_experts *widest_experts(const struct moe_decoder *d, int last)
{
	const struct moe_experts *widest = NULL;

	for (int i = 0; i < last; i++) {
		const struct moe_experts *l = d->layers[i].experts;

		if (l && (!widest || l->ra > widest->ra))
			widest = l;
	}
	return widest;
}

/* The state of a layer's MLP, unless it is one that is shared and was made before. */
static void make_ffn_state(struct maker *m, struct moe_decoder_slot *s, int layer, bool have[4][2])
{
	const struct moe_decoder_layer *l = &s->decoder->layers[layer];
	int set = layer < s->lowest ? 1 : moe_decoder_recomputes(s, layer) ? 2 + (layer & 1) : 0;
	bool *made = &have[set][l->experts != NULL];

	if (!l->ffn || (set && *made))
		return;
	*made = true;
	m->bytes += (size_t)s->T_max * (5 * (size_t)l->ffn->I + 2) * sizeof(float);
	if (m->e && m->st == MOE_OK)
		m->st = moe_ffn_state_alloc(m->e, l->ffn, s->T_max, moe_decoder_ffn_state(s, layer));
}

/* States of the layers' experts and MLPs; those below the lowest trained layer share one. */
static void make_states(struct maker *m, struct moe_decoder_slot *s)
{
	const struct moe_decoder *d = s->decoder;
	bool frozen_moe = false, ffn[4][2] = { { false } };

	for (int i = 0; i < d->n_layers; i++) {
		const struct moe_decoder_layer *l = &d->layers[i];
		bool frozen = i < s->lowest;
		struct moe_experts_state *state = frozen   ? &s->frozen_moe
						  : s->moe ? &s->moe[i]
							   : NULL;

		if (l->experts && !(frozen && frozen_moe)) {
			const struct moe_experts *x =
				frozen ? widest_experts(d, s->lowest) : l->experts;

			frozen_moe |= frozen;
			m->bytes += moe_experts_state_bytes(x, s->T_max);
			if (m->e && m->st == MOE_OK)
				m->st = moe_experts_state_alloc(m->e, x, s->T_max, state);
			tensor(m, "plan", frozen ? &s->frozen_plan : s->plan ? &s->plan[i] : NULL);
		}
		make_ffn_state(m, s, i, ffn);
	}
}

/* Once, before any task reads them: while tasks run, the submitting thread writes nothing that they read. */
static void bind_states(struct moe_decoder_slot *s)
{
	const struct moe_decoder *d = s->decoder;

	for (int i = 0; i < d->n_layers; i++) {
		const struct moe_experts *l = d->layers[i].experts;
		struct moe_experts_state *state = i < s->lowest ? &s->frozen_moe : &s->moe[i];
		const float *x = moe_decoder_buffers(s, i)->attn.xn;

		if (d->layers[i].ffn)
			moe_decoder_ffn_state(s, i)->x = x;
		if (!l)
			continue;
		if (moe_decoder_recomputes(s, i))
			s->moe[i].x16 = s->again_x16[i & 1];
		moe_experts_state_bind(state, l, &s->moe_scratch, i & 1, s->T_max);
		state->x = x;
		state->grad_out = s->grad_out[i & 1].data;
	}
}

static void make_moe(struct maker *m, struct moe_decoder_slot *s, const struct moe_cut *cut)
{
	const struct moe_experts *l = widest_experts(s->decoder, s->decoder->n_layers);
	struct moe_experts wide;

	if (!l)
		return;
	wide = *l;
	for (int i = 0; i < s->decoder->n_layers; i++) {
		const struct moe_experts *x = s->decoder->layers[i].experts;

		wide.recompute |= moe_decoder_recomputes(s, i);
		if (x && x->part[0].base[MOE_GATE].grad)
			wide.part[0].base[MOE_GATE].grad = x->part[0].base[MOE_GATE].grad;
		if (x && x->grad_router)
			wide.grad_router = x->grad_router;
	}
	l = &wide;
	m->bytes += moe_experts_scratch_bytes(l, s->T_max, s->backward);
	m->handles += moe_slot_tensors_count(l->P, l->G, s->T_max, cut);
	if (s->has_shared)
		m->bytes += (size_t)s->T_max * (size_t)l->H * sizeof(float);
	if (!m->e || m->st != MOE_OK)
		return;
	m->st = moe_experts_scratch_alloc(m->e, l, s->T_max, s->backward, &s->moe_scratch);
	if (m->st == MOE_OK)
		m->st = moe_slot_tensors_create(m->e, l->P, l->G, s->T_max, l->H, cut,
						s->has_shared, &s->st);
}

static void make_backward(struct maker *m, struct moe_decoder_slot *s)
{
	const struct moe_decoder *d = s->decoder;
	int64_t q = (int64_t)d->heads * d->dim, kv = (int64_t)d->kv_heads * d->dim;

	for (int i = 0; i < 2; i++) {
		struct moe_attn_ring *g = &s->ring[i];

		stream(m, "grad_out", s->T_max, d->H, &s->grad_out[i]);
		stream(m, "grad_mid", s->T_max, d->H, &s->grad_mid[i]);
		g->grad.grad_o = rows(m, s->T_max, q);
		g->grad.centre = rows(m, s->T_max, d->heads);
		g->grad.grad_q = rows(m, s->T_max, q);
		g->grad.grad_k = rows(m, s->T_max, kv);
		g->grad.grad_v = rows(m, s->T_max, kv);
		tensor(m, "users", &g->users);
		tensors(m, "grad_o", s->blocks, false, &g->grad_o);
		tensors(m, "grad_q", s->blocks * s->ranges, false, &g->q);
		tensors(m, "grad_kv", s->blocks * s->ranges, false, &g->kv);
		span(m, "grad_o", s->blocks, &g->span);
		join(m, "projections", s->blocks, &g->all);
	}
}

static void make_head(struct maker *m, struct moe_decoder_slot *s)
{
	const struct moe_decoder *d = s->decoder;
	int C = d->head.n_chunks;

	for (int i = 0; i < MOE_HEAD_RING; i++) {
		struct moe_head_ring *h = &s->head[i];

		h->state.hn = rows(m, MOE_TOKEN_BLOCK, d->H);
		h->state.logits = rows(m, MOE_TOKEN_BLOCK, d->V);
		/* a chunk's rows lie on every page of it: the first task would take all its page faults */
		if (h->state.logits && !moe_engine_is_dry(m->e))
			memset(h->state.logits, 0,
			       (size_t)MOE_TOKEN_BLOCK * (size_t)d->V * sizeof(float));
		h->state.max = rows(m, MOE_TOKEN_BLOCK, C);
		h->state.sum = rows(m, MOE_TOKEN_BLOCK, C);
		h->state.tgt = rows(m, MOE_TOKEN_BLOCK, 1);
		h->state.lse = rows(m, MOE_TOKEN_BLOCK, 1);
		if (s->backward)
			h->state.dx = rows(m, C * MOE_TOKEN_BLOCK, d->H);
		tensor(m, "hn", &h->hn);
		tensor(m, "loss", &h->loss);
		tensors(m, "logits", C, false, &h->chunk);
		join(m, "chunks", C, &h->chunks);
		join(m, "chunks_bwd", C, &h->chunks_bwd);
	}
	s->row_loss = take(m, (size_t)s->T_max, sizeof *s->row_loss);
	if (d->final_trained) {
		join(m, "final_norm", s->blocks, &s->final_all);
		s->final_part = rows(m, moe_decoder_row_blocks(s->blocks), d->H);
	}
}

static void make(struct maker *m, struct moe_decoder_slot *s, const struct moe_cut *cut)
{
	make_layers(m, s);
	make_states(m, s);
	make_moe(m, s, cut);
	if (s->has_dense)
		tensors(m, "hidden", s->blocks, false, &s->hidden);
	if (s->backward)
		make_backward(m, s);
	make_head(m, s);
}

/* What follows from the decoder's shape. */
static void describe(struct moe_decoder_slot *s, const struct moe_decoder *d, int lowest, int T_max)
{
	int most;

	memset(s, 0, sizeof *s);
	s->decoder = d;
	s->T_max = T_max;
	s->blocks = moe_token_blocks(T_max);
	s->lowest = lowest;
	s->backward = lowest < d->n_layers;
	/* many blocks are parallel enough, and every (block, range) is a handle */
	most = MOE_MAX(1, MOE_MIN(MOE_HEAD_RANGES, MOE_HEAD_TASKS / MOE_MAX(1, s->blocks)));
	s->ranges = moe_decoder_ranges(d->heads, most,
				       2 * moe_attention_us(MOE_TOKEN_BLOCK, T_max, d->dim) *
					       (d->heads / d->kv_heads));
	for (int i = 0; i < d->n_layers; i++) {
		s->has_moe |= d->layers[i].experts != NULL;
		s->has_dense |= d->layers[i].experts == NULL;
		s->has_shared |= d->layers[i].experts && d->layers[i].ffn;
	}
}

enum moe_status moe_decoder_slot_create(struct moe_engine *e, const struct moe_decoder *d,
					const struct moe_decoder_tensors *t, int T_max,
					struct moe_decoder_slot *s)
{
	struct maker m = { .e = e, .st = MOE_OK };
	size_t L = (size_t)d->n_layers;

	describe(s, d, t->lowest, T_max);
	s->engine = e;
	s->layer = moe_calloc(L + 1, sizeof *s->layer);
	s->moe = moe_calloc(L, sizeof *s->moe);
	s->plan = moe_calloc(L, sizeof(struct moe_tensor *));
	s->ffn = moe_calloc(L, sizeof *s->ffn);
	s->at_projections = moe_calloc((size_t)s->blocks, sizeof(struct moe_tensor *));
	if (!s->layer || !s->moe || !s->plan || !s->ffn ||
	    !s->at_projections)
		m.st = moe_fail(MOE_ERR_NOMEM, "no memory for a slot");
	else
		make(&m, s, &t->cut);
	if (m.st == MOE_OK)
		bind_states(s);
	else
		moe_decoder_slot_destroy(s);
	return m.st;
}

size_t moe_decoder_slot_bytes(const struct moe_decoder *d, int lowest, int T_max)
{
	struct moe_cut cut = { .slices_i = 1, .slices_h = 1, .combine_blocks = 1, .lora_groups = 1 };
	struct moe_decoder_slot s;
	struct maker m = { .st = MOE_OK };

	describe(&s, d, lowest, T_max);
	make(&m, &s, &cut);
	return m.bytes;
}

int64_t moe_decoder_slot_handles(const struct moe_decoder *d, int lowest, const struct moe_cut *cut,
				 int T_max)
{
	struct moe_decoder_slot s;
	struct maker m = { .st = MOE_OK };

	describe(&s, d, lowest, T_max);
	make(&m, &s, cut);
	return m.handles;
}

void moe_decoder_set_recompute(struct moe_decoder_layer *l, bool recompute)
{
	l->recompute = recompute;
	if (l->experts)
		l->experts->recompute = l->experts->recompute_x = recompute;
}

/* ---- keys and values of a text ---- */

size_t moe_decoder_text_bytes(const struct moe_decoder *d, int positions)
{
	return 2 * (size_t)d->n_layers * (size_t)positions * (size_t)(d->kv_heads * d->dim) * sizeof(float);
}

static void forget_text(struct moe_decoder_slot *s)
{
	for (int i = 0; s->text && i < s->decoder->n_layers; i++) {
		moe_memory_free(s->engine, s->text[i].k);
		moe_memory_free(s->engine, s->text[i].v);
	}
	moe_free(s->text);
	s->text = NULL;
}

enum moe_status moe_decoder_slot_keep_text(struct moe_decoder_slot *s)
{
	const struct moe_decoder *d = s->decoder;
	struct maker m = { .e = s->engine, .st = MOE_OK };

	MOE_ASSERT(!s->backward && !s->text);
	s->text = moe_calloc((size_t)d->n_layers, sizeof *s->text);
	if (!s->text)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a text's keys and values");
	for (int i = 0; i < d->n_layers; i++) {
		s->text[i] = s->frozen[i & 1].attn;
		s->text[i].k = rows(&m, d->positions, (int64_t)d->kv_heads * d->dim);
		s->text[i].v = rows(&m, d->positions, (int64_t)d->kv_heads * d->dim);
	}
	if (m.st != MOE_OK)
		forget_text(s);
	return m.st;
}

static void free_buffers(struct moe_engine *e, struct moe_layer_buffers *b)
{
	struct moe_attn_state *a = &b->attn;
	float *const all[] = { a->x,	 a->x_mid, a->xn, a->q,		     a->k,
			       a->v,	 a->q_pre, a->k_pre, a->o,	     a->lse,
			       a->attn_norm_part, a->ffn_norm_part, a->q_norm_part, a->k_norm_part };

	moe_tensor_destroy(b->kept);
	for (size_t i = 0; i < MOE_COUNT(all); i++)
		moe_memory_free(e, all[i]);
}

/* Leaves what the layer has of its own. */
static void forget_again(struct moe_layer_buffers *b)
{
	b->attn = (struct moe_attn_state){ .x = b->attn.x,
					   .attn_norm_part = b->attn.attn_norm_part,
					   .ffn_norm_part = b->attn.ffn_norm_part,
					   .q_norm_part = b->attn.q_norm_part,
					   .k_norm_part = b->attn.k_norm_part };
	b->kept = NULL;
}

static void free_layers(struct moe_decoder_slot *s)
{
	struct moe_engine *e = s->engine;

	s->blocks_of[0][1].mid = NULL;
	s->frozen[1].attn.x_mid = s->frozen[1].attn.xn = NULL;
	for (int i = 0; i < 4; i++) {
		struct moe_attn_blocks *b = &s->blocks_of[i / 2][i % 2];

		moe_tensors_destroy(b->x, s->blocks);
		moe_tensors_destroy(b->qkv, s->blocks);
		moe_tensors_destroy(b->mid, s->blocks);
		moe_tensors_destroy(b->attn, s->blocks * s->ranges);
		moe_span_destroy(&b->keys);
	}
	for (int i = 0; s->layer && i <= s->decoder->n_layers; i++) {
		struct moe_layer_buffers *b = &s->layer[i];

		if (moe_decoder_recomputes(s, i))
			forget_again(b);
		free_buffers(e, b);
	}
	for (int i = 0; i < 2; i++) {
		free_buffers(e, &s->frozen[i]);
		free_buffers(e, &s->again[i]);
		moe_memory_free(e, s->again_x16[i]);
	}
	moe_join_destroy(&s->again_all);
}

static void free_states(struct moe_decoder_slot *s)
{
	const struct moe_experts *l = widest_experts(s->decoder, s->decoder->n_layers);
	struct moe_engine *e = s->engine;

	for (int i = 0; i < s->decoder->n_layers; i++) {
		if (s->moe && l)
			moe_experts_state_free(e, &s->moe[i], l->P);
		if (s->plan)
			moe_tensor_destroy(s->plan[i]);
		if (s->ffn)
			moe_ffn_state_free(e, &s->ffn[i]);
	}
	moe_ffn_state_free(e, &s->frozen_dense);
	moe_ffn_state_free(e, &s->frozen_shared);
	for (int i = 0; i < 2; i++) {
		moe_ffn_state_free(e, &s->again_dense[i]);
		moe_ffn_state_free(e, &s->again_shared[i]);
	}
	moe_tensor_destroy(s->frozen_plan);
	if (!l)
		return;
	moe_experts_state_free(e, &s->frozen_moe, l->P);
	moe_experts_scratch_free(e, &s->moe_scratch, l->P);
	if (s->st.T_max)
		moe_slot_tensors_destroy(e, &s->st);
}

static void free_ring(struct moe_decoder_slot *s, int i)
{
	struct moe_attn_ring *g = &s->ring[i];

	moe_stream_destroy(s->engine, &s->grad_out[i]);
	moe_stream_destroy(s->engine, &s->grad_mid[i]);
	moe_memory_free(s->engine, g->grad.grad_o);
	moe_memory_free(s->engine, g->grad.centre);
	moe_memory_free(s->engine, g->grad.grad_q);
	moe_memory_free(s->engine, g->grad.grad_k);
	moe_memory_free(s->engine, g->grad.grad_v);
	moe_tensor_destroy(g->users);
	moe_tensors_destroy(g->grad_o, s->blocks);
	moe_tensors_destroy(g->q, s->blocks * s->ranges);
	moe_tensors_destroy(g->kv, s->blocks * s->ranges);
	moe_span_destroy(&g->span);
	moe_join_destroy(&g->all);
}

static void free_head(struct moe_decoder_slot *s, struct moe_head_ring *h)
{
	float *const all[] = { h->state.hn,  h->state.logits, h->state.max, h->state.sum,
			       h->state.tgt, h->state.lse,    h->state.dx };

	for (size_t i = 0; i < MOE_COUNT(all); i++)
		moe_memory_free(s->engine, all[i]);
	moe_tensor_destroy(h->hn);
	moe_tensor_destroy(h->loss);
	moe_tensors_destroy(h->chunk, s->decoder->head.n_chunks);
	moe_join_destroy(&h->chunks);
	moe_join_destroy(&h->chunks_bwd);
}

void moe_decoder_slot_destroy(struct moe_decoder_slot *s)
{
	if (!s->engine)
		return;
	forget_text(s);
	free_layers(s);
	free_states(s);
	moe_tensors_destroy(s->hidden, s->blocks);
	for (int i = 0; i < 2; i++)
		free_ring(s, i);
	for (int i = 0; i < MOE_HEAD_RING; i++)
		free_head(s, &s->head[i]);
	moe_memory_free(s->engine, s->row_loss);
	moe_memory_free(s->engine, s->final_part);
	moe_join_destroy(&s->final_all);
	moe_free(s->layer);
	moe_free(s->moe);
	moe_free(s->plan);
	moe_free(s->ffn);
	moe_free(s->at_projections);
	memset(s, 0, sizeof *s);
}
