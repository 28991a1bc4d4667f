/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/route_bwd.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static float weight_grad(const struct moe_experts *l, const struct moe_experts_state *s, int row)
{
	float sum = 0;

	for (int p = 0; row >= 0 && p < l->P; p++)
		for (int c = 0; c < moe_chunks(l->part[p].I); c++)
			sum += s->part[p].dgw_part[(size_t)c * s->part_rows + (size_t)row];
	return sum;
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;
	struct moe_plan *plan = &a->state->plan;
	int m = a->t1 - a->t0;
	size_t slot0 = (size_t)a->t0 * (size_t)l->k;
	float *grad = plan->grad_weights, *logits, *grad_logits;

	worker->rows = m;
	for (size_t s = slot0; s < slot0 + (size_t)m * (size_t)l->k; s++)
		grad[s] = weight_grad(l, a->state, plan->position[s]);
	if (!l->router)
		return;
	logits = plan->logits + (size_t)a->t0 * (size_t)l->E;
	grad_logits = plan->grad_logits + (size_t)a->t0 * (size_t)l->E;
	l->router->backward(&l->router_config, m, logits, plan->ids + slot0, plan->weights + slot0,
			    grad + slot0, grad_logits);
	/* every token of a step weighs the same, whatever micro-batch it came in */
	if (l->z_coef != 0)
		moe_z_loss_bwd(l->E, plan->T, m, logits, a->share * l->z_coef, grad_logits);
	if (l->aux_coef != 0 && l->router->probs) {
		l->router->probs(&l->router_config, m, logits, worker->scratch);
		moe_aux_loss_bwd(l->E, plan->T, m, worker->scratch, plan->offset, a->share * l->aux_coef, grad_logits);
	}
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;

	return moe_task_us() + moe_cycles_us(2 * MOE_CYCLES_EXP * (a->t1 - a->t0) * a->layer->E);
}

MOE_CODELET(route_bwd, run, cost_us);
