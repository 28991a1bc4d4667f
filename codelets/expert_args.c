/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/expert_args.h"

#include "engine/engine.h"

/* Order of magnitude of one core's sgemm; only ratios between tasks matter to a policy. */
#define GEMM_FLOPS_PER_US 50e3
#define STREAM_BYTES_PER_US 10e3

void moe_group_run(const struct moe_expert_args *a, bool empty, moe_expert_op op,
		   struct moe_worker *worker)
{
	const struct moe_experts *l = a->layer;

	worker->rows = moe_group_rows(a);
	for (int e = l->group_first[a->group]; e < l->group_first[a->group + 1]; e++) {
		struct moe_expert expert = moe_expert_of(l, a->part, e);
		struct moe_expert_rows rows = moe_expert_rows_of(l, a->state, a->part, e);

		if (rows.m || empty)
			op(a, e, &expert, &rows, worker);
	}
}

int64_t moe_group_rows(const struct moe_expert_args *a)
{
	const struct moe_plan *plan = &a->state->plan;
	const int *first = a->layer->group_first;

	return plan->offset[first[a->group + 1]] - plan->offset[first[a->group]];
}

double moe_group_gemm_us(const struct moe_expert_args *a, double n, double k)
{
	const struct moe_plan *plan = &a->state->plan;
	double us = 1;

	for (int e = a->layer->group_first[a->group]; e < a->layer->group_first[a->group + 1];
	     e++) {
		int m = plan->offset[e + 1] - plan->offset[e];

		if (m)
			us += MOE_MAX(2.0 * m * n * k / GEMM_FLOPS_PER_US,
				      2 * n * k / STREAM_BYTES_PER_US);
	}
	return us;
}
