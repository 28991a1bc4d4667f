/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/gate_up.h"
#include "engine/codelet.h"

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	(void)index;
	if (a->head)
		moe_kernels()->expert_gather(e, rows, worker->scratch);
	moe_kernels()->expert_gate_up(e, rows, a->c0, a->c1, worker->scratch);
}

static void run(const void *args, struct moe_worker *worker)
{
	moe_group_run(args, false, one, worker);
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;
	const struct moe_experts *l = a->layer;
	double us = moe_group_gemm_us(a, MOE_GEMM_FORWARD, 2.0 * MOE_CHUNK * (a->c1 - a->c0),
				      l->H + l->r, moe_group_weight_bytes(a));

	return a->head ? us + moe_group_rows_us(a, l->ra) : us;
}

MOE_CODELET_AT(gate_up, run, cost_us, MOE_HOME_PART);
