/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tasks of a decoder around its MoE layers. Tensor parameters in the order: what is read, then what
 * is written; NULL where there is no such thing. `kept` orders a layer's buffers between passes,
 * `users` a ring's buffers between layers (graphs/decoder.h).
 */
#ifndef MOE_TASKS_DECODER_TASKS_H
#define MOE_TASKS_DECODER_TASKS_H

#include "codelets/decoder.h"
#include "tasks/task.h"

/* A list of tensors of the same role. */
struct moe_tensor_list {
	struct moe_tensor *const *item;
	int n;
};

/* ---- forward; weights: NULL where nothing trains them ---- */
enum moe_status moe_task_embed(const struct moe_context *c, const struct moe_attn_args *a,
			       int block, struct moe_tensor *weights, struct moe_tensor *kept,
			       struct moe_tensor *out);
/* lora: of q, k and v */
enum moe_status moe_task_qkv(const struct moe_context *c, const struct moe_attn_args *a, int block,
			     struct moe_tensor *x, struct moe_tensor *const *lora,
			     struct moe_tensor *kept, struct moe_tensor *out);
/* keys: the blocks of k and v that the rows see */
enum moe_status moe_task_attention(const struct moe_context *c, const struct moe_attn_args *a,
				   int block, int slice, struct moe_tensor_list keys,
				   struct moe_tensor *kept, struct moe_tensor *out);
/* heads: the block's slices */
enum moe_status moe_task_attn_out(const struct moe_context *c, const struct moe_attn_args *a,
				  int block, struct moe_tensor_list heads, struct moe_tensor *x,
				  struct moe_tensor *lora, struct moe_tensor *kept,
				  struct moe_tensor *out);

/* ---- LM head; block: index of the row block ---- */
enum moe_status moe_task_final_norm(const struct moe_context *c, const struct moe_head_args *a,
				    int block, struct moe_tensor_list x, struct moe_tensor *weights,
				    struct moe_tensor *kept, struct moe_tensor *out);
enum moe_status moe_task_logits(const struct moe_context *c, const struct moe_head_args *a,
				int block, struct moe_tensor *hn, struct moe_tensor *weights,
				struct moe_tensor *out);
enum moe_status moe_task_loss(const struct moe_context *c, const struct moe_head_args *a, int block,
			      struct moe_tensor_list chunks, struct moe_tensor *out);
enum moe_status moe_task_loss_total(const struct moe_context *c, const struct moe_loss_args *a,
				    struct moe_tensor_list losses);
enum moe_status moe_task_logits_bwd(const struct moe_context *c, const struct moe_head_args *a,
				    int block, struct moe_tensor *loss, struct moe_tensor *chunk);
/* out: the token blocks that hold the rows, added to; without rows: blocks to clear */
enum moe_status moe_task_loss_bwd(const struct moe_context *c, const struct moe_head_args *a,
				  int block, struct moe_tensor_list chunks, struct moe_tensor *kept,
				  struct moe_tensor *users, struct moe_tensor_list out);

/* ---- backward ---- */
enum moe_status moe_task_attn_out_bwd(const struct moe_context *c, const struct moe_attn_args *a,
				      int block, struct moe_tensor *grad_mid,
				      struct moe_tensor *lora, struct moe_tensor *kept,
				      struct moe_tensor *users, struct moe_tensor *out);
enum moe_status moe_task_attention_bwd_q(const struct moe_context *c, const struct moe_attn_args *a,
					 int block, int slice, struct moe_tensor *grad_o,
					 struct moe_tensor *kept, struct moe_tensor *users,
					 struct moe_tensor *out);
/* grad_o: the blocks whose rows see the keys */
enum moe_status moe_task_attention_bwd_kv(const struct moe_context *c,
					  const struct moe_attn_args *a, int block, int slice,
					  struct moe_tensor_list grad_o, struct moe_tensor *kept,
					  struct moe_tensor *users, struct moe_tensor *out);
/* grads: the block's slices of grad_q, grad_k and grad_v, changed in place */
enum moe_status moe_task_qkv_bwd(const struct moe_context *c, const struct moe_attn_args *a,
				 int block, struct moe_tensor_list grads,
				 struct moe_tensor *grad_mid, struct moe_tensor *const *lora,
				 struct moe_tensor *kept, struct moe_tensor *users,
				 struct moe_tensor *after, struct moe_tensor *out);
/* users: of the ring that the projection's gradient is in */
enum moe_status moe_task_linear_grad(const struct moe_context *c, const struct moe_attn_args *a,
				     struct moe_tensor *in, struct moe_tensor *kept,
				     struct moe_tensor *users, struct moe_tensor *lora,
				     struct moe_tensor *grad);

#endif
