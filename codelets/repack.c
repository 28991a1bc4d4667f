/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/repack.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_repack_args *a = args;
	const struct moe_experts *l = a->layer;
	const struct moe_experts_part *part = &l->part[a->part];
	const struct moe_kernels *k = moe_kernels();
	int64_t I = part->I, H = l->H;

	(void)worker;
	for (int e = l->group_first[a->group]; e < l->group_first[a->group + 1]; e++) {
		int64_t at = I * H * e;

		k->weight_pack(&part->gate[e], a->gate + at, MOE_F32, I, H, H, MOE_USE_GEMM);
		k->weight_pack(&part->up[e], a->up + at, MOE_F32, I, H, H, MOE_USE_GEMM);
		k->weight_pack(&part->down[e], a->down + at, MOE_F32, H, I, I, MOE_USE_GEMM);
		for (int i = 0; i < MOE_EXPERT_MATRICES && l->transposed; i++)
			moe_expert_transpose(l, l->transposed, a->part, e,
					     (enum moe_expert_matrix)i);
	}
}

static double cost_us(const void *args)
{
	const struct moe_repack_args *a = args;
	const struct moe_experts *l = a->layer;
	const struct moe_weight *gate = l->part[a->part].gate;
	int n = l->group_first[a->group + 1] - l->group_first[a->group];
	double elements = 3.0 * n * (double)l->part[a->part].I * l->H;
	double packed = l->transposed ? elements * moe_weight_bytes_each(gate) : 0;

	return moe_task_us() +
	       moe_cost_pack_us(moe_machine(), elements * (double)sizeof(float) + packed);
}

MOE_CODELET_AT(repack, run, cost_us, MOE_HOME_PART);
