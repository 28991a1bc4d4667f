/* SPDX-License-Identifier: Apache-2.0 */
/* LM head: logits, loss and its gradient, by blocks of rows and chunks of the vocabulary. */
#include "graphs/decoder.h"

#define MAX_BLOCKS 48 /* token blocks of one row block: bounds the handles of its tasks */
#define CHUNKS_DIRECT 8

struct row_block {
	int index, r0, r1; /* entries of batch.row */
};

/* The rows from r0 on: at most MOE_TOKEN_BLOCK of them, in at most MAX_BLOCKS token blocks. */
static struct row_block next_rows(const struct moe_batch *b, int index, int r0)
{
	struct row_block out = { .index = index, .r0 = r0, .r1 = r0 };
	int blocks = 0, last = -1;

	for (; out.r1 < b->n_rows && out.r1 - r0 < MOE_TOKEN_BLOCK; out.r1++) {
		if (b->row[out.r1] / MOE_TOKEN_BLOCK == last)
			continue;
		if (++blocks > MAX_BLOCKS)
			break;
		last = b->row[out.r1] / MOE_TOKEN_BLOCK;
	}
	return out;
}

int moe_decoder_row_blocks(int token_blocks)
{
	/* each but the last is full, or spans MAX_BLOCKS token blocks */
	return token_blocks + token_blocks / MAX_BLOCKS + 2;
}

/* The token blocks that hold rows r0..r1, each once. */
static int blocks_with_rows(const struct moe_batch *b, const struct row_block *r,
			    struct moe_tensor *const *block, struct moe_tensor **out)
{
	int n = 0, last = -1;

	for (int i = r->r0; i < r->r1; i++)
		if (b->row[i] / MOE_TOKEN_BLOCK != last) {
			last = b->row[i] / MOE_TOKEN_BLOCK;
			out[n++] = block[last];
		}
	return n;
}

static struct moe_head_args args_of(struct moe_decoder_pass *p, const struct row_block *r)
{
	struct moe_decoder_slot *s = p->slot;

	return (struct moe_head_args){
		.decoder = p->decoder,
		.state = &s->head[r->index % MOE_HEAD_RING].state,
		.batch = p->batch,
		.r0 = r->r0,
		.r1 = r->r1,
		.x = moe_decoder_buffers(s, p->decoder->n_layers)->attn.x,
		.row_loss = s->row_loss,
	};
}

static enum moe_status submit_norm(const struct moe_context *c, struct moe_decoder_pass *p,
				   const struct moe_head_args *a, const struct row_block *r)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_tensor *x[MAX_BLOCKS];
	int L = p->decoder->n_layers;
	struct moe_tensor_list in = { x, blocks_with_rows(&p->batch, r, moe_decoder_blocks(s, L)->x,
							  x) };

	return moe_task_final_norm(c, a, r->index, in, p->tensors->full.final_ready,
				   moe_decoder_buffers(s, L)->kept,
				   s->head[r->index % MOE_HEAD_RING].hn);
}

/* All chunks of a ring buffer as one list: themselves where few, else a join. */
static enum moe_status chunk_list(const struct moe_context *c, struct moe_decoder_pass *p,
				  struct moe_head_ring *h, struct moe_join *join,
				  struct moe_tensor_list *out)
{
	int n = p->decoder->head.n_chunks;

	*out = (struct moe_tensor_list){ h->chunk, n };
	if (n <= CHUNKS_DIRECT)
		return MOE_OK;
	*out = (struct moe_tensor_list){ &join->out, 1 };
	return moe_join_submit(c, join, h->chunk, n, NULL);
}

enum moe_status moe_graph_decoder_logits(const struct moe_context *c, struct moe_decoder_pass *p,
					 float *out)
{
	struct moe_context head = moe_decoder_context(c, -1, p->decoder->n_layers);
	struct row_block r;

	for (int i = 0, r0 = 0; r0 < p->batch.n_rows; i++, r0 = r.r1) {
		struct moe_head_args a;

		r = next_rows(&p->batch, i, r0);
		a = args_of(p, &r);
		a.out = out;
		MOE_TRY(submit_norm(&head, p, &a, &r));
		for (a.chunk = 0; a.chunk < p->decoder->head.n_chunks; a.chunk++)
			MOE_TRY(moe_task_logits(&head, &a, i, p->slot->head[i % MOE_HEAD_RING].hn,
						moe_full_head_ready(&p->tensors->full, a.chunk),
						NULL));
	}
	return MOE_OK;
}

/* The row block's share of the gradient stream, which submit_clear has cleared. */
static enum moe_status submit_loss_bwd(const struct moe_context *c, struct moe_decoder_pass *p,
				       struct moe_head_args *a, const struct row_block *r)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_head_ring *h = &s->head[r->index % MOE_HEAD_RING];
	struct moe_stream *grad = &s->grad_out[(p->decoder->n_layers - 1) & 1];
	struct moe_tensor *touched[MAX_BLOCKS];
	struct moe_tensor_list chunks, out = { touched, 0 };

	out.n = blocks_with_rows(&p->batch, r, grad->block, touched);
	a->grad = grad->data;
	if (s->final_part)
		a->norm_part = s->final_part + (size_t)r->index * (size_t)p->decoder->H;
	MOE_TRY(chunk_list(c, p, h, &h->chunks_bwd, &chunks));
	return moe_task_loss_bwd(c, a, r->index, chunks,
				 moe_decoder_buffers(s, p->decoder->n_layers)->kept, grad->users,
				 out);
}

static enum moe_status submit_rows(const struct moe_context *c, struct moe_decoder_pass *p,
				   const struct row_block *r, bool backward, float scale)
{
	struct moe_head_ring *h = &p->slot->head[r->index % MOE_HEAD_RING];
	struct moe_head_args a = args_of(p, r);
	struct moe_tensor_list chunks;
	struct moe_context back = *c;
	int C = p->decoder->head.n_chunks;

	a.scale = scale;
	MOE_TRY(submit_norm(c, p, &a, r));
	for (a.chunk = 0; a.chunk < C; a.chunk++)
		MOE_TRY(moe_task_logits(c, &a, r->index, h->hn,
					moe_full_head_ready(&p->tensors->full, a.chunk),
					h->chunk[a.chunk]));
	a.chunk = 0;
	MOE_TRY(chunk_list(c, p, h, &h->chunks, &chunks));
	MOE_TRY(moe_task_loss(c, &a, r->index, chunks, h->loss));
	if (!backward)
		return MOE_OK;
	back.phase = MOE_PHASE_BACKWARD;
	for (a.chunk = 0; a.chunk < C; a.chunk++)
		MOE_TRY(moe_task_logits_bwd(&back, &a, r->index, h->loss, h->chunk[a.chunk]));
	a.chunk = 0;
	MOE_TRY(submit_loss_bwd(&back, p, &a, r));
	return moe_full_head_grads(&back, p, &a, h->hn, h->chunk, !c->micro && !r->index);
}

/* Tokens that are not trained have gradient 0. */
static enum moe_status submit_clear(const struct moe_context *c, struct moe_decoder_pass *p)
{
	struct moe_decoder_slot *s = p->slot;
	int ring = (p->decoder->n_layers - 1) & 1;
	struct moe_stream *grad = &s->grad_out[ring];
	struct row_block none = { .index = 0 };
	struct moe_head_args a = args_of(p, &none);

	moe_stream_resize(grad, p->batch.T);
	MOE_TRY(moe_decoder_begin_grad_out(c, s, ring));
	a.grad = grad->data;
	for (int b = 0; b < grad->n_blocks; b++) {
		a.t0 = moe_block_begin(b);
		a.t1 = moe_block_end(b, p->batch.T);
		MOE_TRY(moe_task_loss_bwd(c, &a, b, (struct moe_tensor_list){ NULL, 0 }, NULL,
					  grad->users,
					  (struct moe_tensor_list){ &grad->block[b], 1 }));
	}
	return MOE_OK;
}

/* What is trained whole: final_norm, and where there are no rows, the head, whose gradients are cleared. */
static enum moe_status submit_whole(const struct moe_context *c, struct moe_decoder_pass *p, int row_blocks)
{
	struct moe_stream *grad = &p->slot->grad_out[(p->decoder->n_layers - 1) & 1];
	struct row_block none = { .index = 0 };
	struct moe_head_args a = args_of(p, &none);

	if (!moe_full_trains_embed(p->decoder))
		return MOE_OK;
	if (!row_blocks && !c->micro)
		MOE_TRY(moe_full_head_grads(c, p, &a, NULL, p->slot->head[0].chunk, true));
	MOE_TRY(moe_join_submit(c, &p->slot->final_all, grad->block, grad->n_blocks, NULL));
	return moe_full_final_grad(c, p, p->slot->final_all.out, row_blocks, !c->micro);
}

static enum moe_status submit_total(const struct moe_context *c, struct moe_decoder_pass *p,
				    struct moe_loss_result *out)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_tensor *losses[MOE_HEAD_RING];
	struct moe_loss_args a = { .batch = p->batch,
				   .row_loss = s->row_loss,
				   .out = out };

	for (int i = 0; i < MOE_HEAD_RING; i++)
		losses[i] = s->head[i].loss;
	return moe_task_loss_total(c, &a, (struct moe_tensor_list){ losses, MOE_HEAD_RING });
}

enum moe_status moe_graph_decoder_loss(const struct moe_context *c, struct moe_decoder_pass *p,
				       bool backward, float scale, struct moe_loss_result *out)
{
	struct moe_context head = moe_decoder_context(c, -1, p->decoder->n_layers), back = head;
	struct row_block r;
	int blocks = 0;

	back.phase = MOE_PHASE_BACKWARD;
	if (backward && !p->slot->backward)
		return moe_fail(MOE_ERR_STATE, "nothing is trained: there is no backward");
	if (backward)
		MOE_TRY(submit_clear(&back, p));
	for (int i = 0, r0 = 0; r0 < p->batch.n_rows; i++, r0 = r.r1) {
		r = next_rows(&p->batch, i, r0);
		MOE_TRY(submit_rows(&head, p, &r, backward, scale));
		blocks++;
	}
	if (backward)
		MOE_TRY(submit_whole(&back, p, blocks));
	return submit_total(&head, p, out);
}
