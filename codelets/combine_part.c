/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/combine_part.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;
	const struct moe_plan *plan = &a->state->plan;
	const struct moe_experts_part_state *ps = &a->state->part[a->part];
	int h0 = a->c0 * MOE_CHUNK, h1 = MOE_MIN(a->c1 * MOE_CHUNK, l->H);
	size_t width = (size_t)moe_width(l->H);
	const float **row = worker->scratch;
	float *weight = (float *)(row + l->k);

	worker->rows = plan->T;
	for (int t = 0; t < plan->T; t++) {
		int n = 0;

		for (int j = 0; j < l->k; j++) {
			int s = t * l->k + j, at = plan->position[s];

			if (at < 0)
				continue;
			row[n] = ps->y + (size_t)at * width + h0;
			weight[n++] = plan->weights[s];
		}
		moe_kernels()->sum_rows(h1 - h0, n, row, a->weighted ? weight : NULL,
					ps->sum + (size_t)t * (size_t)l->H + h0);
	}
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	double rows = a->state->plan.T, width = (double)(a->c1 - a->c0) * MOE_CHUNK * sizeof(float);

	return moe_task_us() + moe_stream_us(rows * a->layer->k * width, rows * width);
}

MOE_CODELET_AT(combine_part, run, cost_us, MOE_HOME_PART);
