/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/dense_grad.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

size_t moe_dense_grad_scratch(const struct moe_trained *a)
{
	return (size_t)MOE_TOKEN_BLOCK *
	       (size_t)(a->param.cols + MOE_MIN(a->slice_rows, a->param.rows)) * sizeof(float);
}

static const float *scaled(const struct moe_dense_grad_args *a, int t, int m, int64_t n,
			   const float *dy, float *out)
{
	for (int i = 0; i < m; i++)
		for (int64_t j = 0; j < n; j++)
			out[i * n + j] = a->scale[t + i] * dy[i * a->lddy + j];
	return out;
}

/* By token blocks in order, so that the sums never depend on how the step was cut. */
static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_dense_grad_args *a = args;
	const struct moe_param *p = &a->array->slice[a->slice];
	int64_t n = p->rows, k = p->cols, n0 = a->slice * a->array->slice_rows;
	float *normed = worker->scratch, *rest = normed + (size_t)MOE_TOKEN_BLOCK * (size_t)k;

	worker->rows = a->T;
	if (a->first)
		memset(p->grad, 0, (size_t)p->piece * sizeof *p->grad);
	for (int t = 0; t < a->T; t += MOE_TOKEN_BLOCK) {
		int m = MOE_MIN(MOE_TOKEN_BLOCK, a->T - t);
		const float *x = a->x + t * k, *dy = a->dy + t * a->lddy + n0;
		int64_t lddy = a->lddy;

		if (a->norm) {
			moe_kernels()->rmsnorm(m, (int)k, x, k, a->norm, a->eps, normed, k);
			x = normed;
		}
		if (a->scale) {
			dy = scaled(a, t, m, n, dy, rest);
			lddy = n;
		}
		moe_kernels()->linear_weight_grad(m, n, k, x, k, dy, lddy, p->grad);
	}
}

static double cost_us(const void *args)
{
	const struct moe_dense_grad_args *a = args;
	const struct moe_param *p = &a->array->slice[a->slice];

	return moe_task_us() + moe_grad_us(a->T, (double)p->rows, (double)p->cols);
}

MOE_CODELET(dense_grad, run, cost_us);
