/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/update.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_update_args *a = args;
	double scale = a->adamw.grad_scale == 0 ? 1 : a->adamw.grad_scale;

	(void)worker;
	for (int i = 0; i < a->n; i++) {
		const struct moe_range *r = &a->range[i];

		for (int e = r->e0; e < r->e1; e++)
			a->squares[i][e - r->e0] =
				scale * scale *
				moe_kernels()->sum_squares(r->param->piece,
							   r->param->grad + e * r->param->piece);
	}
}

static double cost_us(const void *args)
{
	const struct moe_update_args *a = args;
	double n = 0;

	for (int i = 0; i < a->n; i++)
		n += (double)((a->range[i].e1 - a->range[i].e0) * a->range[i].param->piece);
	return moe_task_us() + moe_stream_us(n * sizeof(float), 0);
}

MOE_CODELET(grad_norm, run, cost_us);
