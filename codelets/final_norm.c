/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/final_norm.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_head_args *a = args;
	const struct moe_decoder *d = a->decoder;

	worker->rows = a->r1 - a->r0;
	for (int i = a->r0; i < a->r1; i++)
		moe_kernels()->rmsnorm(1, d->H, a->x + (size_t)a->batch.row[i] * (size_t)d->H, d->H,
				       d->final_norm, d->eps,
				       a->state->hn + (size_t)(i - a->r0) * (size_t)d->H, d->H);
}

static double cost_us(const void *args)
{
	const struct moe_head_args *a = args;
	double n = (double)(a->r1 - a->r0) * a->decoder->H * sizeof(float);

	return moe_task_us() + moe_stream_us(n, n);
}

MOE_CODELET(final_norm, run, cost_us);
