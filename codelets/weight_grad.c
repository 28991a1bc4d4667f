/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/weight_grad.h"
#include "engine/codelet.h"

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	struct moe_expert_grad all = moe_expert_grad_of(a->layer, a->part, index, a->first);
	float *const matrix[] = { all.gate, all.up, all.down };
	struct moe_expert_grad grad = { .first = a->first };

	*(a->matrix == MOE_GATE ? &grad.gate : a->matrix == MOE_UP ? &grad.up : &grad.down) = matrix[a->matrix];
	if (a->first && !rows->m)
		memset(matrix[a->matrix], 0,
		       (size_t)(a->layer->part[a->part].I * a->layer->H) * sizeof(float));
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
