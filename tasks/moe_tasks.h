/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tasks of a MoE layer. Tensor parameters in the order: what is read, then what is written; NULL where
 * the layer has no such thing. `scratch` orders the buffers that layers share (graphs/moe_graph.h).
 */
#ifndef MOE_TASKS_MOE_TASKS_H
#define MOE_TASKS_MOE_TASKS_H

#include "codelets/copy.h"
#include "codelets/expert_args.h"
#include "codelets/token_args.h"
#include "tasks/task.h"

/* from, to: of the caller's rows, where their order is kept (moe_rows_create); else NULL. */
enum moe_status moe_task_load(const struct moe_context *c, const struct moe_copy_args *a, int block,
			      struct moe_tensor *from, struct moe_tensor *after, struct moe_tensor *out);
enum moe_status moe_task_store(const struct moe_context *c, const struct moe_copy_args *a, int block,
			       struct moe_tensor *in, struct moe_tensor *to);
/* Reads `in` (n <= 60), then writes `out`, and `also` read-write where given. */
enum moe_status moe_task_join(const struct moe_context *c, struct moe_tensor *const *in, int n,
			      struct moe_tensor *also, struct moe_tensor *out);

/* ---- forward ---- */
enum moe_status moe_task_route(const struct moe_context *c, const struct moe_token_args *a, int block,
			       struct moe_tensor *x, struct moe_tensor *router,
			       struct moe_tensor *plan_free, struct moe_tensor *out);
enum moe_status moe_task_plan(const struct moe_context *c, const struct moe_token_args *a,
			      struct moe_tensor *const *in, int n, struct moe_tensor *scratch,
			      struct moe_tensor *plan);
/* after: what else must be over (in a backward that computes again: the phase's begin), or NULL */
enum moe_status moe_task_gather(const struct moe_context *c, const struct moe_expert_args *a,
				struct moe_tensor *plan, struct moe_tensor *after,
				struct moe_tensor *lora_h, struct moe_tensor *panel);
/* in: panel where gather is a task of its own, else the plan; weights: NULL where nothing trains them */
enum moe_status moe_task_gate_up(const struct moe_context *c, const struct moe_expert_args *a, int slice,
				 struct moe_tensor *in, struct moe_tensor *after,
				 struct moe_tensor *weights, struct moe_tensor *lora_i,
				 struct moe_tensor *lora_h, struct moe_tensor *out);
/* in: every slice of gate_up */
enum moe_status moe_task_down(const struct moe_context *c, const struct moe_expert_args *a, int slice,
			      struct moe_tensor *const *in, int n, struct moe_tensor *weights,
			      struct moe_tensor *lora_h, struct moe_tensor *out);
enum moe_status moe_task_combine_part(const struct moe_context *c, const struct moe_token_args *a,
				      int block, struct moe_tensor *rows, struct moe_tensor *plan,
				      struct moe_tensor *scratch, struct moe_tensor *out);
/* plan: NULL where combine_part has read the rows */
enum moe_status moe_task_combine(const struct moe_context *c, const struct moe_token_args *a, int block,
				 struct moe_tensor *parts, struct moe_tensor *plan,
				 struct moe_tensor *shared,
				 struct moe_tensor *residual, struct moe_tensor *scratch,
				 struct moe_tensor *after, struct moe_tensor *out);
/* lora of dense MLPs, here and below: [MOE_FFN_MATRICES], or NULL without any */
enum moe_status moe_task_ffn_up(const struct moe_context *c, const struct moe_token_args *a, int block,
				struct moe_tensor *x, struct moe_tensor *const *lora,
				struct moe_tensor *out);
enum moe_status moe_task_ffn_down(const struct moe_context *c, const struct moe_token_args *a, int block,
				  struct moe_tensor *hidden, struct moe_tensor *const *lora,
				  struct moe_tensor *residual, struct moe_tensor *after,
				  struct moe_tensor *out);

/* ---- backward ---- */
/* Fills a->copy, which the backwards of `layers` layers in turn read. plan NULL (then a->state is NULL too):
 * for all experts. */
enum moe_status moe_task_repack_bwd(const struct moe_context *c, const struct moe_expert_args *a, int layers,
				    struct moe_tensor *plan, struct moe_tensor *weights,
				    struct moe_tensor *copy);
enum moe_status moe_task_scatter(const struct moe_context *c, const struct moe_expert_args *a,
				 struct moe_tensor *grad_out, struct moe_tensor *plan,
				 struct moe_tensor *lora_h, struct moe_tensor *panel);
/* in: panel where scatter is a task of its own, else grad_out; copy: an entry of a ring, else the weights, or
 * NULL; again: the gate_up that computed again what is read here, or NULL */
enum moe_status moe_task_down_bwd(const struct moe_context *c, const struct moe_expert_args *a, int slice,
				  struct moe_tensor *in, struct moe_tensor *plan,
				  struct moe_tensor *again, struct moe_tensor *copy, struct moe_tensor *lora_i, struct moe_tensor *lora_h,
				  struct moe_tensor *grad_i, struct moe_tensor *out);
enum moe_status moe_task_gate_up_bwd(const struct moe_context *c, const struct moe_expert_args *a,
				     int slice, struct moe_tensor *const *in, int n,
				     struct moe_tensor *copy, struct moe_tensor *lora_h,
				     struct moe_tensor *out);
/* in: n tensors of down_bwd; grad_h: a->groups (1 or more) of them */
enum moe_status moe_task_lora_grad(const struct moe_context *c, const struct moe_expert_args *a,
				   struct moe_tensor *const *in, int n, struct moe_tensor *plan,
				   struct moe_tensor *x, struct moe_tensor *grad_out,
				   struct moe_tensor *const *grad_h);
enum moe_status moe_task_weight_grad(const struct moe_context *c, const struct moe_expert_args *a,
				     struct moe_tensor *const *in, int n, struct moe_tensor *plan,
				     struct moe_tensor *x, struct moe_tensor *grad_base);
enum moe_status moe_task_route_bwd(const struct moe_context *c, const struct moe_token_args *a, int block,
				   struct moe_tensor *rows, struct moe_tensor *plan,
				   struct moe_tensor *scratch, struct moe_tensor *out);
enum moe_status moe_task_combine_bwd(const struct moe_context *c, const struct moe_token_args *a,
				     int block, struct moe_tensor *parts, struct moe_tensor *plan,
				     struct moe_tensor *route, struct moe_tensor *router,
				     struct moe_tensor *shared, struct moe_tensor *residual,
				     struct moe_tensor *scratch, struct moe_tensor *after,
				     struct moe_tensor *out);
enum moe_status moe_task_router_grad(const struct moe_context *c, const struct moe_token_args *a,
				     struct moe_tensor *route, struct moe_tensor *plan,
				     struct moe_tensor *grad_out, struct moe_tensor *x,
				     struct moe_tensor *grad);
/* router: the handle of W, A and B; grad: of the gradients of A and B. */
enum moe_status moe_task_router_lora_grad(const struct moe_context *c, const struct moe_experts *layer,
					  struct moe_tensor *grad_router, struct moe_tensor *router,
					  struct moe_tensor *grad);
enum moe_status moe_task_router_fold(const struct moe_context *c, const struct moe_experts *layer,
				     struct moe_tensor *router);
enum moe_status moe_task_ffn_bwd(const struct moe_context *c, const struct moe_token_args *a, int block,
				 struct moe_tensor *hidden, struct moe_tensor *grad_out,
				 struct moe_tensor *const *lora, struct moe_tensor *scratch,
				 struct moe_tensor *after, struct moe_tensor *out);
/* in: after every ffn_bwd; users: of grad_out's buffer, NULL where it is not read; lora, grad: the matrix's own */
enum moe_status moe_task_ffn_lora_grad(const struct moe_context *c, const struct moe_token_args *a,
				       struct moe_tensor *in, struct moe_tensor *kept,
				       struct moe_tensor *users, struct moe_tensor *lora,
				       struct moe_tensor *grad);

#endif
