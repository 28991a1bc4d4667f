/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/expert_args.h"

#include "engine/engine.h"

/* The group's first expert from e on that has rows, or counts without. */
static int next_of(const struct moe_expert_args *a, int e, bool empty)
{
	const int32_t *offset = a->state->plan.offset;

	while (!empty && e < a->layer->group_first[a->group + 1] && offset[e] == offset[e + 1])
		e++;
	return e;
}

void moe_group_run(const struct moe_expert_args *a, bool empty, moe_expert_op op,
		   struct moe_worker *worker)
{
	const struct moe_experts *l = a->layer;
	int end = l->group_first[a->group + 1], e = next_of(a, l->group_first[a->group], empty);
	struct moe_expert now, next;

	worker->rows = moe_group_rows(a);
	if (e < end)
		next = moe_expert_of(l, a->copy, a->part, e);
	for (int follow; e < end; e = follow) {
		struct moe_expert_rows rows = moe_expert_rows_of(l, a->state, a->part, e);

		now = next;
		follow = next_of(a, e + 1, empty);
		if (follow < end) {
			next = moe_expert_of(l, a->copy, a->part, follow);
			now.next = &next;
		}
		op(a, e, &now, &rows, worker);
	}
}

int64_t moe_group_rows(const struct moe_expert_args *a)
{
	const struct moe_plan *plan = &a->state->plan;
	const int *first = a->layer->group_first;

	return plan->offset[first[a->group + 1]] - plan->offset[first[a->group]];
}

double moe_group_weight_bytes(const struct moe_expert_args *a)
{
	return moe_weight_bytes_each(&a->layer->part[a->part].gate[0]);
}

double moe_group_gemm_us(const struct moe_expert_args *a, enum moe_gemm direction, double n, double k,
			 double bytes_per_weight)
{
	const struct moe_machine *machine = moe_machine();
	const int32_t *offset = a->state->plan.offset;
	double us = moe_task_us();

	for (int e = a->layer->group_first[a->group]; e < a->layer->group_first[a->group + 1]; e++)
		us += moe_cost_gemm_us(machine, direction, offset[e + 1] - offset[e], n, k,
				       bytes_per_weight);
	return us;
}

double moe_group_rows_us(const struct moe_expert_args *a, int thin)
{
	double n = (double)moe_group_rows(a) * a->layer->H * sizeof(float);

	return moe_stream_us(n, n) + moe_f32_gemm_us(MOE_GEMM_FORWARD, (double)moe_group_rows(a),
						     thin, a->layer->H);
}
