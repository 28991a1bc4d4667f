/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/lora_grad.h"
#include "engine/codelet.h"

size_t moe_lora_grad_scratch(const struct moe_experts *l, int m)
{
	return (size_t)m * 3 * (size_t)l->r * sizeof(float) +
	       moe_kernels()->expert_scratch(m, l->H, l->I, l->r);
}

/* dst[m, n] = sum over parts, then over chunks of I, of src: one fixed order for every slicing */
static void sum_parts(const struct moe_experts *l, const struct moe_experts_state *s, int e, int n,
		      bool of_v, float *dst)
{
	size_t o = (size_t)s->plan.offset[e], m = (size_t)s->plan.offset[e + 1] - o;

	memset(dst, 0, m * (size_t)n * sizeof *dst);
	for (int p = 0; p < l->P; p++) {
		const float *src = of_v ? s->part[p].v_part : s->part[p].w_part;

		for (int c = 0; c < moe_chunks(l->part[p].I); c++) {
			const float *chunk = src + ((size_t)c * s->part_rows + o) * (size_t)n;

			for (size_t i = 0; i < m * (size_t)n; i++)
				dst[i] += chunk[i];
		}
	}
}

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	const struct moe_experts *l = a->layer;
	struct moe_expert_grad grad = moe_expert_grad_of(l, a->part, index);
	float *v = worker->scratch, *wg = v + (size_t)rows->m * (size_t)l->r;

	if (a->first) {
		memset(grad.a_gu, 0, (size_t)l->a_gu.piece * sizeof(float));
		memset(grad.down_b, 0, (size_t)l->down_b.piece * sizeof(float));
	}
	if (!rows->m)
		return;
	sum_parts(l, a->state, index, l->r, true, v);
	sum_parts(l, a->state, index, 2 * l->r, false, wg);
	rows->v = v;
	rows->wg = wg;
	moe_kernels()->expert_lora_grad(e, rows, &grad, wg + (size_t)rows->m * 2 * (size_t)l->r);
}

static void run(const void *args, struct moe_worker *worker)
{
	moe_group_run(args, true, one, worker);
}

static double cost_us(const void *args)
{
	const struct moe_expert_args *a = args;
	const struct moe_experts *l = a->layer;

	return moe_group_gemm_us(a, MOE_GEMM_FORWARD, (double)(l->ra + l->r), l->H,
				 2 * sizeof(float));
}

MOE_CODELET(lora_grad, run, cost_us);
