/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/gate_up.h"
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
		if (a->head)
			moe_kernels()->expert_gather(&expert, &rows);
		moe_kernels()->expert_gate_up(&expert, &rows, a->c0, a->c1, worker->scratch);
	}
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;

	return moe_group_gemm_us(a, 2.0 * MOE_CHUNK * (a->c1 - a->c0), a->layer->H);
}

MOE_CODELET(gate_up, run, cost_us);
