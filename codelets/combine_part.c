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

	worker->rows = plan->T;
	for (int t = 0; t < plan->T; t++) {
		float *out = ps->sum + (size_t)t * (size_t)l->H;

		memset(out + h0, 0, (size_t)(h1 - h0) * sizeof *out);
		for (int j = 0; j < l->k; j++) {
			int s = t * l->k + j, row = plan->position[s];
			float w = a->weighted ? plan->weights[s] : 1.0f;
			const float *y = ps->y + (size_t)MOE_MAX(row, 0) * (size_t)l->H;

			for (int h = h0; row >= 0 && h < h1; h++)
				out[h] += w * y[h];
		}
	}
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	double rows = a->state->plan.T, width = (double)(a->c1 - a->c0) * MOE_CHUNK * sizeof(float);

	return moe_task_us() + moe_stream_us(rows * a->layer->k * width, rows * width);
}

MOE_CODELET(combine_part, run, cost_us);
