/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/weight_grad.h"
#include "engine/codelet.h"

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	const struct moe_param *p = &a->layer->part[a->part].base[a->matrix];
	float *c = moe_piece(p->grad, p, index);
	struct moe_expert_grad grad = { .first = a->first,
					.gate = a->matrix == MOE_GATE ? c : NULL,
					.up = a->matrix == MOE_UP ? c : NULL,
					.down = a->matrix == MOE_DOWN ? c : NULL };

	if (a->first && !rows->m)
		memset(c, 0, (size_t)p->piece * sizeof *c);
	rows->h = moe_expert_late_h(a->layer, a->state, a->part, index);
	if (rows->m)
		moe_kernels()->expert_weight_grad(e, rows, &grad, worker->scratch);
}

static void run(const void *args, struct moe_worker *worker)
{
	moe_group_run(args, true, one, worker);
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;

	return moe_group_gemm_us(a, MOE_GEMM_FORWARD, (double)a->layer->part[a->part].I, a->layer->H,
				 2 * sizeof(float));
}

MOE_CODELET_AT(weight_grad, run, cost_us, MOE_HOME_PART);
