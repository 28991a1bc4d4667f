/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/scatter.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	(void)a, (void)index;
	moe_kernels()->expert_scatter(e, rows, worker->scratch);
}

static void run(const void *args, struct moe_worker *worker)
{
	moe_group_run(args, false, one, worker);
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;

	return moe_task_us() + moe_group_rows_us(a, a->layer->r);
}

MOE_CODELET_AT(scatter, run, cost_us, MOE_HOME_PART);
