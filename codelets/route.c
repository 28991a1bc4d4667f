/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/route.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

size_t moe_route_scratch(const struct moe_experts *l)
{
	size_t probs = (size_t)MOE_TOKEN_BLOCK * (size_t)l->E * sizeof(double);

	return MOE_MAX(probs, moe_kernels()->linear_scratch(MOE_TOKEN_BLOCK, l->E, l->H, 0));
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;
	struct moe_plan *plan = &a->state->plan;
	int m = a->t1 - a->t0;
	float *logits = plan->logits + (size_t)a->t0 * (size_t)l->E;
	double *sum = plan->prob_sum + (size_t)(a->t0 / MOE_TOKEN_BLOCK) * (size_t)l->E;
	double *probs = worker->scratch;

	worker->rows = m;
	moe_kernels()->linear(m, &l->router_weight, 0, l->E, a->state->x + (size_t)a->t0 * (size_t)l->H,
			      l->H, NULL, NULL, logits, l->E, worker->scratch);
	l->router->select(&l->router_config, m, logits, plan->ids + (size_t)a->t0 * (size_t)l->k,
			  plan->weights + (size_t)a->t0 * (size_t)l->k);
	if (l->z_coef != 0)
		plan->z_sum[a->t0 / MOE_TOKEN_BLOCK] = moe_z_sum(l->E, m, logits);
	memset(sum, 0, (size_t)l->E * sizeof *sum);
	if (!l->router->probs)
		return;
	l->router->probs(&l->router_config, m, logits, probs);
	for (int t = 0; t < m; t++)
		for (int e = 0; e < l->E; e++)
			sum[e] += probs[(size_t)t * (size_t)l->E + (size_t)e];
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;
	double m = a->t1 - a->t0;

	return moe_task_us() + moe_weight_us(MOE_GEMM_FORWARD, m, &l->router_weight, 0) +
	       moe_cycles_us((l->z_coef != 0 ? 2 : 1) * MOE_CYCLES_EXP * m * l->E);
}

MOE_CODELET_AT(route, run, cost_us, MOE_HOME_LAYER);
