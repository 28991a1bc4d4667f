/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing, the dry engine, the lock, scratch of the workers. */
#include "engine/internal.h"

#include <errno.h>
#include <unistd.h>

#define DEFAULT_POLICY "lws"

static pthread_mutex_t singleton_lock = PTHREAD_MUTEX_INITIALIZER;
static struct moe_engine *_Atomic singleton;
static _Thread_local struct moe_engine *dry_engine; /* of this thread: it alone may use it */

static enum moe_status check_params(const struct moe_engine_params *p)
{
	if (!p || p->struct_size < sizeof *p)
		return moe_fail(MOE_ERR_ARG, "engine params: struct_size is %zu, %zu expected",
				p ? p->struct_size : 0, sizeof *p);
	if (p->parts < 0 || p->parts > MOE_MAX_PARTS)
		return moe_fail(MOE_ERR_ARG,
				"parts is %d; 0 (one per NUMA node) to %d are possible", p->parts,
				MOE_MAX_PARTS);
	if (p->part_specs && !p->parts)
		return moe_fail(MOE_ERR_ARG, "part_specs needs parts");
	if ((unsigned)p->placement > MOE_PLACEMENT_SOFT)
		return moe_fail(MOE_ERR_ARG, "placement is %d", (int)p->placement);
	if (p->idle_spin_us < 0)
		return moe_fail(MOE_ERR_ARG, "idle_spin_us is %d", p->idle_spin_us);
	return MOE_OK;
}

static enum moe_status check_same(const struct moe_engine *e, const struct moe_engine_params *p)
{
	const char *policy = p->policy ? p->policy : DEFAULT_POLICY;
	struct moe_part parts[MOE_MAX_PARTS] = { 0 };

	if (p->workers && p->workers != e->n_workers)
		return moe_fail(MOE_ERR_CONFIG, "the engine is open with %d workers, not %d",
				e->n_workers, p->workers);
	if (p->parts && p->parts != e->n_parts)
		return moe_fail(MOE_ERR_CONFIG, "the engine is open with %d parts, not %d",
				e->n_parts, p->parts);
	if (strcmp(policy, e->policy))
		return moe_fail(MOE_ERR_CONFIG, "the engine is open with policy \"%s\", not \"%s\"",
				e->policy, policy);
	if (p->placement != e->params.placement)
		return moe_fail(MOE_ERR_CONFIG, "the engine is open with %s placement",
				e->params.placement ? "soft" : "strict");
	if (p->idle_spin_us != e->params.idle_spin_us)
		return moe_fail(MOE_ERR_CONFIG, "the engine is open with idle_spin_us %d, not %d",
				e->params.idle_spin_us, p->idle_spin_us);
	if (p->isa && (!e->isa || strcmp(p->isa, e->isa)))
		return moe_fail(MOE_ERR_CONFIG, "the engine is open with isa \"%s\", not \"%s\"",
				e->isa ? e->isa : "(default)", p->isa);
	if (!p->part_specs)
		return MOE_OK;
	MOE_TRY(moe_parts_from_specs(e, p->part_specs, parts));
	for (int i = 0; i < e->n_parts; i++)
		if (parts[i].node != e->parts[i].node ||
		    memcmp(parts[i].mask, e->parts[i].mask, sizeof parts[i].mask))
			return moe_fail(MOE_ERR_CONFIG,
					"the engine is open with another part_specs[%d]", i);
	return MOE_OK;
}

static void free_retired(struct moe_engine *e)
{
	for (int i = 0; i < e->n_retired; i++)
		moe_free(e->retired[i]);
	moe_free(e->retired);
	e->retired = NULL;
	e->n_retired = 0;
}

static void init_locks(struct moe_engine *e)
{
	pthread_mutexattr_t attr;

	/* a thread that locks twice gets an error instead of waiting for itself */
	pthread_mutexattr_init(&attr);
	pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ERRORCHECK);
	pthread_mutex_init(&e->lock, &attr);
	pthread_mutexattr_destroy(&attr);
	pthread_mutex_init(&e->idle_lock, NULL);
	pthread_mutex_init(&e->memory_lock, NULL);
	pthread_mutex_init(&e->host_lock, NULL);
	pthread_cond_init(&e->idle_changed, NULL);
}

static void destroy(struct moe_engine *e)
{
	for (int w = 0; w < e->n_workers; w++)
		moe_free(e->workers[w].scratch);
	free_retired(e);
	moe_memory_free_all(e);
	moe_topology_unload(&e->topology);
	moe_start_free(e);
	pthread_mutex_destroy(&e->lock);
	pthread_mutex_destroy(&e->idle_lock);
	pthread_mutex_destroy(&e->memory_lock);
	pthread_mutex_destroy(&e->host_lock);
	moe_free(e->deps.id);
	pthread_cond_destroy(&e->idle_changed);
	moe_free(e->policy);
	moe_free(e->isa);
	moe_free(e);
}

enum moe_status moe_engine_check_params(const struct moe_engine_params *params)
{
	MOE_TRY(check_params(params));
	MOE_TRY(moe_starpu_check_policy(params->policy ? params->policy : DEFAULT_POLICY));
	MOE_TRY(moe_starpu_check_workers(params->workers));
	return singleton ? MOE_OK : moe_engine_prepare(params->isa);
}

static enum moe_status open_engine(const struct moe_engine_params *p, struct moe_engine **out)
{
	struct moe_engine *e = moe_calloc(1, sizeof *e);
	enum moe_status st = MOE_ERR_NOMEM;
	int workers = p->workers, rc;
	bool started = false;

	if (!e)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the engine");
	init_locks(e);
	e->params = *p;
	e->params.part_specs = NULL;
	e->pid = getpid();
	e->references = 1;
	e->policy = moe_strdup(p->policy ? p->policy : DEFAULT_POLICY);
	e->isa = p->isa ? moe_strdup(p->isa) : NULL;
	if (!e->policy || (p->isa && !e->isa)) {
		moe_fail(st, "no memory for the engine");
		goto fail;
	}
	MOE_TRY_GOTO(moe_starpu_check_policy(e->policy), st, fail);
	MOE_TRY_GOTO(moe_topology_load(&e->topology), st, fail);
	MOE_TRY_GOTO(moe_starpu_check_workers(workers), st, fail);
	workers = moe_starpu_workers(e, workers);
	MOE_TRY_GOTO(moe_engine_prepare(e->isa), st, fail);
	MOE_TRY_GOTO(moe_starpu_start(e, workers), st, fail);
	started = true;
	MOE_TRY_GOTO(moe_parts_make(e, p), st, fail);
	MOE_TRY_GOTO(moe_start_make(e), st, fail);
	moe_lanes_start(e);
	for (int w = 0; w < e->n_workers; w++) {
		e->workers[w].engine = e;
		e->workers[w].index = w;
	}
	rc = pthread_create(&e->idle_thread, NULL, moe_idle_main, e);
	if (rc) {
		st = moe_fail(MOE_ERR_RUNTIME, "cannot create a thread: %s", strerror(rc));
		moe_lanes_stop(e);
		goto fail;
	}
	*out = e;
	return MOE_OK;
fail:
	if (started)
		starpu_shutdown();
	destroy(e);
	return st;
}

enum moe_status moe_engine_open(const struct moe_engine_params *params, struct moe_engine **out)
{
	struct moe_engine *e;
	enum moe_status st;

	if (!out)
		return moe_fail(MOE_ERR_ARG, "out is NULL");
	*out = NULL;
	MOE_TRY(check_params(params));
	e = singleton;
	if (e && e->pid != getpid()) /* before the lock, which a lost thread may have held */
		return moe_fail(MOE_ERR_FORKED,
				"this process was forked while the engine was open; "
				"StarPU cannot be used in it");
	if (e)
		MOE_TRY(moe_engine_check_not_task("opening"));
	pthread_mutex_lock(&singleton_lock);
	e = singleton;
	if (e) {
		st = check_same(e, params);
		if (st == MOE_OK)
			e->references++;
	} else if (starpu_is_initialized()) {
		st = moe_fail(MOE_ERR_CONFIG, "StarPU is already running in this process with "
					      "somebody else's settings");
	} else {
		st = open_engine(params, &e);
		singleton = e;
	}
	*out = st == MOE_OK ? e : NULL;
	pthread_mutex_unlock(&singleton_lock);
	return st;
}

enum moe_status moe_engine_open_dry(int parts, int workers, struct moe_engine **out)
{
	struct moe_engine *e = moe_calloc(1, sizeof *e);
	const char *isa;
	bool lost;

	*out = NULL;
	if (!e)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the engine");
	if (parts < 1 || parts > MOE_MAX_PARTS || workers < 1) {
		moe_free(e);
		return moe_fail(MOE_ERR_ARG, "%d parts, %d workers; 1 to %d parts are possible",
				parts, workers, MOE_MAX_PARTS);
	}
	init_locks(e);
	pthread_mutex_lock(&singleton_lock);
	isa = singleton ? singleton->isa : NULL; /* its kernels are the process's */
	e->isa = isa ? moe_strdup(isa) : NULL;
	lost = isa && !e->isa;
	pthread_mutex_unlock(&singleton_lock);
	if (lost) {
		destroy(e);
		return moe_fail(MOE_ERR_NOMEM, "no memory for the engine");
	}
	e->dry = true;
	e->outer = dry_engine;
	e->pid = getpid();
	e->n_parts = parts;
	e->dry_workers = workers;
	for (int p = 0; p < parts; p++)
		e->parts[p].node = p;
	*out = dry_engine = e;
	return MOE_OK;
}

void moe_engine_dry_counts(const struct moe_engine *e, struct moe_dry_counts *out)
{
	*out = e->counts;
	out->handles = e->n_tensors;
	out->scratch_bytes = e->scratch_bytes;
}

bool moe_engine_is_dry(const struct moe_engine *e)
{
	return e->dry;
}

enum moe_status moe_engine_check(const struct moe_engine *e)
{
	if (!e)
		return moe_fail(MOE_ERR_ARG, "engine is NULL");
	if (e == dry_engine)
		return MOE_OK;
	if (e != singleton) /* never looked into: it may be gone */
		return moe_fail(MOE_ERR_ARG, "this engine is not open; was it closed already?");
	if (e->pid != getpid())
		return moe_fail(MOE_ERR_FORKED,
				"the engine belongs to process %d; StarPU cannot be "
				"used after fork",
				(int)e->pid);
	return MOE_OK;
}

enum moe_status moe_engine_check_not_task(const char *what)
{
	if (starpu_worker_get_id() >= 0)
		return moe_fail(MOE_ERR_STATE, "%s is not possible in a task or observer", what);
	return MOE_OK;
}

enum moe_status moe_engine_lock(struct moe_engine *e)
{
	if (pthread_mutex_lock(&e->lock) == EDEADLK)
		return moe_fail(MOE_ERR_STATE,
				"not possible while this thread is submitting (or in an observer)");
	return MOE_OK;
}

enum moe_status moe_engine_close(struct moe_engine *e)
{
	enum moe_status st = MOE_OK;

	if (!e)
		return MOE_OK;
	MOE_TRY(moe_engine_check(e));
	if (e->dry) {
		dry_engine = e->outer;
		destroy(e);
		return MOE_OK;
	}
	MOE_TRY(moe_engine_check_not_task("closing"));
	pthread_mutex_lock(&singleton_lock);
	if (e != singleton) {
		st = moe_engine_check(e);
		goto out;
	}
	if (e->references > 1) {
		e->references--;
		goto out;
	}
	if (e->n_tensors) {
		st = moe_fail(MOE_ERR_STATE,
			      "%lld tensors are still registered: destroy models and "
			      "blocks before the engine",
			      (long long)e->n_tensors);
		goto out;
	}
	if (e->recorder)
		moe_recorder_stop(e, NULL); /* what it says is in the log too */
	moe_idle_drain(e, &e->outstanding);
	pthread_mutex_lock(&e->idle_lock);
	e->closing = true;
	e->held = 0;
	e->asleep = false;
	moe_idle_apply_pause(e); /* StarPU aborts when shut down while paused */
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
	pthread_join(e->idle_thread, NULL);
	moe_lanes_stop(e);
	starpu_shutdown();
	singleton = NULL;
	destroy(e);
out:
	pthread_mutex_unlock(&singleton_lock);
	return st;
}

enum moe_status moe_engine_get_info(struct moe_engine *e, struct moe_engine_info *info)
{
	struct moe_idle idle;
	int version[3];

	MOE_TRY(moe_engine_check(e));
	moe_engine_idle(e, &idle);
	if (!info || info->struct_size < sizeof *info)
		return moe_fail(MOE_ERR_ARG, "engine info: struct_size is not set");
	starpu_get_version(&version[0], &version[1], &version[2]);
	MOE_TRY(moe_engine_lock(e));
	pthread_mutex_lock(&e->idle_lock);
	*info = (struct moe_engine_info){
		.struct_size = sizeof *info,
		.workers = e->n_workers,
		.parts = e->n_parts,
		.nodes = e->topology.nodes,
		.starpu_max_workers = MOE_STARPU_MAX_CPUS,
		.starpu_version = { version[0], version[1], version[2] },
		.fake_topology = e->topology.fake,
		.policy = e->policy,
		.isa = e->isa,
		.handles = e->n_tensors,
		.tasks = (int64_t)e->next_task,
		.remote_tasks = atomic_load(&e->remote_tasks),
		.busy_seconds = idle.busy,
		.pauses = e->pauses,
	};
	pthread_mutex_unlock(&e->idle_lock);
	pthread_mutex_unlock(&e->lock);
	return MOE_OK;
}

enum moe_status moe_engine_observe(struct moe_engine *e, const struct moe_observer *observer)
{
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_engine_check(e));
	MOE_TRY(moe_engine_lock(e));
	if (atomic_load(&e->outstanding)) {
		st = moe_fail(MOE_ERR_BUSY,
			      "tasks are outstanding; wait before changing the observer");
	} else {
		e->observed++; /* what tensors remember is of an earlier one */
		e->observer = observer ? *observer : (struct moe_observer){ 0 };
	}
	pthread_mutex_unlock(&e->lock);
	return st;
}

/* Under e->lock. Running tasks keep what they have: it is given back when nothing is outstanding. */
static enum moe_status grow_scratch(struct moe_engine *e, size_t bytes)
{
	void **grown;

	if (!atomic_load(&e->outstanding))
		free_retired(e);
	grown = moe_realloc(e->retired, (size_t)(e->n_retired + e->n_workers), sizeof *grown);
	if (!grown)
		return moe_fail(MOE_ERR_NOMEM, "no memory for scratch");
	e->retired = grown;
	for (int w = 0; w < e->n_workers; w++) {
		/* each worker touches its own first, so the pages are local */
		void *p = moe_alloc(bytes, 1);

		if (!p)
			return moe_fail(MOE_ERR_NOMEM,
					"no memory for %zu bytes of scratch per worker", bytes);
		if (e->workers[w].scratch)
			e->retired[e->n_retired++] = e->workers[w].scratch;
		__atomic_store_n(&e->workers[w].scratch, p, __ATOMIC_RELEASE);
	}
	e->scratch_bytes = bytes;
	return MOE_OK;
}

enum moe_status moe_engine_reserve_scratch(struct moe_engine *e, size_t bytes)
{
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_engine_check(e));
	if (e->dry) {
		e->scratch_bytes = MOE_MAX(e->scratch_bytes, bytes);
		return MOE_OK;
	}
	MOE_TRY(moe_engine_lock(e));
	if (bytes > e->scratch_bytes)
		st = grow_scratch(e, bytes);
	pthread_mutex_unlock(&e->lock);
	return st;
}

const char *moe_engine_isa(const struct moe_engine *e)
{
	return e->isa;
}

int moe_engine_workers(const struct moe_engine *e)
{
	return e->dry ? e->dry_workers : e->n_workers;
}
