/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/logits.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_head_args *a = args;
	const struct moe_decoder *d = a->decoder;
	const struct moe_weight *w = &d->head.chunk[a->chunk];
	const struct moe_head_state *s = a->state;
	int m = a->r1 - a->r0, at = a->chunk * MOE_TOKEN_BLOCK;
	int64_t v0 = (int64_t)a->chunk * MOE_VOCAB_CHUNK;
	float *out = a->out ? a->out + (size_t)a->r0 * (size_t)d->V : s->logits;
	int32_t label[MOE_TOKEN_BLOCK];

	worker->rows = m;
	moe_kernels()->linear(m, w, 0, w->n, s->hn, d->H, NULL, NULL, out + v0, d->V,
			      worker->scratch);
	if (a->out)
		return;
	for (int i = 0; i < m; i++)
		label[i] = a->batch.label[a->batch.row[a->r0 + i]];
	moe_kernels()->ce_partial(m, v0, v0 + w->n, out + v0, d->V, label, s->max + at, s->sum + at,
				  s->tgt);
}

static double cost_us(const void *args)
{
	const struct moe_head_args *a = args;
	const struct moe_weight *w = &a->decoder->head.chunk[a->chunk];
	double m = a->r1 - a->r0, n = m * (double)w->n * sizeof(float);

	return moe_task_us() + moe_weight_us(MOE_GEMM_FORWARD, m, w, 0) + moe_stream_us(n, n);
}

MOE_CODELET(logits, run, cost_us);
