/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/combine_part.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

size_t moe_combine_scratch(const struct moe_experts *l)
{
	return sizeof(float *) + (size_t)l->k * (sizeof(float *) + sizeof(float));
}

void moe_combine_slots(const struct moe_token_args *a, int part, int t, int h0, int h1, float *out,
		       void *scratch)
{
	const struct moe_plan *plan = &a->state->plan;
	const float *y = a->state->part[part].y + h0, **row;
	size_t width = (size_t)moe_width(a->layer->H);
	float *weight;
	int n = 0;

	/* callers keep rows of any length in front of it */
	row = (const float **)(((uintptr_t)scratch + sizeof *row - 1) & ~(uintptr_t)(sizeof *row - 1));
	weight = (float *)(row + a->layer->k);
	for (int s = t * a->layer->k; s < (t + 1) * a->layer->k; s++) {
		if (plan->position[s] < 0)
			continue;
		row[n] = y + (size_t)plan->position[s] * width;
		weight[n++] = plan->weights[s];
	}
	moe_kernels()->sum_rows(h1 - h0, n, row, a->weighted ? weight : NULL, out);
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	int H = a->layer->H, T = a->state->plan.T;
	int h0 = a->c0 * MOE_CHUNK, h1 = MOE_MIN(a->c1 * MOE_CHUNK, H);
	float *sum = a->state->part[a->part].sum + h0;

	worker->rows = T;
	for (int t = 0; t < T; t++)
		moe_combine_slots(a, a->part, t, h0, h1, sum + (size_t)t * (size_t)H,
				  worker->scratch);
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	double rows = a->state->plan.T, width = (double)(a->c1 - a->c0) * MOE_CHUNK * sizeof(float);

	return moe_task_us() + moe_stream_us(rows * a->layer->k * width, rows * width);
}

MOE_CODELET_AT(combine_part, run, cost_us, MOE_HOME_PART);
