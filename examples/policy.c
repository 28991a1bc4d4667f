/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A scheduling policy of one's own (docs/add-policy.md): one list that all workers take from, the highest priority
 * first, and of equal ones the newest, whose data are still in a cache. Something to begin experiments with.
 *
 *     cc -O2 -fPIC -shared policy.c -o policy.so $(pkg-config --cflags starpu-1.3)    # or starpu-1.4
 *     moesaic train ... --policy ./policy.so --trace mine.mxt
 */
#include <limits.h>
#include <starpu.h>
#include <starpu_scheduler.h>
#include <stdlib.h>

struct ready {
	struct starpu_task_list list;
	starpu_pthread_mutex_t lock;
};

static void init(unsigned context)
{
	struct ready *r = calloc(1, sizeof *r);

	if (!r)
		abort(); /* StarPU has no way to refuse here */
	starpu_task_list_init(&r->list);
	STARPU_PTHREAD_MUTEX_INIT(&r->lock, NULL);
	starpu_sched_ctx_set_policy_data(context, r);
	/* priorities of the graph come through as they are */
	starpu_sched_ctx_set_min_priority(context, INT_MIN);
	starpu_sched_ctx_set_max_priority(context, INT_MAX);
}

static void deinit(unsigned context)
{
	struct ready *r = starpu_sched_ctx_get_policy_data(context);

	STARPU_PTHREAD_MUTEX_DESTROY(&r->lock);
	free(r);
}

/* A worker that waits for a lock must say so: others may want it to stop meanwhile. */
static void lock(struct ready *r)
{
	starpu_worker_relax_on();
	STARPU_PTHREAD_MUTEX_LOCK(&r->lock);
	starpu_worker_relax_off();
}

/*
 * A task is ready. What can be known of it: task->priority; task->cl->name, its kind (moesaic's graph: docs/graph.md);
 * starpu_task_expected_length(task, arch, 0), its predicted microseconds; task->workerids, where it may run. Once the
 * lock is given back another worker may have run it and freed it: everything that is asked of it is asked before.
 */
static int push(struct starpu_task *task)
{
	struct ready *r = starpu_sched_ctx_get_policy_data(task->sched_ctx);
	struct starpu_worker_collection *workers = starpu_sched_ctx_get_worker_collection(task->sched_ctx);
	struct starpu_sched_ctx_iterator it;
	unsigned able[STARPU_NMAXWORKERS];
	int n = 0;

	lock(r);
	for (workers->init_iterator(workers, &it); workers->has_next(workers, &it);) {
		unsigned w = workers->get_next(workers, &it);

		if (starpu_worker_can_execute_task(w, task, 0))
			able[n++] = w;
	}
	starpu_task_list_push_front(&r->list, task);
	starpu_push_task_end(task);
	STARPU_PTHREAD_MUTEX_UNLOCK(&r->lock);
	while (n > 0 && !starpu_wake_worker_relax_light(able[--n]))
		; /* that one is awake: another may sleep */
	return 0;
}

/* The calling worker is idle: a task that it may run, or NULL. */
static struct starpu_task *pop(unsigned context)
{
	struct ready *r = starpu_sched_ctx_get_policy_data(context);
	unsigned worker = starpu_worker_get_id_check();
	struct starpu_task *best = NULL;

	lock(r);
	for (struct starpu_task *t = starpu_task_list_begin(&r->list); t != starpu_task_list_end(&r->list);
	     t = starpu_task_list_next(t))
		if (starpu_worker_can_execute_task(worker, t, 0) && (!best || t->priority > best->priority))
			best = t;
	if (best)
		starpu_task_list_erase(&r->list, best);
	STARPU_PTHREAD_MUTEX_UNLOCK(&r->lock);
	return best;
}

/* What moesaic looks for. StarPU needs the five functions and texts below; its header has more that may be set. */
struct starpu_sched_policy moesaic_policy = {
	.init_sched = init,
	.deinit_sched = deinit,
	.push_task = push,
	.pop_task = pop,
	.policy_name = "newest-first",
	.policy_description = "highest priority first, of equal ones the newest",
	.worker_type = STARPU_WORKER_LIST,
};

/* Tasks are given to workers that starpu_worker_can_execute_task allows only: parts may be bound to their workers. */
const int moesaic_policy_obeys_masks = 1;
