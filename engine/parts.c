/* SPDX-License-Identifier: Apache-2.0 */
/* Which workers and which NUMA node each part has. */
#include "engine/internal.h"

#define MAX_NODES 1024 /* Linux numbers no more */

/* Policies under which a worker mask was seen to hold on StarPU 1.3.10 and 1.4. */
static const char *const mask_policies[] = { "eager",  "prio", "lws",  "ws",
					     "random", "dm",   "dmda", "dmdas" };

bool moe_engine_policy_obeys_masks(const char *policy)
{
	for (size_t i = 0; i < MOE_COUNT(mask_policies); i++)
		if (!strcmp(policy, mask_policies[i]))
			return true;
	return false;
}

enum moe_status moe_parts_from_specs(const struct moe_engine *e, const struct moe_part_spec *specs,
				     struct moe_part *parts)
{
	for (int p = 0; p < e->n_parts; p++) {
		struct moe_part *part = &parts[p];

		if (specs[p].node < 0 || specs[p].node >= e->topology.nodes)
			return moe_fail(MOE_ERR_CONFIG, "part %d is on NUMA node %d; there are %d",
					p, specs[p].node, e->topology.nodes);
		if (specs[p].n_workers < 1 || !specs[p].workers)
			return moe_fail(MOE_ERR_CONFIG, "part %d has no workers", p);
		part->node = specs[p].node;
		for (int i = 0; i < specs[p].n_workers; i++) {
			int w = specs[p].workers[i];

			if (w < 0 || w >= e->n_workers)
				return moe_fail(MOE_ERR_CONFIG,
						"part %d names worker %d; there are %d", p, w,
						e->n_workers);
			if (part->mask[w / 32] >> (w % 32) & 1)
				return moe_fail(MOE_ERR_CONFIG, "part %d names worker %d twice", p,
						w);
			part->mask[w / 32] |= 1u << (w % 32);
			part->n_workers++;
		}
	}
	return MOE_OK;
}

int moe_engine_worker_node(const struct moe_engine *e, int w)
{
	int pu = starpu_worker_get_bindid(w);
	int cpus = MOE_MAX(1, e->topology.cpus);

	if (pu < 0 || e->topology.fake) /* not bound: spread evenly over the nodes */
		return (int)((int64_t)(w % cpus) * e->topology.nodes / cpus);
	return moe_topology_node_of_pu(&e->topology, pu);
}

int moe_engine_worker_cpu(const struct moe_engine *e, int worker)
{
	int pu = starpu_worker_get_bindid(worker);
	hwloc_obj_t obj = pu < 0 ? NULL
				 : hwloc_get_obj_by_type(e->topology.hwloc, HWLOC_OBJ_PU,
							 (unsigned)pu);

	return obj ? (int)obj->os_index : -1;
}

/*
 * With at least as many nodes that have workers as parts, a part is a node; otherwise workers are
 * dealt out by index, and a part's memory is on a node of its own or, where nodes are too few, on
 * its first worker's. Never leaves a part without a worker.
 */
static void parts_from_topology(struct moe_engine *e)
{
	int node_rank[MAX_NODES], used = 0;

	for (int i = 0; i < MAX_NODES; i++)
		node_rank[i] = -1;
	for (int w = 0; w < e->n_workers; w++) {
		int node = moe_engine_worker_node(e, w);

		if (node < MAX_NODES && node_rank[node] < 0)
			node_rank[node] = used++;
	}
	for (int p = 0; p < e->n_parts; p++)
		e->parts[p].node = p % e->topology.nodes;
	for (int w = 0; w < e->n_workers; w++) {
		int node = moe_engine_worker_node(e, w);

		for (int p = 0; p < e->n_parts; p++) {
			struct moe_part *part = &e->parts[p];
			int groups = MOE_MIN(e->n_parts, e->n_workers);
			bool mine = used >= e->n_parts ? node_rank[node] % e->n_parts == p
						       : w % groups == p % groups;

			if (!mine)
				continue;
			part->mask[w / 32] |= 1u << (w % 32);
			if (!part->n_workers++ &&
			    (used >= e->n_parts || e->n_parts > e->topology.nodes))
				part->node = node;
		}
	}
}

enum moe_status moe_parts_make(struct moe_engine *e, const struct moe_engine_params *params)
{
	int nodes_with_workers = 0;
	uint64_t seen[MAX_NODES / 64] = { 0 };

	for (int w = 0; w < e->n_workers; w++) {
		int node = moe_engine_worker_node(e, w);

		if (node < MAX_NODES && !(seen[node / 64] >> (node % 64) & 1)) {
			seen[node / 64] |= 1ull << (node % 64);
			nodes_with_workers++;
		}
	}
	/* of more nodes, several share a part */
	e->n_parts = params->parts ? params->parts : MOE_MIN(MOE_MAX(1, nodes_with_workers), MOE_MAX_PARTS);
	if (params->part_specs)
		MOE_TRY(moe_parts_from_specs(e, params->part_specs, e->parts));
	else
		parts_from_topology(e);
	if (e->n_parts > 1 && params->placement == MOE_PLACEMENT_STRICT &&
	    !e->policy_masks)
		return moe_fail(
			MOE_ERR_CONFIG,
			"policy \"%s\" is not known to keep tasks on their part's workers; use one "
			"of eager prio lws ws dmda dmdas, soft placement, or one part",
			e->policy);
	return MOE_OK;
}

bool moe_engine_part_has_worker(const struct moe_engine *e, int part, int worker)
{
	return part >= 0 && part < e->n_parts && worker >= 0 && worker < STARPU_NMAXWORKERS &&
	       (e->parts[part].mask[worker / 32] >> (worker % 32) & 1);
}

int moe_engine_part_of_worker(const struct moe_engine *e, int worker)
{
	for (int p = 0; p < e->n_parts; p++)
		if (moe_engine_part_has_worker(e, p, worker))
			return p;
	return 0;
}

int moe_engine_part_node(const struct moe_engine *e, int part)
{
	return e->parts[part].node;
}

int moe_engine_parts(const struct moe_engine *e)
{
	return e->n_parts;
}
