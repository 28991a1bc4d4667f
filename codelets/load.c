/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/copy.h"
#include "codelets/cost.h"
#include "codelets/kernels/kernels.h"
#include "engine/codelet.h"

/* Straight to bf16, a row at a time. */
static void load_rows16(const struct moe_copy_args *a, float *row)
{
	const int64_t *strides = a->array.strides;
	int64_t next = strides[0] || strides[1] ? strides[0] : a->array.shape[1];
	struct moe_copy_args one = *a;

	one.rows = row;
	one.t0 = 0;
	one.t1 = 1;
	for (int64_t t = a->t0; t < a->t1; t++) {
		one.array.data = (char *)a->array.data + (size_t)(t * next) * moe_dtype_size(a->array.dtype);
		moe_copy_load(&one);
		moe_kernels()->to_bf16(1, a->n, row, a->n, a->rows16 + t * a->ld16, a->ld16);
	}
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_copy_args *a = args;

	worker->rows = a->t1 - a->t0;
	if (!a->rows) {
		load_rows16(a, worker->scratch);
		return;
	}
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
