/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/plan.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static double aux_loss(const struct moe_experts *l, const struct moe_plan *plan, double *sum)
{
	memset(sum, 0, (size_t)l->E * sizeof *sum);
	for (int b = 0; b < moe_token_blocks(plan->T); b++)
		for (int e = 0; e < l->E; e++)
			sum[e] += plan->prob_sum[(size_t)b * (size_t)l->E + (size_t)e];
	return moe_aux_loss(l->E, plan->T, sum, plan->offset);
}

static double z_loss(const struct moe_plan *plan)
{
	double sum = 0;

	for (int b = 0; b < moe_token_blocks(plan->T); b++)
		sum += plan->z_sum[b];
	return sum / MOE_MAX(plan->T, 1);
}

/* The plan itself is of the next pass as soon as this one has used it. */
static void report(const struct moe_plan *plan, int E, struct moe_router_result *out)
{
	out->aux = plan->aux_loss;
	out->z = plan->z_loss;
	for (int e = 0; out->load && e < E; e++)
		out->load[e] = plan->offset[e + 1] - plan->offset[e];
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;
	struct moe_plan *plan = &a->state->plan;
	int slots = a->t1 * l->k;

	worker->rows = plan->T = a->t1; /* the next pass of the slot may be of another length */
	a->state->drop = a->drop;
	memset(plan->offset, 0, (size_t)(l->E + 1) * sizeof *plan->offset);
	for (int s = 0; s < slots; s++)
		if (plan->ids[s] >= 0)
			plan->offset[plan->ids[s] + 1]++;
	for (int e = 0; e < l->E; e++)
		plan->offset[e + 1] += plan->offset[e];
	/* fill from the starts, then shift them back: rows of an expert are in token, slot order */
	for (int s = 0; s < slots; s++) {
		int e = plan->ids[s], row;

		plan->position[s] = -1;
		if (e < 0)
			continue;
		row = plan->offset[e]++;
		plan->position[s] = row;
		plan->token[row] = s / l->k;
		plan->row_weight[row] = plan->weights[s];
	}
	memmove(plan->offset + 1, plan->offset, (size_t)l->E * sizeof *plan->offset);
	plan->offset[0] = 0;
	worker->offset = plan->offset;
	worker->experts = l->E;
	worker->slots = slots;
	if (l->router && l->router->probs)
		plan->aux_loss = aux_loss(l, plan, worker->scratch);
	plan->z_loss = l->router && l->z_coef != 0 ? z_loss(plan) : 0;
	if (a->result)
		report(plan, l->E, a->result);
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;

	/* counted, placed, scattered */
	return moe_task_us() + moe_cycles_us(MOE_CYCLES_SCATTERED * a->t1 * a->layer->k);
}

MOE_CODELET(plan, run, cost_us);
