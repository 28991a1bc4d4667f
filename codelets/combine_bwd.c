/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/combine_bwd.h"
#include "codelets/combine_part.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

size_t moe_combine_bwd_scratch(const struct moe_experts *l)
{
	return (size_t)MOE_TOKEN_BLOCK * (size_t)l->H * sizeof(float) +
	       MOE_MAX(moe_kernels()->linear_scratch(MOE_TOKEN_BLOCK, l->E, l->H, 0),
		       moe_combine_scratch(l));
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;
	int m = a->t1 - a->t0;
	size_t at = (size_t)a->t0 * (size_t)l->H, n = (size_t)m * (size_t)l->H;
	float *dx = worker->scratch;

	worker->rows = m;
	if (l->P > 1)
		memcpy(dx, a->state->part[0].sum + at, n * sizeof *dx);
	for (int t = 0; l->P == 1 && t < m; t++)
		moe_combine_slots(a, 0, a->t0 + t, 0, l->H, dx + (size_t)t * (size_t)l->H, dx + n);
	for (int p = 1; p < l->P; p++)
		for (size_t i = 0; i < n; i++)
			dx[i] += a->state->part[p].sum[at + i];
	for (size_t i = 0; a->shared && i < n; i++)
		dx[i] += a->shared[at + i];
	if (l->router)
		moe_kernels()->linear_bwd(m, &l->router_weight,
					  a->state->plan.grad_logits + (size_t)a->t0 * (size_t)l->E, l->E,
					  NULL, dx, l->H, true, dx + n);
	moe_norm_bwd_apply(&a->norm, a->t0, a->t1, l->H, dx, a->out);
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;
	double m = a->t1 - a->t0, n = m * l->H * sizeof(float), us = moe_task_us();

	if (l->router)
		us += moe_weight_us(MOE_GEMM_BACKWARD, m, &l->router_weight, 0);
	return us + moe_stream_us(((l->P > 1 ? l->P : l->k) + 3) * n, n); /* the norm reads x and grad */
}

MOE_CODELET_AT(combine_bwd, run, cost_us, MOE_HOME_LAYER);
