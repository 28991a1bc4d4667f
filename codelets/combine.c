/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/combine.h"
#include "codelets/combine_part.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_experts *l = a->layer;
	size_t at = (size_t)a->t0 * (size_t)l->H, n = (size_t)(a->t1 - a->t0) * (size_t)l->H;
	float *out = a->out + at;

	worker->rows = a->t1 - a->t0;
	if (l->P > 1)
		memcpy(out, a->state->part[0].sum + at, n * sizeof *out);
	for (int t = a->t0; l->P == 1 && t < a->t1; t++)
		moe_combine_slots(a, 0, t, 0, l->H, a->out + (size_t)t * (size_t)l->H,
				  worker->scratch);
	for (int p = 1; p < l->P; p++)
		for (size_t i = 0; i < n; i++)
			out[i] += a->state->part[p].sum[at + i];
	for (size_t i = 0; a->shared && i < n; i++)
		out[i] += a->shared[at + i];
	for (size_t i = 0; a->residual && i < n; i++)
		out[i] += a->residual[at + i];
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	double n = (double)(a->t1 - a->t0) * a->layer->H * sizeof(float);
	int terms = (a->layer->P > 1 ? a->layer->P : a->layer->k) + (a->shared != NULL) + (a->residual != NULL);

	return moe_task_us() + moe_stream_us(terms * n, n);
}

MOE_CODELET(combine, run, cost_us);
