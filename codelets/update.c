/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/update.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

#include <math.h>

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_update_args *a = args;
	struct moe_adamw adamw = a->adamw;

	(void)worker;
	adamw.grad_scale = 1;
	if (a->norm) {
		if (!a->norm->finite)
			return; /* a non-finite gradient never reaches a parameter */
		adamw.grad_scale = a->norm->factor;
	}
	for (int i = 0; i < a->n; i++) {
		const struct moe_range *r = &a->range[i];
		int64_t at = r->e0 * r->param->piece;

		moe_kernels()->adamw((r->e1 - r->e0) * r->param->piece, r->param->value + at,
				     r->param->grad + at, r->param->m + at, r->param->v + at, &adamw);
	}
}

static double cost_us(const void *args)
{
	const struct moe_update_args *a = args;
	double n = 0;

	for (int i = 0; i < a->n; i++)
		n += (double)((a->range[i].e1 - a->range[i].e0) * a->range[i].param->piece);
	/* value, gradient and both moments come, all but the gradient go back */
	return moe_task_us() + moe_stream_us(4 * n * sizeof(float), 3 * n * sizeof(float));
}

MOE_CODELET(update, run, cost_us);
