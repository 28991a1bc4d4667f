/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/repack_bwd.h"
#include "engine/codelet.h"

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	(void)e, (void)rows, (void)worker;
	for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
		moe_expert_transpose(a->layer, a->copy, a->part, index, (enum moe_expert_matrix)i);
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_expert_args *a = args;
	const int *first = a->layer->group_first;

	if (a->state)
		moe_group_run(args, false, one, worker);
	for (int e = first[a->group]; !a->state && e < first[a->group + 1]; e++)
		one(a, e, NULL, NULL, worker);
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;
	const struct moe_experts *l = a->layer;
	const int32_t *offset = a->state ? a->state->plan.offset : NULL;
	double bytes = 3.0 * (double)l->part[a->part].I * l->H * moe_group_weight_bytes(a);
	int n = 0;

	for (int e = l->group_first[a->group]; e < l->group_first[a->group + 1]; e++)
		n += !offset || offset[e + 1] > offset[e];
	return moe_task_us() + moe_cost_pack_us(moe_machine(), n * bytes);
}

MOE_CODELET_AT(repack_bwd, run, cost_us, MOE_HOME_PART);
