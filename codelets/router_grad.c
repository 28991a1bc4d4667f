/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/router_grad.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;

	worker->rows = a->state->plan.T;
	if (a->first)
		memset(l->grad_router, 0, (size_t)l->E * (size_t)l->H * sizeof(float));
	moe_kernels()->linear_weight_grad(a->state->plan.T, l->E, l->H, a->state->x, l->H,
					  a->state->plan.grad_logits, l->E, l->grad_router,
					  MOE_USE_EXACT, NULL);
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;

	return moe_task_us() + moe_grad_us(a->state->plan.T, a->layer->E, a->layer->H);
}

MOE_CODELET(router_grad, run, cost_us);
