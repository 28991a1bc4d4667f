/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tasks that do little but move memory: as many of a part run at a time as its memory feeds, the
 * rest wait while the workers compute something else. A lane is a handle that such tasks write one
 * at a time in any order, so it is no dependency and no tracker sees it.
 */
#include "engine/internal.h"
#include "engine/machine.h"

void moe_lanes_start(struct moe_engine *e)
{
	for (int p = 0; p < e->n_parts; p++)
		for (int i = 0; i < MOE_LANES; i++)
			starpu_void_data_register(&e->lanes[p].handle[i]);
}

void moe_lanes_stop(struct moe_engine *e)
{
	for (int p = 0; p < e->n_parts; p++)
		for (int i = 0; i < MOE_LANES; i++)
			starpu_data_unregister(e->lanes[p].handle[i]);
}

starpu_data_handle_t moe_lane_next(struct moe_engine *e, int part)
{
	const struct moe_machine *m = moe_machine();
	struct moe_lanes *l = &e->lanes[MOE_MAX(part, 0)];
	double share = m->read_all_gbps / e->n_parts / MOE_MAX(m->read_gbps, 1e-3);
	int n = (int)MOE_MIN(MOE_MAX(share, 1), MOE_LANES);

	return l->handle[l->next++ % (unsigned)n];
}
