/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/attention_bwd_kv.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_attn_args *a = args;
	struct moe_attention attention = moe_attention_of(a);

	worker->rows = a->t1 - a->t0;
	moe_kernels()->attention_bwd_kv(&attention, a->t0, a->t1, a->h0, a->h1, worker->scratch);
}

static double cost_us(const void *args)
{
	const struct moe_attn_args *a = args;
	const struct moe_decoder *d = a->decoder;
	int end = a->t1, heads = (a->h1 - a->h0) * (d->heads / d->kv_heads);

	/* steps of a block: exact enough, and cheap for long documents */
	while (end < a->batch.T && a->batch.doc_start[end] < a->t1)
		end += MOE_TOKEN_BLOCK;
	return moe_task_us() + moe_attention_us(a->t1 - a->t0, end - a->t0, 2.0 * heads * d->dim);
}

MOE_CODELET(attention_bwd_kv, run, cost_us);
