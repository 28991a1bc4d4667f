/* SPDX-License-Identifier: Apache-2.0 */
/* Starting StarPU. Settings are checked first, because it clamps or falls back silently. */
#include "engine/internal.h"

#include <cblas.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

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

static bool unprepared(const char *policy)
{
	return !strcmp(policy, "heteroprio") || !strcmp(policy, "graph_test");
}

enum moe_status moe_starpu_check_policy(const char *policy)
{
	char known[600];
	const char *name;
	size_t at = 0;

	if (moe_policy_is_file(policy))
		return moe_policy_file(policy, NULL, NULL);
	if (unprepared(policy))
		return moe_fail(MOE_ERR_CONFIG,
				"policy \"%s\" needs a set-up that moesaic does not do", policy);
	for (int i = 0; (name = moe_policy_name(i, NULL)); i++) {
		if (!strcmp(name, policy))
			return MOE_OK;
		if (at < sizeof known && !unprepared(name))
			at += (size_t)snprintf(known + at, sizeof known - at, " %s", name);
	}
	return moe_fail(MOE_ERR_CONFIG, "StarPU has no scheduling policy \"%s\"; known:%s (one of yours: a path, with a slash)", policy,
			known);
}

/* Makes the folder with its parents; whether a file can be made in it, else errno says why. */
static bool can_write(const char *dir)
{
	char path[PATH_MAX];
	int fd;

	if (snprintf(path, sizeof path - 16, "%s/", dir) >= (int)sizeof path - 16) {
		errno = ENAMETOOLONG;
		return false;
	}
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
			"StarPU needs a folder to write to, but neither %s nor %s is writable (%s); "
			"set STARPU_HOME",
			models ? models
			: home ? home
			       : "HOME (unset)",
			dir, strerror(errno));
	setenv("STARPU_HOME", dir, 1);
	unsetenv("STARPU_PERF_MODEL_DIR");
	return MOE_OK;
}

enum moe_status moe_starpu_check_workers(int workers)
{
	int max = MOE_STARPU_MAX_CPUS;

	if (workers < 0)
		return moe_fail(MOE_ERR_ARG, "workers is %d; 0 means one per core", workers);
	if (workers > max)
		return moe_fail(
			MOE_ERR_CONFIG,
			"%d workers asked for, but this StarPU (%d.%d) was built for at most %d; "
			"scripts/build-starpu builds one with raised limits",
			workers, STARPU_MAJOR_VERSION, STARPU_MINOR_VERSION, max);
	return MOE_OK;
}

int moe_starpu_workers(const struct moe_engine *e, int workers)
{
	int max = MOE_STARPU_MAX_CPUS;

	if (workers)
		return workers;
	if (e->topology.cpus > max)
		moe_log(MOE_LOG_WARNING,
			"only %d of %d cores are used: this StarPU was built for at most %d "
			"workers; "
			"scripts/build-starpu builds one with raised limits",
			max, e->topology.cpus, max);
	return MOE_MIN(e->topology.cpus, max);
}

/* Whole numbers that StarPU reads while it starts: it aborts where one is none, or negative. */
static const char *const numbers[] = {
	"STARPU_BACKOFF_MAX", "STARPU_BACKOFF_MIN", "STARPU_BUS_CALIBRATE", "STARPU_BUS_STATS", "STARPU_CALIBRATE",
	"STARPU_CALIBRATE_MINIMUM", "STARPU_CATCH_SIGNALS", "STARPU_DISABLE_ASYNCHRONOUS_COPY", "STARPU_DISABLE_KERNELS",
	"STARPU_DISABLE_PINNING", "STARPU_DISK_SWAP_SIZE", "STARPU_DISPLAY_BINDINGS", "STARPU_ENABLE_STATS", "STARPU_FXT_TRACE",
	"STARPU_GLOBAL_ARBITER", "STARPU_HISTORY_MAX_ERROR", "STARPU_LIMIT_BANDWIDTH", "STARPU_LIMIT_CPU_MEM",
	"STARPU_LIMIT_CPU_NUMA_MEM", "STARPU_MAIN_THREAD_BIND", "STARPU_MAIN_THREAD_COREID", "STARPU_MAIN_THREAD_CPUID",
	"STARPU_MAX_MEMORY_USE", "STARPU_MAX_WORKERSIZE", "STARPU_MEMORY_STATS", "STARPU_MINIMUM_AVAILABLE_MEM",
	"STARPU_MINIMUM_CLEAN_BUFFERS", "STARPU_MIN_WORKERSIZE", "STARPU_NCPU", "STARPU_NCPUS", "STARPU_NCUDA", "STARPU_NOPENCL",
	"STARPU_NTASKS_THRESHOLD", "STARPU_NTHREADS_PER_CORE", "STARPU_PREFETCH", "STARPU_PROFILING", "STARPU_RESERVE_NCPU",
	"STARPU_SILENT", "STARPU_SINGLE_COMBINED_WORKER", "STARPU_STATS", "STARPU_SYNTHESIZE_ARITY_COMBINED_WORKER",
	"STARPU_TARGET_AVAILABLE_MEM", "STARPU_TARGET_CLEAN_BUFFERS", "STARPU_TASK_PROGRESS", "STARPU_TRACE_BUFFER_SIZE",
	"STARPU_USE_NUMA", "STARPU_WATCHDOG_CRASH", "STARPU_WATCHDOG_DELAY", "STARPU_WATCHDOG_TIMEOUT", "STARPU_WINDOW_TIME_SIZE",
	"STARPU_WORKERS_GETBIND", "STARPU_WORKERS_NOBIND", "STARPU_WORKER_STATS", "STARPU_WORKER_TREE",
};

static enum moe_status check_environment(const struct moe_engine *e)
{
	const char *list, *host = getenv("STARPU_HOSTNAME"), *threads = getenv("STARPU_NTHREADS_PER_CORE");
	int per_core = hwloc_get_nbobjs_by_type(e->topology.hwloc, HWLOC_OBJ_PU) / MOE_MAX(e->topology.cpus, 1);

	for (size_t i = 0; i < MOE_COUNT(numbers); i++) {
		const char *value = getenv(numbers[i]);
		char *end;

		if (value && (strtol(value, &end, 10) < 0 || *end))
			return moe_fail(MOE_ERR_CONFIG, "%s is \"%s\"; StarPU aborts where it is no whole number from 0",
					numbers[i], value);
	}
	for (int i = 0; i < 2; i++) {
		list = getenv(i ? "STARPU_WORKERS_COREID" : "STARPU_WORKERS_CPUID");
		if (list && *list && (list[strspn(list, "0123456789 ,-")] || list[0] < '0' || list[0] > '9'))
			return moe_fail(MOE_ERR_CONFIG, "STARPU_WORKERS_%s is \"%s\"; StarPU aborts where it is no list of numbers",
					i ? "COREID" : "CPUID", list);
	}
	if (threads && *threads && (atoi(threads) < 1 || atoi(threads) > MOE_MAX(per_core, 1)))
		return moe_fail(MOE_ERR_CONFIG, "STARPU_NTHREADS_PER_CORE is %s; cores here have %d and StarPU aborts", threads,
				MOE_MAX(per_core, 1));
	if (host && strchr(host, '/'))
		return moe_fail(MOE_ERR_CONFIG, "STARPU_HOSTNAME is \"%s\"; StarPU names files by it and aborts where it has a slash",
				host);
	return MOE_OK;
}

/* "", or which variable leaves workers no cores. */
static const char *cores_taken(void)
{
	return getenv("STARPU_RESERVE_NCPU")	     ? " (STARPU_RESERVE_NCPU is set)"
	       : getenv("STARPU_MAIN_THREAD_BIND") ? " (STARPU_MAIN_THREAD_BIND is set)"
						     : "";
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

/*
 * 1.4.7 built for 32 workers ends with a fault in starpu_init on topologies of 448 cores and more, whatever it is
 * asked for; 416 are fine (tried with HWLOC_SYNTHETIC). 1.3.10 starts on 4800.
 */
#define CRASHING_CORES 416

static enum moe_status check_cores(const struct moe_engine *e)
{
	if (STARPU_MAJOR_VERSION == 1 && STARPU_MINOR_VERSION < 4)
		return MOE_OK;
	if (e->topology.cpus <= MOE_MAX(CRASHING_CORES, MOE_STARPU_MAX_CPUS))
		return MOE_OK;
	return moe_fail(MOE_ERR_CONFIG,
			"this StarPU (%d.%d, at most %d workers) crashes on machines of more than %d cores, and "
			"this one has %d; scripts/build-starpu builds one with raised limits",
			STARPU_MAJOR_VERSION, STARPU_MINOR_VERSION, MOE_STARPU_MAX_CPUS, CRASHING_CORES,
			e->topology.cpus);
}

enum moe_status moe_starpu_start(struct moe_engine *e, int workers)
{
	struct starpu_conf conf;
	int rc;

	MOE_TRY(check_cores(e));
	MOE_TRY(check_environment(e));
	MOE_TRY(ensure_starpu_home());
	/* With its NUMA nodes StarPU would copy frozen weights between them. */
	setenv("STARPU_USE_NUMA", "0", 0);
	setenv("STARPU_SILENT", "1", 0);
	if (workers > e->topology.cpus || e->topology.fake)
		setenv("STARPU_WORKERS_NOBIND", "1", 0);
#if MOE_STARPU_HAS_GETBIND
	/* Not for more workers than cores: where this setting changes between two starts of a
	 * process, 1.4.7 frees memory twice at the second shutdown. */
	if (e->topology.fake)
		setenv("STARPU_WORKERS_GETBIND", "0", 0);
#endif
	openblas_set_num_threads(1); /* the workers are the threads */
	starpu_conf_init(&conf);
	conf.precedence_over_environment_variables = 1;
	if (moe_policy_is_file(e->policy))
		MOE_TRY(moe_policy_file(e->policy, &conf.sched_policy, &e->policy_masks));
	else
		e->policy_masks = moe_engine_policy_obeys_masks(e->policy);
	conf.sched_policy_name = conf.sched_policy ? NULL : e->policy;
	conf.ncpus = workers;
	conf.ncuda = 0;
	conf.nopencl = 0;
	MOE_TRY(init_starpu(&conf, &rc));
	if (rc)
		return moe_fail(MOE_ERR_CONFIG, "StarPU does not start with %d workers: %s%s",
				workers, strerror(-rc), cores_taken());
	starpu_profiling_status_set(STARPU_PROFILING_DISABLE);
	e->n_workers = (int)starpu_cpu_worker_get_count();
	if (e->n_workers != workers) {
		int got = e->n_workers;

		starpu_shutdown();
		return moe_fail(MOE_ERR_CONFIG, "StarPU started %d workers instead of %d%s", got,
				workers, cores_taken());
	}
	e->min_priority = starpu_sched_get_min_priority();
	e->max_priority = starpu_sched_get_max_priority();
	return MOE_OK;
}
