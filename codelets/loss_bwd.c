/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/loss_bwd.h"
#include "codelets/cost.h"
#include "codelets/vector_grad.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_head_args *a = args;
	const struct moe_decoder *d = a->decoder;
	size_t H = (size_t)d->H, chunk = (size_t)MOE_TOKEN_BLOCK * H;
	float *dx = worker->scratch;

	worker->rows = a->r1 - a->r0;
	memset(a->grad + (size_t)a->t0 * H, 0, (size_t)(a->t1 - a->t0) * H * sizeof *dx);
	for (int i = 0; i < a->r1 - a->r0; i++) {
		size_t at = (size_t)a->batch.row[a->r0 + i] * H;
		const float *part = a->state->dx + (size_t)i * H;

		memcpy(dx, part, H * sizeof *dx);
		for (int c = 1; c < d->head.n_chunks; c++)
			for (size_t j = 0; j < H; j++)
				dx[j] += part[(size_t)c * chunk + j];
		if (a->norm_part)
			moe_norm_part(1, d->H, a->x + at, d->H, d->eps, dx, d->H, i > 0, a->norm_part);
		moe_kernels()->rmsnorm_bwd(1, d->H, a->x + at, d->H, d->final_norm, d->eps, dx,
					   d->H, a->grad + at, d->H, false);
	}
}

static double cost_us(const void *args)
{
	const struct moe_head_args *a = args;
	const struct moe_decoder *d = a->decoder;
	double row = (double)d->H * sizeof(float), rows = a->r1 - a->r0;

	return moe_task_us() +
	       moe_stream_us(rows * (d->head.n_chunks + 1) * row, (a->t1 - a->t0 + rows) * row);
}

MOE_CODELET(loss_bwd, run, cost_us);
