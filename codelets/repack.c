/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/repack.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

/* Trained quantised weights: masters from the source, if there is one, then codes. */
static void requantise(const struct moe_repack_args *a, enum moe_expert_matrix which, int e)
{
	if (a->coded[which])
		moe_experts_dequantise_master(a->layer, which, e, &a->coded[which][e], a->first_row[which]);
	else if (a->source[which])
		moe_experts_take_master(a->layer, which, e, a->source[which][e], a->dtype);
	moe_experts_requantise(a->layer, which, e);
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_repack_args *a = args;
	const struct moe_experts *l = a->layer;

	(void)worker;
	for (int e = l->group_first[a->group]; e < l->group_first[a->group + 1]; e++)
		for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
			if (l->requantise)
				requantise(a, (enum moe_expert_matrix)i, e);
			else if (a->coded[i])
				moe_experts_pack_coded(l, (enum moe_expert_matrix)i, e, a->part, &a->coded[i][e],
						       a->first_row[i], 1);
			else if (a->source[i])
				moe_experts_pack_part(l, (enum moe_expert_matrix)i, e, a->part,
						      a->source[i][e], a->dtype);
			else
				moe_experts_pack_master(l, (enum moe_expert_matrix)i, e, a->part);
}

static double cost_us(const void *args)
{
	const struct moe_repack_args *a = args;
	const struct moe_experts *l = a->layer;
	const struct moe_weight *gate = l->part[MOE_MAX(a->part, 0)].gate;
	int n = l->group_first[a->group + 1] - l->group_first[a->group];
	double elements = 3.0 * n * (double)(a->part < 0 ? l->I : l->part[a->part].I) * l->H;
	double packed = l->transposed ? elements * moe_weight_bytes_each(gate) : 0;

	return moe_task_us() +
	       moe_cost_pack_us(moe_machine(), elements * (double)sizeof(float) + packed);
}

MOE_CODELET_AT(repack, run, cost_us, MOE_HOME_PART);
