/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/join.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	(void)args, (void)worker;
}

static double cost_us(const void *args)
{
	(void)args;
	return moe_task_us();
}

MOE_CODELET(join, run, cost_us);
