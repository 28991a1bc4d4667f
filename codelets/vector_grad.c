/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/vector_grad.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

#include <math.h>

#define COLUMNS 256 /* summed at a time, in double */

void moe_norm_part(int m, int n, const float *x, int64_t ldx, float eps, const float *dy,
		   int64_t lddy, bool add, float *part)
{
	if (!add)
		memset(part, 0, (size_t)n * sizeof *part);
	for (int i = 0; i < m; i++, x += ldx, dy += lddy) {
		double sum = 0;
		float inverse;

		for (int j = 0; j < n; j++)
			sum += (double)x[j] * (double)x[j];
		inverse = (float)(1 / sqrt(sum / n + (double)eps));
		for (int j = 0; j < n; j++)
			part[j] += dy[j] * (x[j] * inverse);
	}
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_vector_grad_args *a = args;
	const struct moe_param *p = &a->array->param;
	int64_t n = p->piece;

	worker->rows = a->rows;
	for (int64_t j = 0; j < n; j += COLUMNS) {
		int width = (int)MOE_MIN((int64_t)COLUMNS, n - j);
		double sum[COLUMNS];

		for (int c = 0; c < width; c++)
			sum[c] = a->first ? 0 : (double)p->grad[j + c];
		for (int i = 0; i < a->rows; i++)
			for (int c = 0; c < width; c++)
				sum[c] += (double)a->row[i * n + j + c];
		for (int c = 0; c < width; c++)
			p->grad[j + c] = (float)sum[c];
	}
}

static double cost_us(const void *args)
{
	const struct moe_vector_grad_args *a = args;

	return moe_task_us() +
	       moe_stream_us((double)a->rows * (double)a->array->param.piece * sizeof(float), 0);
}

MOE_CODELET(vector_grad, run, cost_us);
