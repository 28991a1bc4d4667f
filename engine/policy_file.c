/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scheduling policies that are no part of StarPU: a shared object with a struct starpu_sched_policy (docs/add-policy.md).
 * Once opened it stays, since StarPU and its workers may hold the struct until the process ends.
 */
#include "engine/internal.h"

#include <dlfcn.h>
#include <stdlib.h>

#define POLICY "moesaic_policy"
#define MASKS "moesaic_policy_obeys_masks"

bool moe_policy_is_file(const char *policy)
{
	return strchr(policy, '/') != NULL;
}

/* A second StarPU in the process has workers and lists of its own: the policy would wait for these. */
static bool other_starpu(void *object)
{
	void *theirs = dlsym(object, "starpu_task_submit"), *ours = dlsym(RTLD_DEFAULT, "starpu_task_submit");

	return theirs && ours && theirs != ours;
}

enum moe_status moe_policy_file(const char *policy, struct starpu_sched_policy **out, bool *masks)
{
	struct starpu_sched_policy *p;
	const int *obeys;
	void *object;

	/* all of it now: a missing function is an error here, and no crash in a worker */
	object = dlopen(policy, RTLD_NOW | RTLD_LOCAL);
	if (!object)
		return moe_fail(MOE_ERR_CONFIG, "policy %s: cannot be loaded: %s", policy, dlerror());
	p = dlsym(object, POLICY);
	if (!p)
		return moe_fail(MOE_ERR_CONFIG, "policy %s: defines no struct starpu_sched_policy " POLICY, policy);
	if (other_starpu(object))
		return moe_fail(MOE_ERR_CONFIG, "policy %s: is linked with another StarPU; link it with none, it finds this "
				"program's", policy);
	if (!p->policy_name || !p->init_sched || !p->deinit_sched || !p->push_task || !p->pop_task)
		return moe_fail(MOE_ERR_CONFIG, "policy %s: " POLICY " needs policy_name, init_sched, deinit_sched, push_task and "
				"pop_task", policy);
	obeys = dlsym(object, MASKS);
	if (out)
		*out = p;
	if (masks)
		*masks = obeys && *obeys;
	return MOE_OK;
}
