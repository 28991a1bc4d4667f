/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: opening and closing, policies, the environment, sleeping, holding. Everything that opens an engine runs in
 * a child of its own.
 */
#include "engine/internal.h"
#include "tests/block_check.h"
#include "tests/graph_check.h"

#include <pthread.h>

const char moe_suite_name[] = "engine";

static struct moe_engine_params params_of(int workers, int parts)
{
	return (struct moe_engine_params){ .struct_size = sizeof(struct moe_engine_params),
					   .workers = workers,
					   .parts = parts };
}

/* A small graph, submitted `runs` times. */
static void run_graph(struct moe_engine *e, int tasks, int runs, int parts)
{
	struct graph g;

	graph_make(&g, 8, tasks, parts);
	graph_register(&g, e);
	for (int i = 0; i < runs; i++)
		graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, runs);
	graph_free(&g);
}

/* ---- open and close ---- */

static void open_twice(const void *arg)
{
	struct moe_engine_params p = params_of(2, 2), q;
	struct moe_engine *e, *f;
	int one = 1, zero = 0;
	struct moe_part_spec spec[2] = { { 0, 1, &zero }, { 0, 1, &one } };

	(void)arg;
	p.isa = "ref";
	CHECK_OK(moe_engine_open(&p, &e));
	CHECK_OK(moe_engine_open(&p, &f));
	CHECK(e == f);
	q = params_of(0, 0); /* defaults ask for nothing in particular */
	CHECK_OK(moe_engine_open(&q, &f));
	CHECK_OK(moe_engine_close(f));
	p.part_specs = spec; /* what the topology gave anyway */
	CHECK_OK(moe_engine_open(&p, &f));
	CHECK_OK(moe_engine_close(f));
#define DIFFERENT(field, v, text)                                                                  \
	q = p, q.field = (v);                                                                      \
	CHECK_ERROR(moe_engine_open(&q, &f), MOE_ERR_CONFIG, text);                                \
	CHECK(f == NULL)
	spec[1].workers = &zero;
	DIFFERENT(idle_spin_us, 0, "part_specs[1]");
	p.part_specs = NULL;
	DIFFERENT(workers, 1, "2 workers, not 1");
	DIFFERENT(parts, 1, "2 parts, not 1");
	DIFFERENT(policy, "eager", "\"lws\", not \"eager\"");
	DIFFERENT(placement, MOE_PLACEMENT_SOFT, "strict placement");
	DIFFERENT(idle_spin_us, 7, "idle_spin_us 0, not 7");
	DIFFERENT(isa, "other", "\"ref\", not \"other\"");
#undef DIFFERENT
	run_graph(e, 50, 1, 2);
	CHECK_OK(moe_engine_close(e));
	run_graph(e, 50, 1, 2); /* one reference is left */
	CHECK_OK(moe_engine_close(e));
	CHECK_ERROR(moe_engine_close(e), MOE_ERR_ARG, "not open");
	CHECK_OK(moe_engine_close(NULL));
	p = params_of(1, 0); /* after the last close other settings are fine */
	CHECK_OK(moe_engine_open(&p, &e));
	CHECK(info_of(e).workers == 1 && info_of(e).parts == 1);
	run_graph(e, 50, 1, 0);
	CHECK_OK(moe_engine_close(e));
}

static void bad_parameters(const void *arg)
{
	struct moe_engine_params p = params_of(0, 0), q;
	struct moe_engine *e = (struct moe_engine *)&p;
	char limit[32];

	(void)arg;
#define REFUSED(field, v, status, text)                                                            \
	q = p, q.field = (v);                                                                      \
	CHECK_ERROR(moe_engine_open(&q, &e), status, text);                                        \
	CHECK(e == NULL)
	REFUSED(struct_size, 4, MOE_ERR_ARG, "struct_size is 4");
	REFUSED(workers, -1, MOE_ERR_ARG, "workers is -1");
	snprintf(limit, sizeof limit, "at most %d", MOE_STARPU_MAX_CPUS);
	REFUSED(workers, MOE_STARPU_MAX_CPUS + 1, MOE_ERR_CONFIG, limit);
	REFUSED(workers, 1 << 30, MOE_ERR_CONFIG, limit);
	REFUSED(parts, -1, MOE_ERR_ARG, "parts is -1");
	REFUSED(parts, MOE_MAX_PARTS + 1, MOE_ERR_ARG, "parts is");
	REFUSED(idle_spin_us, -5, MOE_ERR_ARG, "idle_spin_us is -5");
	REFUSED(placement, (enum moe_placement)9, MOE_ERR_ARG, "placement is 9");
	REFUSED(policy, "fastest", MOE_ERR_CONFIG, "\"fastest\"; known:");
	CHECK(strstr(moe_last_error(), " lws") && strstr(moe_last_error(), " dmdas"));
	CHECK(!strstr(moe_last_error(), " heteroprio")); /* not offered: it is refused */
	REFUSED(policy, "", MOE_ERR_CONFIG, "known:");
	REFUSED(policy, "heteroprio", MOE_ERR_CONFIG, "heteroprio");
#undef REFUSED
	CHECK_ERROR(moe_engine_open(NULL, &e), MOE_ERR_ARG, "struct_size");
	CHECK_ERROR(moe_engine_open(&p, NULL), MOE_ERR_ARG, "out");
	CHECK_ERROR(moe_engine_get_info(NULL, NULL), MOE_ERR_ARG, "engine");
	CHECK_OK(moe_engine_open(&p, &e));
	CHECK_ERROR(moe_engine_get_info(e, NULL), MOE_ERR_ARG, "struct_size");
	CHECK_OK(moe_engine_close(e));
}

static void opening(void)
{
	in_child("open twice", open_twice, NULL);
	in_child("bad parameters", bad_parameters, NULL);
}

/* ---- policies and the environment ---- */

static const struct {
	const char *policy, *why;
} skipped_policies[] = {
	{ "heteroprio", "aborts unless buckets are configured; the engine refuses it" },
	{ "graph_test", "is StarPU's test of its graph analysis; the engine refuses it" },
	{ "peager", "needs parallel workers" },
	{ "pheft", "needs parallel workers" },
};

static void one_policy(const void *arg)
{
	const char *policy = arg;
	struct moe_engine *e = open_with(2, 1, policy);

	if (!e)
		return;
	CHECK(!strcmp(starpu_sched_ctx_get_sched_policy(0)->policy_name, policy));
	CHECK(!strcmp(info_of(e).policy, policy));
	run_graph(e, moe_test_full() ? 2000 : 300, 3, 0);
	CHECK_OK(moe_engine_close(e));
	if (!strcmp(policy, "modular-ws"))
		_exit(check_failures() != 0); /* StarPU 1.3.10's own leaks are not looked for */
}

/* A module beside this program. */
static void library(const char *name, char *path)
{
	ssize_t n = readlink("/proc/self/exe", path, 4000);

	CHECK(n > 0);
	path[n > 0 ? n : 0] = 0;
	sprintf(strrchr(path, '/') + 1, "lib%s.so", name);
}

/* A policy in a file: opened by its path, named by it, and asked whether it obeys masks. */
static void policy_file_child(const void *arg)
{
	char path[4096], bad[4096];
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 4, .parts = 2 };
	struct moe_engine *e;

	(void)arg;
	library("policy_example", path);
	p.policy = path;
	CHECK_OK(moe_engine_check_params(&p));
	e = NULL;
	CHECK_OK(moe_engine_open(&p, &e)); /* strict parts */
	if (!e)
		return;
	CHECK(!strcmp(starpu_sched_ctx_get_sched_policy(0)->policy_name, "newest-first"));
	CHECK(!strcmp(info_of(e).policy, path));
	for (int i = 0; i < 5; i++) /* tasks end while others push */
		run_graph(e, 2000, 3, 0);
	CHECK(info_of(e).remote_tasks == 0);
	CHECK_OK(moe_engine_close(e));

	p.policy = "./no/such/policy.so";
	CHECK_ERROR(moe_engine_open(&p, &e), MOE_ERR_CONFIG, "policy ./no/such/policy.so: cannot be loaded: ");
	library("policy_none", bad);
	p.policy = bad;
	CHECK_ERROR(moe_engine_check_params(&p), MOE_ERR_CONFIG, "defines no struct starpu_sched_policy moesaic_policy");
	library("policy_half", bad);
	CHECK_ERROR(moe_engine_open(&p, &e), MOE_ERR_CONFIG, "needs policy_name, init_sched");
}

static void policies(void)
{
	const char *name;
	int run = 0;

	for (int i = 0, masks; (name = moe_policy_name(i, &masks)); i++) {
		bool skip = false;

		CHECK(masks == moe_engine_policy_obeys_masks(name));
		for (size_t j = 0; j < MOE_COUNT(skipped_policies); j++)
			skip |= !strcmp(name, skipped_policies[j].policy);
		if (skip)
			continue;
		run++;
		in_child(name, one_policy, name);
	}
	in_child("a policy in a file", policy_file_child, NULL);
	CHECK(run >= 8);
	CHECK(moe_policy_name(-1, NULL) == NULL && moe_policy_name(1000, NULL) == NULL);
}

static void environment_child(const void *arg)
{
	struct moe_engine *e;

	(void)arg;
	setenv("STARPU_NCPU", "1", 1);
	setenv("STARPU_NCPUS", "1", 1);
	setenv("STARPU_SCHED", "eager", 1);
	e = open_with(2, 1, "lws");
	CHECK(info_of(e).workers == 2);
	CHECK((int)starpu_cpu_worker_get_count() == 2);
	CHECK(!strcmp(starpu_sched_ctx_get_sched_policy(0)->policy_name, "lws"));
	run_graph(e, 100, 1, 0);
	CHECK_OK(moe_engine_close(e));
}

/* NAME=VALUE that StarPU aborts on while it starts, and what is said of it. */
static const struct {
	const char *setting, *says;
} refused_settings[] = {
	{ "STARPU_NCPU=two", "STARPU_NCPU is \"two\"; StarPU aborts" },
	{ "STARPU_WATCHDOG_TIMEOUT=1s", "STARPU_WATCHDOG_TIMEOUT is \"1s\"" },
	{ "STARPU_PROFILING=-1", "STARPU_PROFILING is \"-1\"" },
	{ "STARPU_WORKERS_CPUID=all", "STARPU_WORKERS_CPUID is \"all\"" },
	{ "STARPU_NTHREADS_PER_CORE=99", "STARPU_NTHREADS_PER_CORE is 99; cores here have" },
	{ "STARPU_HOSTNAME=a/b", "STARPU_HOSTNAME is \"a/b\"" },
	{ "STARPU_RESERVE_NCPU=1000", "(STARPU_RESERVE_NCPU is set)" },
};

static void refused_settings_child(const void *arg)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2 };
	struct moe_engine *e;

	(void)arg;
	for (size_t i = 0; i < MOE_COUNT(refused_settings); i++) {
		const char *setting = refused_settings[i].setting, *value = strchr(setting, '=') + 1;
		char name[40];

		snprintf(name, sizeof name, "%.*s", (int)(value - setting) - 1, setting);
		setenv(name, value, 1);
		CHECK_ERROR(moe_engine_open(&p, &e), MOE_ERR_CONFIG, refused_settings[i].says);
		unsetenv(name);
	}
	/* empty ones are not set */
	setenv("STARPU_NCPU", "", 1);
	setenv("MOESAIC_ISA", "", 1);
	e = NULL;
	CHECK_OK(moe_engine_open(&p, &e));
	run_graph(e, 20, 1, 0);
	CHECK_OK(moe_engine_close(e));
}

/* arg: NAME=VALUE that StarPU would abort on */
static void unwritable_child(const void *arg)
{
	const char *setting = arg, *value = strchr(setting, '=') + 1;
	char name[40];
	struct moe_engine *e;

	snprintf(name, sizeof name, "%.*s", (int)(value - setting) - 1, setting);
	unsetenv("STARPU_HOME");
	unsetenv("XDG_CACHE_HOME");
	setenv(name, value, 1);
	e = open_with(1, 1, NULL);
	run_graph(e, 20, 1, 0);
	CHECK_OK(moe_engine_close(e));
}

static void no_home_child(const void *arg)
{
	struct moe_engine *e;

	(void)arg;
	unsetenv("STARPU_HOME");
	unsetenv("XDG_CACHE_HOME");
	unsetenv("HOME");
	e = open_with(1, 1, NULL);
	CHECK_OK(moe_engine_close(e));
}

static void environment(void)
{
	in_child("STARPU_NCPU, STARPU_SCHED", environment_child, NULL);
	in_child("settings that StarPU aborts on", refused_settings_child, NULL);
	in_child("STARPU_HOME below a file", unwritable_child, "STARPU_HOME=/dev/null/x");
	in_child("STARPU_HOME in /proc", unwritable_child, "STARPU_HOME=/proc");
	in_child("HOME in /proc", unwritable_child, "HOME=/proc/sys");
	in_child("models in /proc", unwritable_child, "STARPU_PERF_MODEL_DIR=/proc/x");
	in_child("no home", no_home_child, NULL);
}

/* ---- sleeping ---- */

static void wait_for_sleep(struct moe_engine *e, int pauses)
{
	for (int i = 0; i < 500 * SLOW && info_of(e).pauses < pauses; i++)
		usleep(10000);
	CHECK(info_of(e).pauses >= pauses);
}

/* Its own thread, new after the fork, spins for 2^28 ticks of the clock before it sleeps. */
static void wait_for_openblas(void)
{
	double cpu = -1;

	for (int i = 0; i < 100 && cpu_seconds() - cpu > 0.001; i++) {
		cpu = cpu_seconds();
		usleep(50000);
	}
}

static void sleep_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	int before;
	double cpu;

	(void)arg;
	wait_for_sleep(e, 1); /* nothing was ever submitted */
	wait_for_openblas();
	for (int i = 0; i < 3; i++) {
		before = info_of(e).pauses;
		run_graph(e, 100, 1, 0);
		wait_for_sleep(e, before + 1);
		cpu = cpu_seconds();
		usleep(500000);
		/* two spinning workers would take most of a processor at least */
		CHECK(cpu_seconds() - cpu < 0.1);
	}
	/* an empty graph wakes them and lets them sleep again */
	before = info_of(e).pauses;
	CHECK_OK(moe_submit_begin(e));
	moe_submit_end(e);
	wait_for_sleep(e, before + 1);
	CHECK_OK(moe_engine_close(e)); /* asleep: StarPU would abort */
}

static void spin_child(const void *arg)
{
	struct moe_engine_params p = params_of(2, 1);
	struct moe_engine *e;
	int before;

	(void)arg;
	p.idle_spin_us = 1500000;
	CHECK_OK(moe_engine_open(&p, &e));
	run_graph(e, 100, 1, 0);
	for (int i = 0; i < 5; i++) {
		int64_t t = moe_now_ns();

		before = info_of(e).pauses;
		usleep(100000); /* shorter than the spin: not asleep in between, unless the machine stood still */
		run_graph(e, 20, 1, 0);
		CHECK(info_of(e).pauses == before || moe_now_ns() - t > 1000000000);
	}
	wait_for_sleep(e, before + 1);
	run_graph(e, 20, 1, 0);
	CHECK_OK(moe_engine_close(e));
}

static void sleeping(void)
{
	in_child("idle workers sleep", sleep_child, NULL);
	in_child("idle_spin_us", spin_child, NULL);
}

/* ---- holding ---- */

static void *release_later(void *arg)
{
	usleep(50000);
	CHECK_OK(moe_engine_release(arg));
	return NULL;
}

static void hold_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	struct moe_ticket *ticket;
	struct graph g;
	pthread_t thread;
	int64_t n;

	(void)arg;
	CHECK_OK(moe_ticket_create(e, &ticket));
	graph_make(&g, 8, 200, 0);
	graph_register(&g, e);
	CHECK_ERROR(moe_engine_release(e), MOE_ERR_STATE, "release without hold");
	CHECK_OK(moe_engine_hold(e));
	CHECK_OK(moe_engine_hold(e));
	CHECK_OK(moe_engine_wait(e)); /* nothing to wait for */
	graph_submit(&g, e, ticket);
	n = moe_engine_outstanding(e);
	usleep(20000);
	CHECK(n == 200 && moe_engine_outstanding(e) == 200);
	CHECK_ERROR(moe_engine_wait(e), MOE_ERR_STATE, "held");
	CHECK_ERROR(moe_ticket_wait(ticket), MOE_ERR_STATE, "held");
	CHECK_OK(moe_engine_release(e));
	CHECK_ERROR(moe_ticket_wait(ticket), MOE_ERR_STATE, "held"); /* nested */
	pthread_create(&thread, NULL, release_later, e);
	pthread_join(thread, NULL);
	CHECK_OK(moe_ticket_wait(ticket));
	CHECK(moe_ticket_done(ticket));
	graph_verify(&g, 1);
	/* draining runs the tasks and leaves the engine held */
	CHECK_OK(moe_engine_hold(e));
	graph_submit(&g, e, ticket);
	moe_ticket_drain(ticket);
	graph_verify(&g, 2);
	graph_submit(&g, e, ticket);
	usleep(20000);
	CHECK(moe_engine_outstanding(e) == 200);
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, 3);
	graph_free(&g);
	moe_ticket_destroy(ticket);
	CHECK_OK(moe_engine_hold(e)); /* close while held */
	CHECK_OK(moe_engine_close(e));
}

static void holding(void)
{
	in_child("hold and release", hold_child, NULL);
}

const struct moe_test moe_suite_tests[] = {
	{ "open, close, settings", opening },
	{ "every policy runs a graph", policies },
	{ "environment", environment },
	{ "idle workers sleep", sleeping },
	{ "hold, release, drain", holding },
	{ NULL, NULL },
};
