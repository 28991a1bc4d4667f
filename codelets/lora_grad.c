/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/lora_grad.h"
#include "engine/codelet.h"

/* The widest of the layer's weights. */
static enum moe_compute compute_of(const struct moe_experts *l)
{
	enum moe_compute most = MOE_COMPUTE_DEFAULT;

	for (int p = 0; p < l->P; p++)
		for (int e = 0; e < l->E; e++) {
			const struct moe_experts_part *part = &l->part[p];
			struct moe_expert x = { .gate = part->gate[e], .up = part->up[e], .down = part->down[e] };

			most = MOE_MAX(most, moe_expert_compute(&x));
		}
	return most;
}

size_t moe_lora_grad_scratch(const struct moe_experts *l, int m)
{
	return (size_t)m * 3 * (size_t)moe_rank_width(l->r) * sizeof(float) +
	       moe_kernels()->expert_scratch(m, l->H, l->I, l->r, compute_of(l));
}

static void add(size_t n, const float *src, float *dst)
{
	for (size_t i = 0; i < n; i++)
		dst[i] += src[i];
}

/* v [m, r] and wg [m, 2r] summed over parts, then over chunks of I: one fixed order for every slicing */
static void sum_thin(const struct moe_experts *l, const struct moe_experts_state *s, int e, float *v,
		     float *wg)
{
	size_t o = (size_t)s->plan.offset[e], m = (size_t)s->plan.offset[e + 1] - o;
	size_t r = (size_t)moe_rank_width(l->r);

	memset(v, 0, m * r * sizeof *v);
	memset(wg, 0, m * 2 * r * sizeof *wg);
	for (int p = 0; p < l->P; p++) {
		const struct moe_experts_part_state *ps = &s->part[p];

		add(m * r, ps->v + o * r, v);
		for (int c = 0; c < moe_chunks(l->part[p].I); c++)
			add(m * 2 * r, ps->w_part + ((size_t)c * s->part_rows + o) * 2 * r, wg);
	}
}

static void one(const struct moe_expert_args *a, int index, const struct moe_expert *e,
		struct moe_expert_rows *rows, struct moe_worker *worker)
{
	const struct moe_experts *l = a->layer;
	struct moe_expert_grad grad = moe_expert_grad_of(l, a->part, index, a->first);
	size_t r = (size_t)moe_rank_width(l->r);
	float *v = worker->scratch, *wg = v + (size_t)rows->m * r;

	if (!rows->m) {
		if (a->first) {
			memset(grad.a_gu, 0, (size_t)l->a_gu.piece * sizeof(float));
			memset(grad.down_b, 0, (size_t)l->down_b.piece * sizeof(float));
		}
		return;
	}
	sum_thin(l, a->state, index, v, wg);
	rows->v = v;
	rows->wg = wg;
	moe_kernels()->expert_lora_grad(e, rows, &grad, wg + (size_t)rows->m * 2 * r);
}

static void run(const void *args, struct moe_worker *worker)
{
	struct moe_expert_args a = *(const struct moe_expert_args *)args;
	int64_t rows = 0;

	for (int left = a.groups; left > 0; left--, a.group += a.layer->P) {
		moe_group_run(&a, true, one, worker);
		rows += worker->rows;
	}
	worker->rows = rows;
}

static double cost_us(const void *args)
{
	struct moe_expert_args a = *(const struct moe_expert_args *)args;
	const struct moe_experts *l = a.layer;
	double us = moe_task_us();

	for (int left = a.groups; left > 0; left--, a.group += l->P)
		us += moe_group_gemm_us(&a, MOE_GEMM_FORWARD, (double)(l->ra + l->r), l->H, 2 * sizeof(float)) -
		      moe_task_us();
	return us;
}

MOE_CODELET_AT(lora_grad, run, cost_us, MOE_HOME_PART);
