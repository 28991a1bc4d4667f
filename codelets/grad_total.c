/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/update.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

#include <math.h>

/* As torch.nn.utils.clip_grad_norm_: factor = max_norm / (norm + 1e-6), at most 1. */
static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_grad_total_args *a = args;
	double experts = 0, rest = 0;

	(void)worker;
	for (int64_t i = 0; i < a->n_experts; i++)
		experts += a->squares[i];
	for (int64_t i = a->n_experts; i < a->n; i++)
		rest += a->squares[i];
	a->out->norm_experts = sqrt(experts);
	a->out->norm = sqrt(experts + rest);
	a->out->finite = isfinite(a->out->norm) && (!a->after || a->after->finite);
	a->out->factor = 1;
	if (a->max_norm > 0 && a->out->norm + 1e-6 > a->max_norm)
		a->out->factor = (float)(a->max_norm / (a->out->norm + 1e-6));
}

static double cost_us(const void *args)
{
	const struct moe_grad_total_args *a = args;

	return moe_task_us() + moe_cycles_us(MOE_CYCLES_STEP * (double)a->n);
}

MOE_CODELET(grad_total, run, cost_us);
