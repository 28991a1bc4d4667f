/* SPDX-License-Identifier: Apache-2.0 */
/* Backward of a decoder's layers, down to the lowest trained one. */
#include "graphs/decoder.h"

bool moe_decoder_trains(const struct moe_decoder_layer *l, int linear)
{
	return l->linear[linear].lora_a.grad != NULL;
}

int moe_decoder_lowest(const struct moe_decoder *d)
{
	for (int i = 0; i < d->n_layers; i++) {
		const struct moe_decoder_layer *l = &d->layers[i];

		if (l->experts && (l->experts->a_gu.grad || l->experts->router_lora ||
				   l->experts->router_param.m))
			return i;
		if (l->ffn && moe_ffn_trained(l->ffn))
			return i;
		if ((l->experts && l->experts->part[0].base[MOE_GATE].m) || moe_full_trains_layer(d, i))
			return i;
		for (int j = 0; j < MOE_ATTN_LINEARS; j++)
			if (moe_decoder_trains(l, j))
				return i;
	}
	return d->n_layers;
}

enum moe_status moe_decoder_begin_grad_out(const struct moe_context *c, struct moe_decoder_slot *s,
					   int ring)
{
	/* the expert tasks of the ring's last layer hold its join, not the stream */
	return moe_task_join(c, NULL, 0, s->grad_out[ring].users,
			     s->has_moe ? s->st.grad_out[ring].out : NULL);
}

static struct moe_attn_args args_of(struct moe_decoder_pass *p, int layer, int block)
{
	struct moe_decoder_slot *s = p->slot;
	int ring = layer & 1;

	return (struct moe_attn_args){
		.decoder = p->decoder,
		.layer = &p->decoder->layers[layer],
		.drop = moe_decoder_drop(p, layer),
		.state = &s->layer[layer].attn,
		.grad = &s->ring[ring].grad,
		.batch = p->batch,
		.t0 = moe_block_begin(block),
		.t1 = moe_block_end(block, p->batch.T),
		.grad_mid = s->grad_mid[ring].data,
	};
}

static enum moe_status submit_ffn_bwd(const struct moe_context *c, struct moe_decoder_pass *p,
				      int layer, bool first)
{
	const struct moe_decoder_layer *l = &p->decoder->layers[layer];
	struct moe_decoder_slot *s = p->slot;
	struct moe_layer_buffers *buffers = &s->layer[layer];
	struct moe_stream *out = &s->grad_out[layer & 1], *mid = &s->grad_mid[layer & 1];
	struct moe_norm_bwd norm = { .x = buffers->attn.x_mid,
				     .w = l->ffn_norm,
				     .eps = p->decoder->eps,
				     .residual = out->data,
				     .part = buffers->attn.ffn_norm_part };

	moe_stream_resize(mid, p->batch.T);
	MOE_TRY(moe_stream_begin(c, mid));
	if (l->experts) {
		struct moe_moe_pass pass = moe_decoder_moe_pass(p, layer);
		struct moe_stream xn =
			moe_decoder_stream(s, buffers->attn.xn, moe_decoder_blocks(s, layer)->mid,
					   buffers->kept, p->batch.T);

		return moe_graph_moe_backward(c, &pass, &xn, out, &norm, out, first, mid);
	}
	for (int b = 0; b < mid->n_blocks; b++) {
		struct moe_token_args a = { .ffn = l->ffn,
					    .ffn_state = moe_decoder_ffn_state(s, layer),
					    .t0 = moe_block_begin(b),
					    .t1 = moe_block_end(b, p->batch.T),
					    .drop = moe_decoder_drop(p, layer),
					    .residual = out->data,
					    .out = mid->data,
					    .norm = norm };

		MOE_TRY(moe_task_ffn_bwd(c, &a, b, s->hidden[b], out->block[b],
					 p->tensors->ffn_lora[layer], NULL, mid->users,
					 mid->block[b]));
	}
	return MOE_OK;
}

/* First block after the last whose rows see keys of block b. */
static int last_reader(const struct moe_batch *batch, int b)
{
	int n = moe_token_blocks(batch->T), end = moe_block_end(b, batch->T);

	for (b++; b < n && batch->doc_start[moe_block_begin(b)] < end; b++)
		;
	return b;
}

/* Gradients of q, k and v of every block; counts of slices into n_q, n_kv. */
static enum moe_status submit_attention_bwd(const struct moe_context *c, struct moe_decoder_pass *p,
					    int layer, int b, int *n_q, int *n_kv)
{
	const struct moe_decoder *d = p->decoder;
	struct moe_decoder_slot *s = p->slot;
	struct moe_attn_ring *g = &s->ring[layer & 1];
	struct moe_tensor *kept = s->layer[layer].kept, *readers[MOE_SPAN_MAX];
	struct moe_attn_args a = args_of(p, layer, b);
	int end = last_reader(&p->batch, b), m = a.t1 - a.t0;
	double us = 1.5 * moe_attention_us(m, a.t1 - p->batch.doc_start[a.t0], d->dim);
	struct moe_tensor_list in = { readers, 0 };

	*n_q = moe_decoder_ranges(d->heads, s->ranges, us);
	for (int i = 0; i < *n_q; i++) {
		a.h0 = d->heads * i / *n_q;
		a.h1 = d->heads * (i + 1) / *n_q;
		MOE_TRY(moe_task_attention_bwd_q(c, &a, b, i, g->grad_o[b], kept, g->users,
						 g->q[b * s->ranges + i]));
	}
	us = 2 * moe_attention_us(m, MOE_TOKEN_BLOCK * (int64_t)(end - b), d->dim);
	*n_kv = moe_decoder_ranges(d->kv_heads, s->ranges, us * (d->heads / d->kv_heads));
	in.n = moe_span_collect(&g->span, g->grad_o, b, end, readers);
	for (int i = 0; i < *n_kv; i++) {
		a.h0 = d->kv_heads * i / *n_kv;
		a.h1 = d->kv_heads * (i + 1) / *n_kv;
		MOE_TRY(moe_task_attention_bwd_kv(c, &a, b, i, in, kept, g->users,
						  g->kv[b * s->ranges + i]));
	}
	return MOE_OK;
}

static enum moe_status submit_qkv_bwd(const struct moe_context *c, struct moe_decoder_pass *p,
				      int layer, bool want_x)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_attn_ring *g = &s->ring[layer & 1];
	struct moe_stream *mid = &s->grad_mid[layer & 1], *x = &s->grad_out[~layer & 1];
	struct moe_tensor **lora = p->tensors->lora + layer * MOE_ATTN_LINEARS;
	struct moe_tensor *done[2 * MOE_HEAD_RANGES];

	for (int b = 0; b < mid->n_blocks; b++) {
		struct moe_attn_args a = args_of(p, layer, b);
		struct moe_tensor_list grads = { done, 0 };
		int n_q, n_kv;

		MOE_TRY(submit_attention_bwd(c, p, layer, b, &n_q, &n_kv));
		for (int i = 0; i < n_q; i++)
			done[grads.n++] = g->q[b * s->ranges + i];
		for (int i = 0; i < n_kv; i++)
			done[grads.n++] = g->kv[b * s->ranges + i];
		a.grad_x = want_x ? x->data : NULL;
		MOE_TRY(moe_task_qkv_bwd(c, &a, b, grads, mid->block[b], lora, s->layer[layer].kept,
					 g->users, want_x ? x->users : NULL,
					 want_x ? x->block[b] : NULL));
		s->at_projections[b] = g->q[b * s->ranges];
	}
	return moe_join_submit(c, &g->all, s->at_projections, mid->n_blocks, NULL);
}

/* Everything before x_mid: o projection, attention, q, k and v projections. */
static enum moe_status submit_attention_path(const struct moe_context *c,
					     struct moe_decoder_pass *p, int layer, bool want_x)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_attn_ring *g = &s->ring[layer & 1];
	struct moe_stream *mid = &s->grad_mid[layer & 1];

	MOE_TRY(moe_task_join(c, NULL, 0, g->users, NULL));
	for (int b = 0; b < mid->n_blocks; b++) {
		struct moe_attn_args a = args_of(p, layer, b);

		MOE_TRY(moe_task_attn_out_bwd(
			c, &a, b, mid->block[b],
			p->tensors->lora[layer * MOE_ATTN_LINEARS + MOE_ATTN_O],
			p->slot->layer[layer].kept, g->users, g->grad_o[b]));
	}
	MOE_TRY(moe_span_submit(c, &g->span, g->grad_o, mid->n_blocks));
	if (want_x) {
		moe_stream_resize(&s->grad_out[~layer & 1], p->batch.T);
		MOE_TRY(moe_decoder_begin_grad_out(c, s, ~layer & 1));
	}
	return submit_qkv_bwd(c, p, layer, want_x);
}

static enum moe_status submit_linear_grads(const struct moe_context *c, struct moe_decoder_pass *p,
					   int layer, bool first)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_attn_ring *g = &s->ring[layer & 1];
	struct moe_attn_args a = args_of(p, layer, 0);

	a.first = first;
	for (a.linear = 0; a.linear < MOE_ATTN_LINEARS; a.linear++) {
		int i = layer * MOE_ATTN_LINEARS + a.linear;
		struct moe_tensor *users =
			a.linear == MOE_ATTN_O ? s->grad_mid[layer & 1].users : g->users;

		if (moe_decoder_trains(a.layer, a.linear))
			MOE_TRY(moe_task_linear_grad(c, &a, g->all.out, s->layer[layer].kept, users,
						     p->tensors->lora[i], p->tensors->grad[i]));
	}
	return MOE_OK;
}

/* The last layer of a set: nothing has overwritten what its forward left. */
static bool still_there(const struct moe_decoder_slot *s, int layer)
{
	for (int i = layer + 2; i < s->decoder->n_layers; i += 2)
		if (moe_decoder_recomputes(s, i))
			return false;
	return true;
}

/*
 * x_mid, xn and the hidden rows of the MLP of a layer that recomputes. The set may be overwritten when nothing reads the
 * layer that was in it last; then its readers wait for all of it.
 */
static enum moe_status submit_again(const struct moe_context *c, struct moe_decoder_pass *p, int layer)
{
	const struct moe_decoder_layer *l = &p->decoder->layers[layer];
	struct moe_decoder_slot *s = p->slot;
	struct moe_tensor **mid = moe_decoder_blocks(s, layer)->mid, *kept = s->layer[layer].kept;
	int n = moe_token_blocks(p->batch.T);

	if (still_there(s, layer))
		return MOE_OK;
	MOE_TRY(moe_task_join(c, NULL, 0, kept, NULL));
	MOE_TRY(moe_decoder_submit_attention(c, p, layer));
	for (int b = 0; l->ffn && b < n; b++) {
		struct moe_token_args a = { .ffn = l->ffn,
					    .ffn_state = moe_decoder_ffn_state(s, layer),
					    .t0 = moe_block_begin(b),
					    .t1 = moe_block_end(b, p->batch.T),
					    .drop = moe_decoder_drop(p, layer) };

		MOE_TRY(moe_task_ffn_up(c, &a, b, mid[b], p->tensors->ffn_lora[layer],
					l->experts ? s->st.ffn[b] : s->hidden[b]));
	}
	return moe_join_submit(c, &s->again_all, mid, n, kept);
}

/* LoRA of the dense MLP or the shared experts. */
static enum moe_status submit_ffn_lora_grads(const struct moe_context *c, struct moe_decoder_pass *p,
					     int layer, bool first)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_stream *out = &s->grad_out[layer & 1];
	struct moe_token_args a = { .ffn = p->decoder->layers[layer].ffn,
				    .ffn_state = moe_decoder_ffn_state(s, layer),
				    .t1 = p->batch.T,
				    .drop = moe_decoder_drop(p, layer),
				    .first = first,
				    .residual = out->data };

	for (int i = 0; a.ffn && i < MOE_FFN_MATRICES; i++) {
		a.matrix = (enum moe_ffn_matrix)i;
		if (moe_ffn_trains(a.ffn, i))
			MOE_TRY(moe_task_ffn_lora_grad(c, &a, s->ring[layer & 1].all.out,
						       s->layer[layer].kept,
						       i == MOE_FFN_DOWN ? out->users : NULL,
						       p->tensors->ffn_lora[layer][i],
						       p->tensors->ffn_grad[layer][i]));
	}
	return MOE_OK;
}

enum moe_status moe_graph_decoder_backward(const struct moe_context *c, struct moe_decoder_pass *p,
					   bool first)
{
	struct moe_decoder_slot *s = p->slot;
	int L = p->decoder->n_layers;

	for (int l = L - 1; l >= s->lowest; l--) {
		const struct moe_decoder_layer *layer = &p->decoder->layers[l];
		struct moe_context lc = moe_decoder_context(c, l, 2 * L - l);
		struct moe_stream *mid = &s->grad_mid[l & 1];
		bool below = l > s->lowest || moe_full_trains_embed(p->decoder);
		bool qkv = moe_decoder_trains(layer, MOE_ATTN_Q) ||
			   moe_decoder_trains(layer, MOE_ATTN_K) ||
			   moe_decoder_trains(layer, MOE_ATTN_V);

		if (moe_decoder_recomputes(s, l))
			MOE_TRY(submit_again(&lc, p, l));
		MOE_TRY(submit_ffn_bwd(&lc, p, l, first));
		if (below || qkv)
			MOE_TRY(submit_attention_path(&lc, p, l, below));
		else /* the backward ends here, after everything that reads the layer's buffers */
			MOE_TRY(moe_join_submit(&lc, &s->ring[l & 1].all, mid->block, mid->n_blocks,
						s->layer[l].kept));
		MOE_TRY(submit_linear_grads(&lc, p, l, first));
		MOE_TRY(submit_ffn_lora_grads(&lc, p, l, first));
		MOE_TRY(moe_full_layer_grads(&lc, p, l, first));
	}
	return moe_full_trains_embed(p->decoder) ? moe_full_embed_grads(c, p, first) : MOE_OK;
}
