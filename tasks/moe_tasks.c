/* SPDX-License-Identifier: Apache-2.0 */
#include "tasks/moe_tasks.h"

#include "codelets/combine.h"
#include "codelets/combine_bwd.h"
#include "codelets/combine_part.h"
#include "codelets/down.h"
#include "codelets/down_bwd.h"
#include "codelets/ffn_bwd.h"
#include "codelets/ffn_down.h"
#include "codelets/ffn_lora_grad.h"
#include "codelets/ffn_up.h"
#include "codelets/gate_up.h"
#include "codelets/gate_up_bwd.h"
#include "codelets/gather.h"
#include "codelets/join.h"
#include "codelets/lora_grad.h"
#include "codelets/plan.h"
#include "codelets/repack_bwd.h"
#include "codelets/route.h"
#include "codelets/route_bwd.h"
#include "codelets/router_grad.h"
#include "codelets/router_lora.h"
#include "codelets/scatter.h"
#include "codelets/weight_grad.h"

static enum moe_status check_part(const char *kind, const struct moe_expert_args *a)
{
	const struct moe_experts *l = a->layer;

	if (!l || a->part < 0 || a->part >= l->P || a->group < 0 || a->group >= l->G)
		return moe_fail(MOE_ERR_ARG, "%s: part %d, group %d of %d, %d", kind, a->part,
				a->group, l ? l->P : 0, l ? l->G : 0);
	return MOE_OK;
}

static enum moe_status check_group(const char *kind, const struct moe_expert_args *a)
{
	return a->state ? check_part(kind, a)
			: moe_fail(MOE_ERR_ARG, "%s: part %d, group %d without a state", kind,
				   a->part, a->group);
}

/* of: the layer or the MLP that the kind computes; 0..0 where it is the whole pass's. */
static enum moe_status check_tokens(const char *kind, const struct moe_token_args *a, const void *of)
{
	if (!of || a->t0 < 0 || a->t1 < a->t0)
		return moe_fail(MOE_ERR_ARG, "%s: tokens %d..%d", kind, a->t0, a->t1);
	return MOE_OK;
}

static enum moe_status check_copy(const char *kind, const struct moe_copy_args *a)
{
	if ((!a->rows && !a->rows16) || a->n < 1 || a->t0 < 0 || a->t1 < a->t0)
		return moe_fail(MOE_ERR_ARG, "%s: tokens %d..%d of %d numbers each", kind, a->t0, a->t1, a->n);
	return MOE_OK;
}

/* Token blocks are dealt out to the parts. */
static int block_part(const struct moe_context *c, int block)
{
	return block % moe_engine_parts(c->engine);
}

enum moe_status moe_task_load(const struct moe_context *c, const struct moe_copy_args *a, int block,
			      struct moe_tensor *from, struct moe_tensor *after, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_copy("load", a));
	moe_access_add(&l, from, MOE_R);
	moe_access_add(&l, after, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_load, &moe_cl_load, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) }, c->priority);
}

enum moe_status moe_task_store(const struct moe_context *c, const struct moe_copy_args *a,
			       int block, struct moe_tensor *in, struct moe_tensor *to)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_copy("store", a));
	moe_access_add(&l, in, MOE_R);
	moe_access_add(&l, to, MOE_W);
	return moe_task_submit(c, MOE_KIND_store, &moe_cl_store, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) }, c->priority);
}

enum moe_status moe_task_join(const struct moe_context *c, struct moe_tensor *const *in, int n,
			      struct moe_tensor *also, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	moe_access_add_all(&l, in, n, MOE_R);
	moe_access_add(&l, also, MOE_RW);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_join, &moe_cl_join, NULL, 0, &l,
			       (struct moe_where){ -1, -1, -1 }, c->priority + 1);
}

enum moe_status moe_task_route(const struct moe_context *c, const struct moe_token_args *a,
			       int block, struct moe_tensor *x, struct moe_tensor *router,
			       struct moe_tensor *plan_free, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("route", a, a->layer));
	moe_access_add(&l, x, MOE_R);
	moe_access_add(&l, router, MOE_R);
	moe_access_add(&l, plan_free, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_route, &moe_cl_route, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) }, c->priority);
}

enum moe_status moe_task_plan(const struct moe_context *c, const struct moe_token_args *a,
			      struct moe_tensor *const *in, int n, struct moe_tensor *scratch,
			      struct moe_tensor *plan)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("plan", a, a->layer));
	moe_access_add_all(&l, in, n, MOE_R);
	moe_access_add(&l, scratch, MOE_RW);
	moe_access_add(&l, plan, MOE_W);
	return moe_task_submit(c, MOE_KIND_plan, &moe_cl_plan, a, sizeof *a, &l,
			       (struct moe_where){ -1, -1, -1 }, c->priority + 1);
}

enum moe_status moe_task_gather(const struct moe_context *c, const struct moe_expert_args *a,
				struct moe_tensor *plan, struct moe_tensor *after,
				struct moe_tensor *lora_h, struct moe_tensor *panel)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_group("gather", a));
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, after, MOE_R);
	moe_access_add(&l, lora_h, MOE_R);
	moe_access_add(&l, panel, MOE_W);
	return moe_task_submit(c, MOE_KIND_gather, &moe_cl_gather, a, sizeof *a, &l,
			       (struct moe_where){ a->group, -1, a->part }, c->priority);
}

enum moe_status moe_task_gate_up(const struct moe_context *c, const struct moe_expert_args *a,
				 int slice, struct moe_tensor *in, struct moe_tensor *after,
				 struct moe_tensor *weights, struct moe_tensor *lora_i,
				 struct moe_tensor *lora_h, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_group("gate_up", a));
	moe_access_add(&l, in, MOE_R);
	moe_access_add(&l, after, MOE_R);
	moe_access_add(&l, weights, MOE_R);
	moe_access_add(&l, lora_i, MOE_R);
	moe_access_add(&l, lora_h, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_gate_up, &moe_cl_gate_up, a, sizeof *a, &l,
			       (struct moe_where){ a->group, slice, a->part }, c->priority);
}

enum moe_status moe_task_down(const struct moe_context *c, const struct moe_expert_args *a,
			      int slice, struct moe_tensor *const *in, int n,
			      struct moe_tensor *weights, struct moe_tensor *lora_h,
			      struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_group("down", a));
	moe_access_add_all(&l, in, n, MOE_R);
	moe_access_add(&l, weights, MOE_R);
	moe_access_add(&l, lora_h, MOE_R);
	moe_access_add(&l, out, MOE_W);
	/* what gate_up wrote is still in cache; at the end the shorter tasks are kept to fill up the workers' time */
	return moe_task_submit(c, MOE_KIND_down, &moe_cl_down, a, sizeof *a, &l,
			       (struct moe_where){ a->group, slice, a->part }, c->priority + (a->last ? -1 : 1));
}

enum moe_status moe_task_combine_part(const struct moe_context *c, const struct moe_token_args *a,
				      int block, struct moe_tensor *rows, struct moe_tensor *plan,
				      struct moe_tensor *scratch, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("combine_part", a, a->layer));
	moe_access_add(&l, rows, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, scratch, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, a->weighted ? MOE_KIND_combine_part : MOE_KIND_combine_bwd_part,
			       &moe_cl_combine_part, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, a->part }, c->priority + 2);
}

enum moe_status moe_task_combine(const struct moe_context *c, const struct moe_token_args *a,
				 int block, struct moe_tensor *parts, struct moe_tensor *plan,
				 struct moe_tensor *shared, struct moe_tensor *residual,
				 struct moe_tensor *scratch, struct moe_tensor *after,
				 struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("combine", a, a->layer));
	moe_access_add(&l, parts, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, shared, MOE_R);
	moe_access_add(&l, residual, MOE_R);
	moe_access_add(&l, scratch, MOE_R);
	moe_access_add(&l, after, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_combine, &moe_cl_combine, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) },
			       c->priority + 3);
}

enum moe_status moe_task_ffn_up(const struct moe_context *c, const struct moe_token_args *a,
				int block, struct moe_tensor *x, struct moe_tensor *const *lora,
				struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("ffn_up", a, a->ffn));
	moe_access_add(&l, x, MOE_R);
	for (int i = 0; lora && i < MOE_FFN_MATRICES; i++)
		if (i != MOE_FFN_DOWN)
			moe_access_add(&l, lora[i], MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_ffn_up, &moe_cl_ffn_up, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) }, c->priority);
}

enum moe_status moe_task_ffn_down(const struct moe_context *c, const struct moe_token_args *a,
				  int block, struct moe_tensor *hidden,
				  struct moe_tensor *const *lora, struct moe_tensor *residual,
				  struct moe_tensor *after, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("ffn_down", a, a->ffn));
	moe_access_add(&l, hidden, MOE_R);
	moe_access_add(&l, lora ? lora[MOE_FFN_DOWN] : NULL, MOE_R);
	moe_access_add(&l, residual, MOE_R);
	moe_access_add(&l, after, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_ffn_down, &moe_cl_ffn_down, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) },
			       c->priority + 1);
}

enum moe_status moe_task_repack_bwd(const struct moe_context *c, const struct moe_expert_args *a,
				    int layers, struct moe_tensor *plan,
				    struct moe_tensor *weights, struct moe_tensor *copy)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_part("repack_bwd", a));
	if (!a->copy || !moe_kernels()->weight_transpose)
		return moe_fail(MOE_ERR_ARG, "repack_bwd: no memory for the copies, or no kernel");
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, weights, MOE_R);
	moe_access_add(&l, copy, MOE_W);
	/* just below the layers whose backward can run meanwhile, above all that comes later */
	return moe_task_submit(c, MOE_KIND_repack_bwd, &moe_cl_repack_bwd, a, sizeof *a, &l,
			       (struct moe_where){ a->group, -1, a->part },
			       c->priority - MOE_PRIORITY_LAYER * layers - 1);
}

enum moe_status moe_task_scatter(const struct moe_context *c, const struct moe_expert_args *a,
				 struct moe_tensor *grad_out, struct moe_tensor *plan,
				 struct moe_tensor *lora_h, struct moe_tensor *panel)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_group("scatter", a));
	moe_access_add(&l, grad_out, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, lora_h, MOE_R);
	moe_access_add(&l, panel, MOE_W);
	return moe_task_submit(c, MOE_KIND_scatter, &moe_cl_scatter, a, sizeof *a, &l,
			       (struct moe_where){ a->group, -1, a->part }, c->priority);
}

enum moe_status moe_task_down_bwd(const struct moe_context *c, const struct moe_expert_args *a,
				  int slice, struct moe_tensor *in, struct moe_tensor *plan,
				  struct moe_tensor *again, struct moe_tensor *copy,
				  struct moe_tensor *lora_i,
				  struct moe_tensor *lora_h, struct moe_tensor *grad_i,
				  struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_group("down_bwd", a));
	moe_access_add(&l, in, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, again, MOE_R);
	moe_access_add(&l, copy, MOE_R);
	moe_access_add(&l, lora_i, MOE_R);
	moe_access_add(&l, lora_h, MOE_R);
	moe_access_add(&l, grad_i, a->first ? MOE_W : MOE_RW);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_down_bwd, &moe_cl_down_bwd, a, sizeof *a, &l,
			       (struct moe_where){ a->group, slice, a->part }, c->priority);
}

enum moe_status moe_task_gate_up_bwd(const struct moe_context *c, const struct moe_expert_args *a,
				     int slice, struct moe_tensor *const *in, int n,
				     struct moe_tensor *copy, struct moe_tensor *lora_h,
				     struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_group("gate_up_bwd", a));
	moe_access_add_all(&l, in, n, MOE_R);
	moe_access_add(&l, copy, MOE_R);
	moe_access_add(&l, lora_h, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_gate_up_bwd, &moe_cl_gate_up_bwd, a, sizeof *a, &l,
			       (struct moe_where){ a->group, slice, a->part }, c->priority + 1);
}

enum moe_status moe_task_lora_grad(const struct moe_context *c, const struct moe_expert_args *a,
				   struct moe_tensor *const *in, int n, struct moe_tensor *plan,
				   struct moe_tensor *x, struct moe_tensor *grad_out,
				   struct moe_tensor *const *grad_h)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_group("lora_grad", a));
	if (a->groups < 1 || a->group + (a->groups - 1) * a->layer->P >= a->layer->G)
		return moe_fail(MOE_ERR_ARG, "lora_grad: %d groups from %d on, %d apart, of %d", a->groups, a->group,
				a->layer->P, a->layer->G);
	moe_access_add_all(&l, in, n, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, x, MOE_R);
	moe_access_add(&l, grad_out, MOE_R);
	moe_access_add_all(&l, grad_h, a->groups, a->first ? MOE_W : MOE_RW);
	return moe_task_submit(c, MOE_KIND_lora_grad, &moe_cl_lora_grad, a, sizeof *a, &l,
			       (struct moe_where){ a->group, -1, a->part }, MOE_PRIORITY_FILL);
}

enum moe_status moe_task_weight_grad(const struct moe_context *c, const struct moe_expert_args *a,
				     struct moe_tensor *const *in, int n, struct moe_tensor *plan,
				     struct moe_tensor *x, struct moe_tensor *grad_base)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_group("weight_grad", a));
	moe_access_add_all(&l, in, n, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, x, MOE_R);
	moe_access_add(&l, grad_base, a->first ? MOE_W : MOE_RW);
	return moe_task_submit(c, MOE_KIND_weight_grad, &moe_cl_weight_grad, a, sizeof *a, &l,
			       (struct moe_where){ a->group, -1, a->part }, MOE_PRIORITY_FILL);
}

enum moe_status moe_task_route_bwd(const struct moe_context *c, const struct moe_token_args *a,
				   int block, struct moe_tensor *rows, struct moe_tensor *plan,
				   struct moe_tensor *scratch, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("route_bwd", a, a->layer));
	moe_access_add(&l, rows, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, scratch, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_route_bwd, &moe_cl_route_bwd, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) },
			       c->priority + 2);
}

enum moe_status moe_task_combine_bwd(const struct moe_context *c, const struct moe_token_args *a,
				     int block, struct moe_tensor *parts, struct moe_tensor *plan,
				     struct moe_tensor *route, struct moe_tensor *router,
				     struct moe_tensor *shared, struct moe_tensor *residual,
				     struct moe_tensor *scratch, struct moe_tensor *after,
				     struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("combine_bwd", a, a->layer));
	moe_access_add(&l, router, MOE_R);
	moe_access_add(&l, parts, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, route, MOE_R);
	moe_access_add(&l, shared, MOE_R);
	moe_access_add(&l, residual, MOE_R);
	moe_access_add(&l, scratch, MOE_R);
	moe_access_add(&l, after, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_combine_bwd, &moe_cl_combine_bwd, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) },
			       c->priority + 3);
}

enum moe_status moe_task_router_grad(const struct moe_context *c, const struct moe_token_args *a,
				     struct moe_tensor *route, struct moe_tensor *plan,
				     struct moe_tensor *grad_out, struct moe_tensor *x,
				     struct moe_tensor *grad)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("router_grad", a, a->layer));
	moe_access_add(&l, route, MOE_R);
	moe_access_add(&l, plan, MOE_R);
	moe_access_add(&l, grad_out, MOE_R);
	moe_access_add(&l, x, MOE_R);
	moe_access_add(&l, grad, a->first ? MOE_W : MOE_RW);
	return moe_task_submit(c, MOE_KIND_router_grad, &moe_cl_router_grad, a, sizeof *a, &l,
			       (struct moe_where){ -1, -1, -1 }, MOE_PRIORITY_FILL);
}

enum moe_status moe_task_router_lora_grad(const struct moe_context *c, const struct moe_experts *layer,
					  struct moe_tensor *grad_router, struct moe_tensor *router,
					  struct moe_tensor *grad)
{
	struct moe_router_lora_args a = { layer };
	struct moe_access_list l = { .n = 0 };

	if (!layer || !layer->router_lora)
		return moe_fail(MOE_ERR_ARG, "router_lora_grad: the layer's router has no LoRA");
	moe_access_add(&l, grad_router, MOE_R);
	moe_access_add(&l, router, MOE_R);
	moe_access_add(&l, grad, MOE_W);
	return moe_task_submit(c, MOE_KIND_router_lora_grad, &moe_cl_router_lora_grad, &a, sizeof a, &l,
			       (struct moe_where){ -1, -1, -1 }, MOE_PRIORITY_FILL);
}

enum moe_status moe_task_router_fold(const struct moe_context *c, const struct moe_experts *layer,
				     struct moe_tensor *router)
{
	struct moe_router_lora_args a = { layer };
	struct moe_access_list l = { .n = 0 };

	if (!layer || !layer->router_lora)
		return moe_fail(MOE_ERR_ARG, "router_fold: the layer's router has no LoRA");
	moe_access_add(&l, router, MOE_RW);
	return moe_task_submit(c, MOE_KIND_router_fold, &moe_cl_router_fold, &a, sizeof a, &l,
			       (struct moe_where){ -1, -1, -1 }, MOE_PRIORITY_UPDATE - c->layer);
}

enum moe_status moe_task_ffn_bwd(const struct moe_context *c, const struct moe_token_args *a,
				 int block, struct moe_tensor *hidden, struct moe_tensor *grad_out,
				 struct moe_tensor *const *lora, struct moe_tensor *scratch,
				 struct moe_tensor *after, struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("ffn_bwd", a, a->ffn));
	moe_access_add(&l, hidden, MOE_RW);
	moe_access_add(&l, grad_out, MOE_R);
	if (lora)
		moe_access_add_all(&l, lora, MOE_FFN_MATRICES, MOE_R);
	moe_access_add(&l, scratch, MOE_R);
	moe_access_add(&l, after, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_ffn_bwd, &moe_cl_ffn_bwd, a, sizeof *a, &l,
			       (struct moe_where){ block, -1, block_part(c, block) }, c->priority);
}

enum moe_status moe_task_ffn_lora_grad(const struct moe_context *c, const struct moe_token_args *a,
				       struct moe_tensor *in, struct moe_tensor *kept,
				       struct moe_tensor *users, struct moe_tensor *lora,
				       struct moe_tensor *grad)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_tokens("ffn_lora_grad", a, a->ffn));
	if (a->matrix >= MOE_FFN_MATRICES || !moe_ffn_trains(a->ffn, a->matrix))
		return moe_fail(MOE_ERR_ARG, "ffn_lora_grad: matrix %d is not trained", a->matrix);
	moe_access_add(&l, in, MOE_R);
	moe_access_add(&l, kept, MOE_R);
	moe_access_add(&l, users, MOE_R);
	moe_access_add(&l, lora, MOE_R);
	moe_access_add(&l, grad, a->first ? MOE_W : MOE_RW);
	return moe_task_submit(c, MOE_KIND_ffn_lora_grad, &moe_cl_ffn_lora_grad, a, sizeof *a, &l,
			       (struct moe_where){ MOE_FFN_TAG + (int)a->matrix, -1, -1 },
			       MOE_PRIORITY_FILL);
}
