/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/loss.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

#include <math.h>

/* Chunks in index order: the same bits however they were dealt out. */
static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_head_args *a = args;
	const struct moe_head_state *s = a->state;

	worker->rows = a->r1 - a->r0;
	for (int i = 0; i < a->r1 - a->r0; i++) {
		double max = (double)s->max[i], sum = 0, lse;

		for (int c = 1; c < a->decoder->head.n_chunks; c++)
			max = fmax(max, (double)s->max[c * MOE_TOKEN_BLOCK + i]);
		for (int c = 0; c < a->decoder->head.n_chunks; c++) {
			size_t at = (size_t)c * MOE_TOKEN_BLOCK + (size_t)i;

			sum += (double)s->sum[at] * exp((double)s->max[at] - max);
		}
		lse = max + log(sum);
		s->lse[i] = (float)lse;
		a->row_loss[a->r0 + i] = lse - (double)s->tgt[i];
	}
}

static double cost_us(const void *args)
{
	const struct moe_head_args *a = args;

	return moe_task_us() + moe_cycles_us((MOE_CYCLES_EXP + MOE_CYCLES_SCATTERED) *
					     (a->r1 - a->r0) * a->decoder->head.n_chunks);
}

MOE_CODELET(loss, run, cost_us);

static void sum_documents(const struct moe_loss_args *a)
{
	const struct moe_batch *b = &a->batch;
	int i = 0;

	for (int d = 0; d < b->n_docs; d++) {
		double sum = 0;
		int from = i;

		for (; i < b->n_rows && b->row[i] < b->doc_first[d + 1]; i++)
			sum += a->row_loss[i];
		a->out->doc_sum[d] = sum;
		if (a->out->doc_n)
			a->out->doc_n[d] = i - from;
	}
}

static void run_total(const void *args, struct moe_worker *worker)
{
	const struct moe_loss_args *a = args;
	double sum = 0;

	worker->rows = a->batch.n_rows;
	for (int i = 0; i < a->batch.n_rows; i++)
		sum += a->row_loss[i];
	a->out->sum = sum;
	a->out->n = a->batch.n_rows;
	if (a->out->doc_sum && a->batch.doc_first)
		sum_documents(a);
}

static double cost_total_us(const void *args)
{
	const struct moe_loss_args *a = args;

	return moe_task_us() + moe_cycles_us(MOE_CYCLES_STEP * a->batch.n_rows);
}

MOE_CODELET(loss_total, run_total, cost_total_us);
