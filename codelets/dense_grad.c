/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/dense_grad.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

/* Tokens of one product: the sums do not depend on how the step was cut, and g comes from memory seldom. */
#define GRAD_ROWS 256

/* Operands that are made for it: normed rows of x or scaled ones of dy. */
static size_t operand_bytes(int64_t rows, int64_t cols)
{
	return (size_t)GRAD_ROWS * (size_t)MOE_MAX(rows, cols) * sizeof(float);
}

size_t moe_dense_grad_scratch(const struct moe_trained *a)
{
	int64_t rows = MOE_MIN(a->slice_rows, a->param.rows);

	return operand_bytes(rows, a->param.cols) +
	       moe_kernels()->linear_grad_scratch(GRAD_ROWS, rows, a->param.cols);
}

static const float *scaled(const struct moe_dense_grad_args *a, int t, int m, int64_t n,
			   const float *dy, float *out)
{
	for (int i = 0; i < m; i++)
		for (int64_t j = 0; j < n; j++)
			out[i * n + j] = a->scale[t + i] * dy[i * a->lddy + j];
	return out;
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_dense_grad_args *a = args;
	const struct moe_param *p = &a->array->slice[a->slice];
	int64_t n = p->rows, k = p->cols, n0 = a->slice * a->array->slice_rows;
	float *operand = worker->scratch;
	void *scratch = (char *)worker->scratch + operand_bytes(n, k);

	worker->rows = a->T;
	if (a->first)
		memset(p->grad, 0, (size_t)p->piece * sizeof *p->grad);
	MOE_ASSERT(!a->norm || !a->scale); /* one operand is made at most */
	for (int t = 0; t < a->T; t += GRAD_ROWS) {
		int m = MOE_MIN(GRAD_ROWS, a->T - t);
		const float *x = a->x + t * k, *dy = a->dy + t * a->lddy + n0;
		int64_t lddy = a->lddy;

		if (a->norm) {
			moe_kernels()->rmsnorm(m, (int)k, x, k, a->norm, a->eps, operand, k);
			x = operand;
		}
		if (a->scale) {
			dy = scaled(a, t, m, n, dy, operand);
			lddy = n;
		}
		moe_kernels()->linear_weight_grad(m, n, k, x, k, dy, lddy, p->grad, MOE_USE_GEMM,
						  scratch);
	}
}

static double cost_us(const void *args)
{
	const struct moe_dense_grad_args *a = args;
	const struct moe_param *p = &a->array->slice[a->slice];

	return moe_task_us() + moe_grad_us(a->T, (double)p->rows, (double)p->cols);
}

MOE_CODELET(dense_grad, run, cost_us);
