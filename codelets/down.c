/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/down.h"
#include "engine/codelet.h"

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	(void)index;
	moe_kernels()->expert_down(e, rows, a->c0, a->c1, worker->scratch);
}

static void run(const void *args, struct moe_worker *worker)
{
	moe_group_run(args, false, one, worker);
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;
	const struct moe_experts *l = a->layer;

	return moe_group_gemm_us(a, MOE_GEMM_FORWARD, (double)MOE_CHUNK * (a->c1 - a->c0),
				 (double)l->part[a->part].I + l->r, moe_group_weight_bytes(a));
}

MOE_CODELET_AT(down, run, cost_us, MOE_HOME_PART);
