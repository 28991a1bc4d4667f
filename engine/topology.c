/* SPDX-License-Identifier: Apache-2.0 */
/* What hwloc says about the machine (or about a fake one: HWLOC_SYNTHETIC, HWLOC_XMLFILE). */
#include "engine/internal.h"

enum moe_status moe_topology_load(struct moe_topology *t)
{
	int n;

	if (hwloc_topology_init(&t->hwloc) || hwloc_topology_load(t->hwloc)) {
		if (t->hwloc)
			hwloc_topology_destroy(t->hwloc);
		t->hwloc = NULL;
		return moe_fail(MOE_ERR_CONFIG, "hwloc cannot read the machine's topology; check "
						"HWLOC_SYNTHETIC and HWLOC_XMLFILE if set");
	}
	t->fake = !hwloc_topology_is_thissystem(t->hwloc);
	n = hwloc_get_nbobjs_by_type(t->hwloc, HWLOC_OBJ_NUMANODE);
	t->nodes = n > 0 ? n : 1;
	n = hwloc_get_nbobjs_by_type(t->hwloc, HWLOC_OBJ_CORE);
	if (n <= 0)
		n = hwloc_get_nbobjs_by_type(t->hwloc, HWLOC_OBJ_PU);
	t->cpus = n > 0 ? n : 1;
	return MOE_OK;
}

void moe_topology_unload(struct moe_topology *t)
{
	if (t->hwloc)
		hwloc_topology_destroy(t->hwloc);
	t->hwloc = NULL;
}

int moe_topology_node_of_pu(const struct moe_topology *t, int pu)
{
	hwloc_obj_t obj = hwloc_get_obj_by_type(t->hwloc, HWLOC_OBJ_PU, (unsigned)pu), node = NULL;

	if (!obj)
		return 0;
	while ((node = hwloc_get_next_obj_by_type(t->hwloc, HWLOC_OBJ_NUMANODE, node)))
		if (hwloc_bitmap_isincluded(obj->cpuset, node->cpuset))
			return (int)node->logical_index;
	return 0;
}

enum moe_status moe_host_describe(struct moe_host *out)
{
	struct moe_topology t = { .hwloc = NULL };
	int *v = out->starpu_version, packages;

	MOE_TRY(moe_topology_load(&t));
	packages = hwloc_get_nbobjs_by_type(t.hwloc, HWLOC_OBJ_PACKAGE);
	*out = (struct moe_host){
		.cores = t.cpus,
		.sockets = packages > 0 ? packages : 1,
		.nodes = t.nodes,
		.fake = t.fake,
		.starpu_max_workers = MOE_STARPU_MAX_CPUS,
		.starpu_max_nodes = STARPU_MAXNUMANODES,
		.starpu_max_buffers = STARPU_NMAXBUFS,
	};
	starpu_get_version(&v[0], &v[1], &v[2]);
	moe_topology_unload(&t);
	return MOE_OK;
}
