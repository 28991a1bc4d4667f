/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/copy.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_copy_args *a = args;

	worker->rows = a->t1 - a->t0;
	moe_copy_store(a);
}

static double cost_us(const void *args)
{
	const struct moe_copy_args *a = args;
	double n = (double)(a->t1 - a->t0) * a->n, each = (double)moe_dtype_size(a->array.dtype);

	return moe_task_us() + moe_stream_us(n * sizeof(float), n * each);
}

MOE_CODELET(store, run, cost_us);
