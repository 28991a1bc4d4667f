/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/down_bwd.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

/* The gradients of this run of chunks where the window's first micro-batch has no rows. */
static void clear(const struct moe_experts *l, struct moe_expert_grad *g, int part, int c0, int c1)
{
	int64_t I = l->part[part].I, r = l->r;
	int64_t n0 = (int64_t)c0 * MOE_CHUNK, n1 = MOE_MIN((int64_t)c1 * MOE_CHUNK, I);

	if (!g->down_a || n1 <= n0)
		return;
	memset(g->gate_b + n0 * r, 0, (size_t)((n1 - n0) * r) * sizeof(float));
	memset(g->up_b + n0 * r, 0, (size_t)((n1 - n0) * r) * sizeof(float));
	for (int j = 0; j < r; j++)
		memset(g->down_a + j * I + n0, 0, (size_t)(n1 - n0) * sizeof(float));
}

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	const struct moe_experts *l = a->layer;
	struct moe_expert_grad grad = moe_expert_grad_of(l, a->part, index, a->first);

	if (!rows->m) {
		if (a->first)
			clear(l, &grad, a->part, a->c0, a->c1);
		return;
	}
	if (a->head)
		moe_kernels()->expert_scatter(e, rows, worker->scratch);
	rows->h = moe_expert_late_h(l, a->state, a->part, index);
	moe_kernels()->expert_down_bwd(e, rows, &grad, a->c0, a->c1, worker->scratch);
}

static void run(const void *args, struct moe_worker *worker)
{
	moe_group_run(args, true, one, worker);
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;
	const struct moe_experts *l = a->layer;
	double n = (double)MOE_CHUNK * (a->c1 - a->c0);
	double us = moe_group_gemm_us(a, moe_backward_direction(a), n, l->H + l->r,
				      moe_group_weight_bytes(a));

	/* LoRA gradients of the I side: [n, r] of gate, up and down */
	if (l->r)
		us += moe_group_gemm_us(a, MOE_GEMM_FORWARD, n, 3.0 * l->r, 2 * sizeof(float)) -
		      moe_task_us();
	return a->head ? us + moe_group_rows_us(a, l->r) : us;
}

MOE_CODELET_AT(down_bwd, run, cost_us, MOE_HOME_PART);
