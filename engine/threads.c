/* SPDX-License-Identifier: Apache-2.0 */
/* Threads for work that is not a graph of tasks, such as loading: the workers sleep meanwhile. */
#include "engine/internal.h"

#include <signal.h>

struct helper {
	struct moe_engine *engine;
	void (*run)(void *arg, int part);
	void *arg;
	int part;
	pthread_t thread;
};

/* To the cores of the part's node. Failure is not an error: the work is then done elsewhere. */
static void bind_here(const struct moe_engine *e, int part)
{
	hwloc_obj_t obj;

	if (e->topology.fake || e->topology.nodes < 2 || e->parts[part].node < 0)
		return;
	obj = hwloc_get_obj_by_type(e->topology.hwloc, HWLOC_OBJ_NUMANODE,
				    (unsigned)e->parts[part].node);
	if (obj)
		hwloc_set_cpubind(e->topology.hwloc, obj->cpuset, HWLOC_CPUBIND_THREAD);
}

static void *help(void *arg)
{
	struct helper *h = arg;

	bind_here(h->engine, h->part);
	h->run(h->arg, h->part);
	return NULL;
}

int moe_engine_parallel(struct moe_engine *e, void (*run)(void *arg, int part),
			void (*meanwhile)(void *arg), void *arg)
{
	int workers = moe_engine_workers(e), n = 0;
	struct helper *h = moe_calloc((size_t)workers, sizeof *h);
	sigset_t all, before;

	/* signals are for the caller's threads */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	for (; h && n < workers; n++) {
		h[n] = (struct helper){ e, run, arg, moe_engine_part_of_worker(e, n), 0 };
		if (pthread_create(&h[n].thread, NULL, help, &h[n]))
			break;
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!n)
		run(arg, 0);
	meanwhile(arg);
	for (int i = 0; i < n; i++)
		pthread_join(h[i].thread, NULL);
	moe_free(h);
	return MOE_MAX(n, 1);
}
