/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/copy.h"
#include "codelets/cost.h"
#include "codelets/kernels/kernels.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_copy_args *a = args;

	worker->rows = a->t1 - a->t0;
	moe_copy_load(a);
	if (a->rows16)
		moe_kernels()->to_bf16(a->t1 - a->t0, a->n, a->rows + (size_t)a->t0 * (size_t)a->n, a->n,
				       a->rows16 + (int64_t)a->t0 * a->ld16, a->ld16);
}

static double cost_us(const void *args)
{
	const struct moe_copy_args *a = args;
	double n = (double)(a->t1 - a->t0) * a->n, each = (double)moe_dtype_size(a->array.dtype);

	return moe_task_us() + moe_stream_us(n * each, n * sizeof(float));
}

MOE_CODELET(load, run, cost_us);
