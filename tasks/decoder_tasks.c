/* SPDX-License-Identifier: Apache-2.0 */
#include "tasks/decoder_tasks.h"

#include "codelets/attention.h"
#include "codelets/attention_bwd_kv.h"
#include "codelets/attention_bwd_q.h"
#include "codelets/attn_out.h"
#include "codelets/attn_out_bwd.h"
#include "codelets/embed.h"
#include "codelets/final_norm.h"
#include "codelets/linear_grad.h"
#include "codelets/logits.h"
#include "codelets/logits_bwd.h"
#include "codelets/loss.h"
#include "codelets/loss_bwd.h"
#include "codelets/qkv.h"
#include "codelets/qkv_bwd.h"

static void add_list(struct moe_access_list *l, struct moe_tensor_list t, enum moe_mode mode)
{
	moe_access_add_all(l, t.item, t.n, mode);
}

static enum moe_status check_tokens(const char *kind, const struct moe_attn_args *a)
{
	if (!a->decoder || !a->state || a->t0 < 0 || a->t1 <= a->t0 || a->t1 > a->batch.T)
		return moe_fail(MOE_ERR_ARG, "%s: tokens %d..%d of %d", kind, a->t0, a->t1,
				a->batch.T);
	return MOE_OK;
}

static enum moe_status check_layer(const char *kind, const struct moe_attn_args *a)
{
	return a->layer ? check_tokens(kind, a) : moe_fail(MOE_ERR_ARG, "%s: no layer", kind);
}

static enum moe_status check_heads(const char *kind, const struct moe_attn_args *a, bool kv)
{
	int heads;

	MOE_TRY(check_layer(kind, a));
	heads = kv ? a->decoder->kv_heads : a->decoder->heads;
	if (a->h0 < 0 || a->h1 <= a->h0 || a->h1 > heads)
		return moe_fail(MOE_ERR_ARG, "%s: heads %d..%d of %d", kind, a->h0, a->h1, heads);
	return MOE_OK;
}

static enum moe_status check_rows(const char *kind, const struct moe_head_args *a)
{
	if (!a->decoder || !a->state || a->r0 < 0 || a->r1 < a->r0 || a->r1 > a->batch.n_rows ||
	    a->r1 - a->r0 > MOE_TOKEN_BLOCK || a->chunk < 0 ||
	    a->chunk >= a->decoder->head.n_chunks)
		return moe_fail(MOE_ERR_ARG, "%s: rows %d..%d of %d, chunk %d", kind, a->r0, a->r1,
				a->batch.n_rows, a->chunk);
	return MOE_OK;
}

static struct moe_where at(const struct moe_context *c, int block, int slice)
{
	return (struct moe_where){ block, slice, block % moe_engine_parts(c->engine) };
}

/* Chunks of the vocabulary are dealt out to the parts, as their weights are. */
static struct moe_where at_chunk(const struct moe_context *c, int block, int chunk)
{
	return (struct moe_where){ block, chunk, chunk % moe_engine_parts(c->engine) };
}

enum moe_status moe_task_embed(const struct moe_context *c, const struct moe_attn_args *a,
			       int block, struct moe_tensor *weights, struct moe_tensor *kept,
			       struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("embed", a));
	moe_access_add(&l, weights, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_embed, &moe_cl_embed, a, sizeof *a, &l, at(c, block, -1),
			       c->priority);
}

enum moe_status moe_task_qkv(const struct moe_context *c, const struct moe_attn_args *a, int block,
			     struct moe_tensor *x, struct moe_tensor *const *lora,
			     struct moe_tensor *kept, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_layer("qkv", a));
	moe_access_add(&l, x, MOE_R);
	for (int i = MOE_ATTN_Q; i <= MOE_ATTN_V; i++)
		moe_access_add(&l, lora[i], MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_qkv, &moe_cl_qkv, a, sizeof *a, &l, at(c, block, -1),
			       c->priority);
}

enum moe_status moe_task_attention(const struct moe_context *c, const struct moe_attn_args *a,
				   int block, int slice, struct moe_tensor_list keys,
				   struct moe_tensor *kept, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_heads("attention", a, false));
	add_list(&l, keys, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_attention, &moe_cl_attention, a, sizeof *a, &l,
			       at(c, block, slice), c->priority + 1);
}

enum moe_status moe_task_attn_out(const struct moe_context *c, const struct moe_attn_args *a,
				  int block, struct moe_tensor_list heads, struct moe_tensor *x,
				  struct moe_tensor *lora, struct moe_tensor *kept,
				  struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_layer("attn_out", a));
	add_list(&l, heads, MOE_R);
	moe_access_add(&l, x, MOE_R);
	moe_access_add(&l, lora, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_attn_out, &moe_cl_attn_out, a, sizeof *a, &l,
			       at(c, block, -1), c->priority + 2);
}

enum moe_status moe_task_final_norm(const struct moe_context *c, const struct moe_head_args *a,
				    int block, struct moe_tensor_list x, struct moe_tensor *weights,
				    struct moe_tensor *kept, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_rows("final_norm", a));
	add_list(&l, x, MOE_R);
	moe_access_add(&l, weights, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_final_norm, &moe_cl_final_norm, a, sizeof *a, &l,
			       at(c, block, -1), c->priority);
}

enum moe_status moe_task_logits(const struct moe_context *c, const struct moe_head_args *a,
				int block, struct moe_tensor *hn, struct moe_tensor *weights,
				struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_rows("logits", a));
	moe_access_add(&l, hn, MOE_R);
	moe_access_add(&l, weights, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_logits, &moe_cl_logits, a, sizeof *a, &l,
			       at_chunk(c, block, a->chunk), c->priority + 1);
}

enum moe_status moe_task_loss(const struct moe_context *c, const struct moe_head_args *a, int block,
			      struct moe_tensor_list chunks, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_rows("loss", a));
	add_list(&l, chunks, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_loss, &moe_cl_loss, a, sizeof *a, &l, at(c, block, -1),
			       c->priority + 2);
}

enum moe_status moe_task_loss_total(const struct moe_context *c, const struct moe_loss_args *a,
				    struct moe_tensor_list losses)
{
	struct moe_access_list l = { .n = 0 };

	if (!a->row_loss || !a->out || a->batch.n_rows < 0)
		return moe_fail(MOE_ERR_ARG, "loss: no place for the sum of %d rows", a->batch.n_rows);
	add_list(&l, losses, MOE_R);
	return moe_task_submit(c, MOE_KIND_loss, &moe_cl_loss_total, a, sizeof *a, &l,
			       (struct moe_where){ -1, -1, -1 }, c->priority + 2);
}

enum moe_status moe_task_logits_bwd(const struct moe_context *c, const struct moe_head_args *a,
				    int block, struct moe_tensor *loss, struct moe_tensor *chunk)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_rows("logits_bwd", a));
	moe_access_add(&l, loss, MOE_R);
	moe_access_add(&l, chunk, MOE_RW);
	return moe_task_submit(c, MOE_KIND_logits_bwd, &moe_cl_logits_bwd, a, sizeof *a, &l,
			       at_chunk(c, block, a->chunk), c->priority + 3);
}

enum moe_status moe_task_loss_bwd(const struct moe_context *c, const struct moe_head_args *a,
				  int block, struct moe_tensor_list chunks, struct moe_tensor *kept,
				  struct moe_tensor *users, struct moe_tensor_list out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_rows("loss_bwd", a));
	add_list(&l, chunks, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, users, MOE_R);
	add_list(&l, out, a->r1 > a->r0 ? MOE_RW : MOE_W);
	return moe_task_submit(c, MOE_KIND_loss_bwd, &moe_cl_loss_bwd, a, sizeof *a, &l,
			       at(c, block, -1), c->priority + 4);
}

enum moe_status moe_task_attn_out_bwd(const struct moe_context *c, const struct moe_attn_args *a,
				      int block, struct moe_tensor *grad_mid,
				      struct moe_tensor *lora, struct moe_tensor *kept,
				      struct moe_tensor *users, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_layer("attn_out_bwd", a));
	moe_access_add(&l, grad_mid, MOE_R);
	moe_access_add(&l, lora, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, users, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_attn_out_bwd, &moe_cl_attn_out_bwd, a, sizeof *a, &l,
			       at(c, block, -1), c->priority + 4);
}

enum moe_status moe_task_attention_bwd_q(const struct moe_context *c, const struct moe_attn_args *a,
					 int block, int slice, struct moe_tensor *grad_o,
					 struct moe_tensor *kept, struct moe_tensor *users,
					 struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_heads("attention_bwd_q", a, false));
	moe_access_add(&l, grad_o, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, users, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_attention_bwd_q, &moe_cl_attention_bwd_q, a, sizeof *a,
			       &l, at(c, block, slice), c->priority + 5);
}

enum moe_status moe_task_attention_bwd_kv(const struct moe_context *c,
					  const struct moe_attn_args *a, int block, int slice,
					  struct moe_tensor_list grad_o, struct moe_tensor *kept,
					  struct moe_tensor *users, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_heads("attention_bwd_kv", a, true));
	add_list(&l, grad_o, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, users, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_attention_bwd_kv, &moe_cl_attention_bwd_kv, a, sizeof *a,
			       &l, at(c, block, slice), c->priority + 5);
}

enum moe_status moe_task_qkv_bwd(const struct moe_context *c, const struct moe_attn_args *a,
				 int block, struct moe_tensor_list grads,
				 struct moe_tensor *grad_mid, struct moe_tensor *const *lora,
				 struct moe_tensor *kept, struct moe_tensor *users,
				 struct moe_tensor *after, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_layer("qkv_bwd", a));
	add_list(&l, grads, MOE_RW);
	moe_access_add(&l, grad_mid, MOE_R);
	for (int i = MOE_ATTN_Q; i <= MOE_ATTN_V; i++)
		moe_access_add(&l, lora[i], MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, users, MOE_R);
	moe_access_add(&l, after, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_qkv_bwd, &moe_cl_qkv_bwd, a, sizeof *a, &l,
			       at(c, block, -1), c->priority + 6);
}

enum moe_status moe_task_linear_grad(const struct moe_context *c, const struct moe_attn_args *a,
				     struct moe_tensor *in, struct moe_tensor *kept,
				     struct moe_tensor *users, struct moe_tensor *lora,
				     struct moe_tensor *grad)
{
	struct moe_access_list l = { .n = 0 };

	if (!a->decoder || !a->layer || !a->state || a->linear < 0 || a->linear >= MOE_ATTN_LINEARS ||
	    !a->layer->linear[a->linear].lora_a.grad)
		return moe_fail(MOE_ERR_ARG, "linear_grad: projection %d is not trained",
				a->linear);
	moe_access_add(&l, in, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, users, MOE_R);
	moe_access_add(&l, lora, MOE_R);
	moe_access_add(&l, grad, a->first ? MOE_W : MOE_RW);
	return moe_task_submit(c, MOE_KIND_linear_grad, &moe_cl_linear_grad, a, sizeof *a, &l,
			       (struct moe_where){ a->linear, -1, -1 }, MOE_PRIORITY_FILL);
}
