/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/attention.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_attn_args *a = args;
	struct moe_attention attention = moe_attention_of(a);

	worker->rows = a->t1 - a->t0;
	moe_kernels()->attention(&attention, a->t0, a->t1, a->h0, a->h1, worker->scratch);
}

static double cost_us(const void *args)
{
	const struct moe_attn_args *a = args;

	return moe_task_us() + moe_attention_us(a->t1 - a->t0, a->batch.past + a->t1 - a->batch.doc_start[a->t0],
						(double)(a->h1 - a->h0) * a->decoder->dim);
}

MOE_CODELET(attention, run, cost_us);
