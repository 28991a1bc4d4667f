/* SPDX-License-Identifier: Apache-2.0 */
/* Forward of a decoder's layers. */
#include "graphs/decoder.h"

#define TASK_US 1000 /* aim of one attention task in the reference path */

struct moe_context moe_decoder_context(const struct moe_context *c, int layer, int depth)
{
	struct moe_context out = *c;

	out.layer = layer;
	out.priority = c->priority + MOE_PRIORITY_LAYER * depth;
	return out;
}

struct moe_stream moe_decoder_stream(struct moe_decoder_slot *s, float *data,
				     struct moe_tensor **block, struct moe_tensor *users, int T)
{
	return (struct moe_stream){
		.T = T,
		.T_max = s->T_max,
		.n = s->decoder->H,
		.n_blocks = moe_token_blocks(T),
		.max_blocks = s->blocks,
		.data = data,
		.block = block,
		.users = users,
	};
}

struct moe_ffn_state *moe_decoder_ffn_state(struct moe_decoder_slot *s, int layer)
{
	bool shared = s->decoder->layers[layer].experts != NULL;

	if (layer < s->lowest)
		return shared ? &s->frozen_shared : &s->frozen_dense;
	if (moe_decoder_recomputes(s, layer))
		return shared ? &s->again_shared[layer & 1] : &s->again_dense[layer & 1];
	return &s->ffn[layer];
}

/* Number of a layer among those with experts. */
static int experts_index(const struct moe_decoder *d, int layer)
{
	int n = 0;

	for (int i = 0; i < layer; i++)
		n += d->layers[i].experts != NULL;
	return n;
}

struct moe_moe_pass moe_decoder_moe_pass(struct moe_decoder_pass *p, int layer)
{
	const struct moe_decoder_layer *l = &p->decoder->layers[layer];
	struct moe_decoder_slot *s = p->slot;
	bool frozen = layer < s->lowest;
	struct moe_moe_pass pass = {
		.layer = l->experts,
		.state = frozen ? &s->frozen_moe : &s->moe[layer],
		.ffn = l->ffn,
		.ffn_state = moe_decoder_ffn_state(s, layer),
		.ffn_lora = p->tensors->ffn_lora[layer],
		.lt = &p->tensors->moe[layer],
		.st = &s->st,
		.plan = frozen ? s->frozen_plan : s->plan[layer],
		.ring = layer & 1,
		.has_grads = l->experts->a_gu.grad != NULL,
		.drop = moe_decoder_drop(p, layer),
		.again = moe_decoder_recomputes(s, layer) ? s->layer[layer].kept : NULL,
		.share = p->share,
		.result = p->router ? &p->router[layer] : NULL,
	};

	moe_pass_set_copies(&pass, &p->tensors->ring, experts_index(p->decoder, layer));
	return pass;
}

int moe_decoder_ranges(int heads, int max, double us_per_head)
{
	int want = (int)(heads * us_per_head / TASK_US) + 1;

	return MOE_MIN(MOE_MIN(want, heads), max);
}

/* Orders the layer's first writers after everything that still reads its buffers. */
static enum moe_status begin(const struct moe_context *c, struct moe_decoder_slot *s, int layer)
{
	return moe_task_join(c, NULL, 0, moe_decoder_buffers(s, layer)->kept, NULL);
}

static struct moe_attn_args args_of(struct moe_decoder_pass *p, int layer, int block)
{
	return (struct moe_attn_args){
		.decoder = p->decoder,
		.layer = &p->decoder->layers[layer],
		.drop = moe_decoder_drop(p, layer),
		.state = p->batch.text ? &p->slot->text[layer] : &moe_decoder_buffers(p->slot, layer)->attn,
		.batch = p->batch,
		.t0 = moe_block_begin(block),
		.t1 = moe_block_end(block, p->batch.T),
	};
}

enum moe_status moe_decoder_submit_attention(const struct moe_context *c, struct moe_decoder_pass *p,
					     int layer)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_attn_blocks *h = moe_decoder_blocks(s, layer);
	struct moe_tensor *kept = moe_decoder_buffers(s, layer)->kept, *keys[MOE_SPAN_MAX];
	struct moe_tensor **lora = p->tensors->lora + layer * MOE_ATTN_LINEARS;
	int n = moe_token_blocks(p->batch.T);
	uint16_t *xn16 = p->decoder->layers[layer].experts ? moe_decoder_moe_pass(p, layer).state->x16
							    : NULL;

	for (int b = 0; b < n; b++) {
		struct moe_attn_args a = args_of(p, layer, b);

		MOE_TRY(moe_task_qkv(c, &a, b, h->x[b], lora, kept, h->qkv[b]));
	}
	MOE_TRY(moe_span_submit(c, &h->keys, h->qkv, n));
	for (int b = 0; b < n; b++) {
		struct moe_attn_args a = args_of(p, layer, b);
		int first = p->batch.doc_start[a.t0], past = p->batch.past;
		int ranges = moe_decoder_ranges(
			p->decoder->heads, s->ranges,
			moe_attention_us(a.t1 - a.t0, past + a.t1 - first, p->decoder->dim));
		struct moe_tensor **parts = h->attn + b * s->ranges;
		struct moe_tensor_list in = { keys, 0 };

		in.n = moe_span_collect(&h->keys, h->qkv, MOE_MAX(first - past, 0) / MOE_TOKEN_BLOCK,
				      b + 1, keys);
		for (int i = 0; i < ranges; i++) {
			a.h0 = p->decoder->heads * i / ranges;
			a.h1 = p->decoder->heads * (i + 1) / ranges;
			MOE_TRY(moe_task_attention(c, &a, b, i, in, kept, parts[i]));
		}
		a.xn16 = xn16;
		MOE_TRY(moe_task_attn_out(c, &a, b, (struct moe_tensor_list){ parts, ranges },
					  h->x[b], lora[MOE_ATTN_O], kept, h->mid[b]));
	}
	return MOE_OK;
}

static enum moe_status submit_dense(const struct moe_context *c, struct moe_decoder_pass *p,
				    int layer, struct moe_stream *mid, struct moe_stream *out)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_ffn_state *state = moe_decoder_ffn_state(s, layer);
	struct moe_tensor **lora = p->tensors->ffn_lora[layer];

	for (int b = 0; b < mid->n_blocks; b++) {
		struct moe_token_args a = { .ffn = p->decoder->layers[layer].ffn,
					    .ffn_state = state,
					    .t0 = moe_block_begin(b),
					    .t1 = moe_block_end(b, p->batch.T),
					    .drop = moe_decoder_drop(p, layer),
					    .residual = mid->data,
					    .out = out->data };

		MOE_TRY(moe_task_ffn_up(c, &a, b, mid->block[b], lora, s->hidden[b]));
		MOE_TRY(moe_task_ffn_down(c, &a, b, s->hidden[b], lora, mid->block[b], out->users,
					  out->block[b]));
	}
	return MOE_OK;
}

static enum moe_status submit_layer(const struct moe_context *c, struct moe_decoder_pass *p,
				    int layer)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_layer_buffers *b = moe_decoder_buffers(s, layer);
	struct moe_layer_buffers *next = moe_decoder_buffers(s, layer + 1);
	struct moe_attn_blocks *h = moe_decoder_blocks(s, layer);
	struct moe_context after = *c;
	int T = p->batch.T;
	struct moe_stream mid = moe_decoder_stream(s, b->attn.x_mid, h->mid, b->kept, T);
	struct moe_stream xn = moe_decoder_stream(s, b->attn.xn, h->mid, b->kept, T);
	struct moe_stream out = moe_decoder_stream(
		s, next->attn.x, moe_decoder_blocks(s, layer + 1)->x, next->kept, T);

	after.priority += 3;
	MOE_TRY(moe_decoder_submit_attention(c, p, layer));
	MOE_TRY(begin(c, s, layer + 1));
	if (p->decoder->layers[layer].experts) {
		struct moe_moe_pass pass = moe_decoder_moe_pass(p, layer);

		return moe_graph_moe_forward(&after, &pass, &xn, &mid, &out);
	}
	return submit_dense(&after, p, layer, &mid, &out);
}

static enum moe_status check(const struct moe_decoder_pass *p)
{
	if (p->batch.T < 1 || p->batch.T > p->slot->T_max)
		return moe_fail(MOE_ERR_ARG, "a micro-batch of %d tokens; 1 to %d are possible",
				p->batch.T, p->slot->T_max);
	if (p->batch.text && (!p->slot->text || p->batch.past + p->batch.T > p->decoder->positions))
		return moe_fail(MOE_ERR_ARG, "%d tokens after %d; a text of %d is possible", p->batch.T,
				p->batch.past, p->slot->text ? p->decoder->positions : 0);
	if (p->batch.n_rows < 0 || p->batch.n_rows > p->batch.T)
		return moe_fail(MOE_ERR_ARG, "%d rows of %d tokens", p->batch.n_rows, p->batch.T);
	for (int d = 0; d < p->batch.n_docs; d++)
		if (p->batch.doc_first[d + 1] - p->batch.doc_first[d] > p->decoder->positions)
			return moe_fail(MOE_ERR_ARG, "document %d has %d tokens; %d are possible",
					d, p->batch.doc_first[d + 1] - p->batch.doc_first[d],
					p->decoder->positions);
	return MOE_OK;
}

enum moe_status moe_graph_decoder_forward(const struct moe_context *c, struct moe_decoder_pass *p)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_context head = moe_decoder_context(c, -1, 0);

	MOE_TRY(check(p));
	MOE_TRY(begin(&head, s, 0));
	for (int b = 0; b < moe_token_blocks(p->batch.T); b++) {
		struct moe_attn_args a = args_of(p, 0, b);

		MOE_TRY(moe_task_embed(&head, &a, b, moe_full_embed_ready(&p->tensors->full),
				       moe_decoder_buffers(s, 0)->kept,
				       moe_decoder_blocks(s, 0)->x[b]));
	}
	for (int l = 0; l < p->decoder->n_layers; l++) {
		struct moe_context layer = moe_decoder_context(c, l, l);

		MOE_TRY(submit_layer(&layer, p, l));
	}
	return MOE_OK;
}
