/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/gather.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_expert_args *a = args;
	const struct moe_experts *l = a->layer;

	worker->rows = moe_group_rows(a);
	for (int e = l->group_first[a->group]; e < l->group_first[a->group + 1]; e++) {
		struct moe_expert expert = moe_expert_of(l, a->part, e);
		struct moe_expert_rows rows = moe_expert_rows_of(l, a->state, a->part, e);

		if (!rows.m)
			continue;
		moe_kernels()->expert_gather(&expert, &rows);
	}
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;

	return moe_group_gemm_us(a, a->layer->H, 1 + a->layer->ra);
}

MOE_CODELET(gather, run, cost_us);
