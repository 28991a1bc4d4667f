/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/embed.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_attn_args *a = args;
	const struct moe_decoder *d = a->decoder;

	worker->rows = a->t1 - a->t0;
	for (int t = a->t0; t < a->t1; t++) {
		int32_t id = a->batch.ids[t], row = id % MOE_VOCAB_CHUNK;

		moe_kernels()->weight_unpack(&d->embed.chunk[id / MOE_VOCAB_CHUNK], row, row + 1,
					     a->state->x + (size_t)t * (size_t)d->H);
	}
}

static double cost_us(const void *args)
{
	const struct moe_attn_args *a = args;
	double n = (double)(a->t1 - a->t0) * a->decoder->H;

	return moe_task_us() +
	       moe_stream_us(n * moe_weight_bytes_each(a->decoder->embed.chunk), n * sizeof(float));
}

MOE_CODELET(embed, run, cost_us);
