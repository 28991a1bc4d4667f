/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/copy.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_copy_args *a = args;

	worker->rows = a->t1 - a->t0;
	moe_copy_load(a);
}

static double cost_us(const void *args)
{
	const struct moe_copy_args *a = args;

	return 1 + 1e-3 * (a->t1 - a->t0) * a->n;
}

MOE_CODELET(load, run, cost_us);
