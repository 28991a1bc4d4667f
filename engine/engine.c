/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing: settings are checked here, because StarPU clamps or falls back silently. */
#include "engine/internal.h"

#include <cblas.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_POLICY "lws"

static pthread_mutex_t singleton_lock = PTHREAD_MUTEX_INITIALIZER;
static struct moe_engine *_Atomic singleton;
static _Thread_local struct moe_engine *dry_engine; /* of this thread: it alone may use it */

/* Policies under which a worker mask was seen to hold on 1.3.10 and 1.4 (notes/starpu.md 1.2). */
static const char *const mask_policies[] = { "eager",  "prio", "lws",  "ws",
					     "random", "dm",   "dmda", "dmdas" };

bool moe_engine_policy_obeys_masks(const char *policy)
{
	for (size_t i = 0; i < MOE_COUNT(mask_policies); i++)
		if (!strcmp(policy, mask_policies[i]))
			return true;
	return false;
}

const char *moe_policy_name(int index, int *masks)
{
	struct starpu_sched_policy **list = starpu_sched_get_predefined_policies();

	for (int i = 0; list && list[i]; i++)
		if (i == index) {
			if (masks)
				*masks = moe_engine_policy_obeys_masks(list[i]->policy_name);
			return list[i]->policy_name;
		}
	return NULL;
}

static enum moe_status check_policy(const char *policy)
{
	char known[600];
	const char *name;
	size_t at = 0;

	if (!strcmp(policy, "heteroprio") || !strcmp(policy, "graph_test"))
		return moe_fail(MOE_ERR_CONFIG,
				"policy \"%s\" needs a set-up that moesaic does not do", policy);
	for (int i = 0; (name = moe_policy_name(i, NULL)); i++) {
		if (!strcmp(name, policy))
			return MOE_OK;
		if (at < sizeof known)
			at += (size_t)snprintf(known + at, sizeof known - at, " %s", name);
	}
	return moe_fail(MOE_ERR_CONFIG, "StarPU has no scheduling policy \"%s\"; known:%s", policy,
			known);
}

/* Makes the folder with its parents; whether a file can be made in it. */
static bool can_write(const char *dir)
{
	char path[PATH_MAX];
	int fd;

	if (snprintf(path, sizeof path - 16, "%s/", dir) >= (int)sizeof path - 16)
		return false;
	for (char *p = path + 1; *p; p++)
		if (*p == '/') {
			*p = 0;
			mkdir(path, 0700);
			*p = '/';
		}
	strcat(path, ".probeXXXXXX");
	fd = mkstemp(path);
	if (fd < 0)
		return false;
	close(fd);
	unlink(path);
	return true;
}

/* StarPU aborts when it cannot write its performance-model folder, so look before it does. */
static enum moe_status ensure_starpu_home(void)
{
	static const char *const places[] = { "STARPU_HOME", "XDG_CACHE_HOME", "HOME" };
	const char *models = getenv("STARPU_PERF_MODEL_DIR"), *home = NULL;
	char dir[PATH_MAX];

	for (size_t i = 0; !home && i < MOE_COUNT(places); i++)
		home = getenv(places[i]);
	snprintf(dir, sizeof dir, "%s/.starpu/sampling", home ? home : "");
	if (models ? can_write(models) : home && can_write(dir))
		return MOE_OK;
	snprintf(dir, sizeof dir, "/tmp/moesaic-starpu-%u", (unsigned)geteuid());
	if (!can_write(dir))
		return moe_fail(
			MOE_ERR_CONFIG,
			"StarPU needs a folder to write to, but neither %s nor %s is writable; "
			"set STARPU_HOME",
			models ? models
			: home ? home
			       : "HOME (unset)",
			dir);
	setenv("STARPU_HOME", dir, 1);
	unsetenv("STARPU_PERF_MODEL_DIR");
	return MOE_OK;
}

static enum moe_status check_workers(struct moe_engine *e, int *workers)
{
	int max = MOE_STARPU_MAX_CPUS;

	if (*workers < 0)
		return moe_fail(MOE_ERR_ARG, "workers is %d; 0 means one per core", *workers);
	if (*workers > max)
		return moe_fail(
			MOE_ERR_CONFIG,
			"%d workers asked for, but this StarPU (%d.%d) was built for at most %d; "
			"scripts/build-starpu builds one with raised limits",
			*workers, STARPU_MAJOR_VERSION, STARPU_MINOR_VERSION, max);
	if (*workers)
		return MOE_OK;
	*workers = MOE_MIN(e->topology.cpus, max);
	if (e->topology.cpus > max)
		moe_log(MOE_LOG_WARNING,
			"only %d of %d cores are used: this StarPU was built for at most %d "
			"workers; "
			"scripts/build-starpu builds one with raised limits",
			max, e->topology.cpus, max);
	return MOE_OK;
}

/* Variables that StarPU prefers to its conf, or that would make a submission wait for its tasks. */
static const char *const hidden[] = { "STARPU_SCHED", "STARPU_LIMIT_MAX_SUBMITTED_TASKS",
				      "STARPU_LIMIT_MIN_SUBMITTED_TASKS" };

static enum moe_status init_starpu(struct starpu_conf *conf, int *rc)
{
	char *kept[MOE_COUNT(hidden)] = { NULL };
	enum moe_status st = MOE_OK;

	for (size_t i = 0; i < MOE_COUNT(hidden); i++) {
		const char *value = getenv(hidden[i]);

		if (value && !(kept[i] = moe_strdup(value)))
			st = moe_fail(MOE_ERR_NOMEM, "no memory for the engine");
	}
	for (size_t i = 0; i < MOE_COUNT(hidden); i++)
		if (kept[i])
			unsetenv(hidden[i]);
	*rc = st == MOE_OK ? starpu_init(conf) : 0;
	for (size_t i = 0; i < MOE_COUNT(hidden); i++) {
		if (kept[i])
			setenv(hidden[i], kept[i], 1);
		moe_free(kept[i]);
	}
	return st;
}

static enum moe_status start_starpu(struct moe_engine *e, int workers)
{
	struct starpu_conf conf;
	int rc;

	MOE_TRY(ensure_starpu_home());
	/* With its NUMA nodes StarPU would copy frozen weights between them. */
	setenv("STARPU_USE_NUMA", "0", 0);
	setenv("STARPU_SILENT", "1", 0);
	if (workers > e->topology.cpus || e->topology.fake) {
		setenv("STARPU_WORKERS_NOBIND", "1", 0);
#if MOE_STARPU_HAS_GETBIND
		setenv("STARPU_WORKERS_GETBIND", "0", 0);
#endif
	}
	openblas_set_num_threads(1); /* the workers are the threads */
	starpu_conf_init(&conf);
	conf.precedence_over_environment_variables = 1;
	conf.sched_policy_name = e->policy;
	conf.ncpus = workers;
	conf.ncuda = 0;
	conf.nopencl = 0;
	MOE_TRY(init_starpu(&conf, &rc));
	if (rc)
		return moe_fail(MOE_ERR_CONFIG, "StarPU does not start with %d workers: %s",
				workers, strerror(-rc));
	starpu_profiling_status_set(STARPU_PROFILING_DISABLE);
	e->n_workers = (int)starpu_cpu_worker_get_count();
	if (e->n_workers != workers) {
		int got = e->n_workers;

		starpu_shutdown();
		return moe_fail(MOE_ERR_CONFIG, "StarPU started %d workers instead of %d", got,
				workers);
	}
	e->min_priority = starpu_sched_get_min_priority();
	e->max_priority = starpu_sched_get_max_priority();
	return MOE_OK;
}

static enum moe_status parts_from_specs(const struct moe_engine *e,
					const struct moe_part_spec *specs, struct moe_part *parts)
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

static int node_of_worker(const struct moe_engine *e, int w)
{
	int pu = starpu_worker_get_bindid(w);
	int cpus = MOE_MAX(1, e->topology.cpus);

	if (pu < 0 || e->topology.fake) /* not bound: spread evenly over the nodes */
		return (int)((int64_t)(w % cpus) * e->topology.nodes / cpus);
	return moe_topology_node_of_pu(&e->topology, pu);
}

/*
 * With at least as many nodes that have workers as parts, a part is a node; otherwise workers are
 * dealt out by index, and a part's memory is on a node of its own or, where nodes are too few, on
 * its first worker's. Never leaves a part without a worker.
 */
static void parts_from_topology(struct moe_engine *e)
{
	int node_rank[1024], used = 0;

	for (int i = 0; i < 1024; i++)
		node_rank[i] = -1;
	for (int w = 0; w < e->n_workers; w++) {
		int node = node_of_worker(e, w);

		if (node < 1024 && node_rank[node] < 0)
			node_rank[node] = used++;
	}
	for (int p = 0; p < e->n_parts; p++)
		e->parts[p].node = p % e->topology.nodes;
	for (int w = 0; w < e->n_workers; w++) {
		int node = node_of_worker(e, w);

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

static enum moe_status make_parts(struct moe_engine *e, const struct moe_engine_params *params)
{
	int nodes_with_workers = 0;
	uint64_t seen[16] = { 0 };

	for (int w = 0; w < e->n_workers; w++) {
		int node = node_of_worker(e, w);

		if (node < 1024 && !(seen[node / 64] >> (node % 64) & 1)) {
			seen[node / 64] |= 1ull << (node % 64);
			nodes_with_workers++;
		}
	}
	e->n_parts = params->parts ? params->parts : MOE_MAX(1, nodes_with_workers);
	if (params->part_specs)
		MOE_TRY(parts_from_specs(e, params->part_specs, e->parts));
	else
		parts_from_topology(e);
	if (e->n_parts > 1 && params->placement == MOE_PLACEMENT_STRICT &&
	    !moe_engine_policy_obeys_masks(e->policy))
		return moe_fail(
			MOE_ERR_CONFIG,
			"policy \"%s\" is not known to keep tasks on their part's workers; use one "
			"of eager prio lws ws dmda dmdas, soft placement, or one part",
			e->policy);
	return MOE_OK;
}

/* Brings StarPU's pause in line with what is wanted. Under idle_lock. */
static void apply_pause(struct moe_engine *e)
{
	bool stop = e->asleep || (e->held && !e->draining);

	if (stop == e->stopped)
		return;
	e->stopped = stop;
	if (stop)
		starpu_pause();
	else
		starpu_resume();
}

/* Nothing to put to sleep: asleep already, held, or with work there or coming. Under idle_lock. */
static bool must_run(const struct moe_engine *e)
{
	return e->asleep || e->held || e->draining || e->submitting ||
	       atomic_load(&e->outstanding) > 0;
}

/* Waits for a count of tasks, whether held or not. */
static void drain(struct moe_engine *e, atomic_llong *count)
{
	moe_engine_drain_begin(e);
	pthread_mutex_lock(&e->idle_lock);
	while (atomic_load(count) > 0)
		pthread_cond_wait(&e->idle_changed, &e->idle_lock);
	pthread_mutex_unlock(&e->idle_lock);
	moe_engine_drain_end(e);
}

/* Sleeps the workers once nothing has been outstanding for idle_spin_us. */
static void *idle_main(void *arg)
{
	struct moe_engine *e = arg;

	pthread_mutex_lock(&e->idle_lock);
	while (!e->closing) {
		if (must_run(e)) {
			pthread_cond_wait(&e->idle_changed, &e->idle_lock);
			continue;
		}
		if (e->params.idle_spin_us > 0) {
			struct timespec until;
			int rc;

			clock_gettime(CLOCK_REALTIME, &until);
			until.tv_nsec += (long)e->params.idle_spin_us % 1000000 * 1000;
			until.tv_sec +=
				e->params.idle_spin_us / 1000000 + until.tv_nsec / 1000000000;
			until.tv_nsec %= 1000000000;
			rc = pthread_cond_timedwait(&e->idle_changed, &e->idle_lock, &until);
			if (rc != ETIMEDOUT || e->closing || must_run(e))
				continue;
		}
		e->asleep = true;
		e->pauses++;
		apply_pause(e);
	}
	pthread_mutex_unlock(&e->idle_lock);
	return NULL;
}

void moe_engine_resume(struct moe_engine *e)
{
	pthread_mutex_lock(&e->idle_lock);
	if (e->asleep) {
		e->asleep = false;
		apply_pause(e);
		pthread_cond_broadcast(&e->idle_changed);
	}
	pthread_mutex_unlock(&e->idle_lock);
}

void moe_engine_drain_begin(struct moe_engine *e)
{
	pthread_mutex_lock(&e->idle_lock);
	e->draining++;
	e->asleep = false;
	apply_pause(e);
	pthread_mutex_unlock(&e->idle_lock);
}

void moe_engine_drain_end(struct moe_engine *e)
{
	pthread_mutex_lock(&e->idle_lock);
	e->draining--;
	apply_pause(e);
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
}

void moe_engine_task_done(struct moe_engine *e, struct moe_ticket *ticket)
{
	bool wake = false;

	if (ticket)
		wake = atomic_fetch_sub(&ticket->outstanding, 1) == 1;
	wake |= atomic_fetch_sub(&e->outstanding, 1) == 1;
	if (!wake)
		return;
	pthread_mutex_lock(&e->idle_lock);
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
}

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
	MOE_TRY(parts_from_specs(e, p->part_specs, parts));
	for (int i = 0; i < e->n_parts; i++)
		if (memcmp(&parts[i], &e->parts[i], sizeof *parts))
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

/* A thread that locks twice gets an error instead of waiting for itself. */
static void init_lock(pthread_mutex_t *lock)
{
	pthread_mutexattr_t attr;

	pthread_mutexattr_init(&attr);
	pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ERRORCHECK);
	pthread_mutex_init(lock, &attr);
	pthread_mutexattr_destroy(&attr);
}

static void destroy(struct moe_engine *e)
{
	for (int w = 0; w < e->n_workers; w++)
		moe_free(e->workers[w].scratch);
	free_retired(e);
	moe_memory_free_all(e);
	moe_topology_unload(&e->topology);
	pthread_mutex_destroy(&e->lock);
	pthread_mutex_destroy(&e->idle_lock);
	pthread_mutex_destroy(&e->memory_lock);
	pthread_cond_destroy(&e->idle_changed);
	moe_free(e->policy);
	moe_free(e->isa);
	moe_free(e);
}

static enum moe_status open_engine(const struct moe_engine_params *p, struct moe_engine **out)
{
	struct moe_engine *e = moe_calloc(1, sizeof *e);
	enum moe_status st = MOE_ERR_NOMEM;
	int workers = p->workers, rc;
	bool started = false;

	if (!e)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the engine");
	init_lock(&e->lock);
	pthread_mutex_init(&e->idle_lock, NULL);
	pthread_mutex_init(&e->memory_lock, NULL);
	pthread_cond_init(&e->idle_changed, NULL);
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
	MOE_TRY_GOTO(check_policy(e->policy), st, fail);
	MOE_TRY_GOTO(moe_topology_load(&e->topology), st, fail);
	MOE_TRY_GOTO(check_workers(e, &workers), st, fail);
	MOE_TRY_GOTO(start_starpu(e, workers), st, fail);
	started = true;
	MOE_TRY_GOTO(make_parts(e, p), st, fail);
	for (int w = 0; w < e->n_workers; w++) {
		e->workers[w].engine = e;
		e->workers[w].index = w;
	}
	rc = pthread_create(&e->idle_thread, NULL, idle_main, e);
	if (rc) {
		st = moe_fail(MOE_ERR_RUNTIME, "cannot create a thread: %s", strerror(rc));
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

	*out = NULL;
	if (!e)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the engine");
	if (dry_engine || parts < 1 || parts > MOE_MAX_PARTS || workers < 1) {
		moe_free(e);
		return moe_fail(MOE_ERR_ARG, "%d parts, %d workers; 1 to %d parts are possible",
				parts, workers, MOE_MAX_PARTS);
	}
	init_lock(&e->lock);
	pthread_mutex_init(&e->idle_lock, NULL);
	pthread_mutex_init(&e->memory_lock, NULL);
	pthread_cond_init(&e->idle_changed, NULL);
	e->dry = true;
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
		destroy(e);
		dry_engine = NULL;
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
	drain(e, &e->outstanding);
	pthread_mutex_lock(&e->idle_lock);
	e->closing = true;
	e->held = 0;
	e->asleep = false;
	apply_pause(e); /* StarPU aborts when shut down while paused */
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
	pthread_join(e->idle_thread, NULL);
	starpu_shutdown();
	singleton = NULL;
	destroy(e);
out:
	pthread_mutex_unlock(&singleton_lock);
	return st;
}

enum moe_status moe_engine_get_info(struct moe_engine *e, struct moe_engine_info *info)
{
	int version[3];

	MOE_TRY(moe_engine_check(e));
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
		.busy_seconds = (double)atomic_load(&e->busy_ns) * 1e-9,
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
	e->observed++;
	if (atomic_load(&e->outstanding))
		st = moe_fail(MOE_ERR_BUSY,
			      "tasks are outstanding; wait before changing the observer");
	else if (observer)
		e->observer = *observer;
	else
		memset(&e->observer, 0, sizeof e->observer);
	pthread_mutex_unlock(&e->lock);
	return st;
}

enum moe_status moe_engine_hold(struct moe_engine *e)
{
	MOE_TRY(moe_engine_check(e));
	pthread_mutex_lock(&e->idle_lock);
	e->held++;
	e->asleep = false; /* the idle pause becomes the held one */
	apply_pause(e);
	pthread_mutex_unlock(&e->idle_lock);
	return MOE_OK;
}

enum moe_status moe_engine_release(struct moe_engine *e)
{
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_engine_check(e));
	pthread_mutex_lock(&e->idle_lock);
	if (!e->held)
		st = moe_fail(MOE_ERR_STATE, "release without hold");
	else
		e->held--;
	apply_pause(e);
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
	return st;
}

static enum moe_status take_task_error(struct moe_engine *e)
{
	enum moe_status st = e->task_status;

	if (st != MOE_OK)
		moe_fail(st, "%s", e->task_error);
	e->task_status = MOE_OK;
	return st;
}

static enum moe_status wait_count(struct moe_engine *e, atomic_llong *count)
{
	enum moe_status st;

	if (e->dry)
		return MOE_OK;
	MOE_TRY(moe_engine_check_not_task("waiting"));
	pthread_mutex_lock(&e->idle_lock);
	while (atomic_load(count) > 0) {
		if (e->held && !e->draining) {
			pthread_mutex_unlock(&e->idle_lock);
			return moe_fail(MOE_ERR_STATE,
					"waiting would never end: the engine is held");
		}
		pthread_cond_wait(&e->idle_changed, &e->idle_lock);
	}
	st = take_task_error(e);
	pthread_mutex_unlock(&e->idle_lock);
	return st;
}

enum moe_status moe_engine_wait(struct moe_engine *e)
{
	MOE_TRY(moe_engine_check(e));
	return wait_count(e, &e->outstanding);
}

enum moe_status moe_ticket_wait(struct moe_ticket *t)
{
	MOE_TRY(moe_engine_check(t->engine));
	return wait_count(t->engine, &t->outstanding);
}

void moe_ticket_drain(struct moe_ticket *t)
{
	if (moe_engine_check(t->engine) == MOE_OK && moe_engine_check_not_task("waiting") == MOE_OK)
		drain(t->engine, &t->outstanding);
}

bool moe_ticket_done(struct moe_ticket *t)
{
	return atomic_load(&t->outstanding) == 0;
}

enum moe_status moe_ticket_create(struct moe_engine *e, struct moe_ticket **out)
{
	struct moe_ticket *t = moe_calloc(1, sizeof *t);

	if (!t)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a ticket");
	t->engine = e;
	*out = t;
	return MOE_OK;
}

void moe_ticket_destroy(struct moe_ticket *t)
{
	MOE_ASSERT(!t || !atomic_load(&t->outstanding));
	moe_free(t);
}

/* Under e->lock. Running tasks keep what they have: it is given back when nothing is outstanding.
 */
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

bool moe_engine_part_has_worker(const struct moe_engine *e, int part, int worker)
{
	return part >= 0 && part < e->n_parts && worker >= 0 && worker < STARPU_NMAXWORKERS &&
	       (e->parts[part].mask[worker / 32] >> (worker % 32) & 1);
}

int moe_engine_part_node(const struct moe_engine *e, int part)
{
	return e->parts[part].node;
}

enum moe_status moe_engine_check_running(struct moe_engine *e)
{
	bool held;

	MOE_TRY(moe_engine_check(e));
	pthread_mutex_lock(&e->idle_lock);
	held = e->held && !e->draining;
	pthread_mutex_unlock(&e->idle_lock);
	return held ? moe_fail(MOE_ERR_STATE, "waiting would never end: the engine is held")
		    : MOE_OK;
}

int moe_engine_parts(const struct moe_engine *e)
{
	return e->n_parts;
}

int moe_engine_workers(const struct moe_engine *e)
{
	return e->dry ? e->dry_workers : e->n_workers;
}

int64_t moe_engine_outstanding(const struct moe_engine *e)
{
	return atomic_load(&((struct moe_engine *)e)->outstanding);
}
