/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/weight_grad.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_expert_args *a = args;
	const struct moe_experts *l = a->layer;

	worker->rows = moe_group_rows(a);
	for (int e = l->group_first[a->group]; e < l->group_first[a->group + 1]; e++) {
		struct moe_expert expert = moe_expert_of(l, a->part, e);
		struct moe_expert_rows rows = moe_expert_rows_of(l, a->state, a->part, e);
		struct moe_expert_grad grad = moe_expert_grad_of(l, a->part, e);

		if (a->first) {
			size_t bytes = (size_t)(l->part[a->part].I * l->H) * sizeof(float);

			memset(grad.gate, 0, bytes);
			memset(grad.up, 0, bytes);
			memset(grad.down, 0, bytes);
		}
		if (rows.m)
			moe_kernels()->expert_weight_grad(&expert, &rows, &grad, worker->scratch);
	}
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;

	return moe_group_gemm_us(a, 3.0 * (double)a->layer->part[a->part].I, a->layer->H);
}

MOE_CODELET(weight_grad, run, cost_us);
