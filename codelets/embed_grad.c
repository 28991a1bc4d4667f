/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/embed_grad.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_embed_grad_args *a = args;
	const struct moe_param *p = &a->array->slice[a->slice];
	int64_t first = a->v0 + a->slice * a->array->slice_rows, k = p->cols;

	if (a->first)
		memset(p->grad, 0, (size_t)p->piece * sizeof *p->grad);
	for (int t = 0; t < a->T; t++) {
		int64_t row = a->ids[t] - first;
		const float *x = a->grad_x + t * k;

		if (row < 0 || row >= p->rows)
			continue;
		worker->rows++;
		for (int64_t j = 0; j < k; j++)
			p->grad[row * k + j] += x[j];
	}
}

static double cost_us(const void *args)
{
	const struct moe_embed_grad_args *a = args;
	const struct moe_param *p = &a->array->slice[a->slice];
	double cleared = a->first ? (double)p->piece * sizeof(float) : 0;

	return moe_task_us() + moe_cycles_us(MOE_CYCLES_STEP / 4 * a->T) +
	       moe_stream_us(0, cleared);
}

MOE_CODELET(embed_grad, run, cost_us);
