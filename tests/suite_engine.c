/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: opening and closing, policies, the environment, sleeping, holding, fork, threads.
 * Everything that opens an engine runs in a child of its own.
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

static void sleep_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	int before;
	double cpu;

	(void)arg;
	wait_for_sleep(e, 1); /* nothing was ever submitted */
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

/* ---- fork ---- */

static void forked_calls(struct moe_engine *e, struct moe_block *b)
{
	struct moe_engine_params p = params_of(1, 1);
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct moe_block_params bp =
		block_params_of(&(struct block_case){ .E = 2, .k = 1, .H = 8, .I = 8, .r = 1 });
	struct moe_adamw_params adamw = adamw_default();
	struct moe_observer observer = { 0 };
	float data[64] = { 0 };
	struct moe_array a = matrix_of(data, MOE_F32, 1, 8);
	struct moe_engine *f;
	struct moe_block *c;

#define FORKED(call) CHECK_ERROR(call, MOE_ERR_FORKED, "fork")
	FORKED(moe_engine_open(&p, &f));
	FORKED(moe_engine_get_info(e, &info));
	FORKED(moe_engine_observe(e, &observer));
	FORKED(moe_engine_hold(e));
	FORKED(moe_engine_release(e));
	FORKED(moe_engine_wait(e));
	FORKED(moe_block_create(e, &bp, &c));
	FORKED(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &a));
	FORKED(moe_block_get(b, MOE_BLOCK_TOPK_IDS, &a));
	FORKED(moe_block_get_gradient(b, MOE_BLOCK_GATE_LORA_A, &a));
	FORKED(moe_block_forward(b, &a, NULL, NULL, 0, &a));
	FORKED(moe_block_forward_async(b, &a, NULL, NULL, 0, &a));
	FORKED(moe_block_backward(b, &a, &a, NULL));
	FORKED(moe_block_backward_async(b, &a, &a, NULL));
	FORKED(moe_block_update(b, &adamw));
	FORKED(moe_block_zero_gradients(b));
	FORKED(moe_block_wait(b));
	FORKED(moe_submit_begin(e));
	FORKED(moe_engine_reserve_scratch(e, 1 << 20));
	FORKED(moe_engine_close(e));
#undef FORKED
	moe_block_destroy(b);
	CHECK(moe_kind_name(0) && moe_policy_name(0, NULL) && moe_version());
}

static int exit_handler_pipe[2];

static void exit_handler(void)
{
	ssize_t n = write(exit_handler_pipe[1], "x", 1);

	(void)n;
}

static void fork_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	struct block_case c = { .E = 2, .k = 1, .H = 8, .I = 8, .r = 1, .T = 4 };
	struct block_data d;
	struct moe_block *b;
	bool busy = *(const bool *)arg;
	char byte = 0;
	struct graph g;
	pid_t pid;

	block_data_make(&d, &c);
	b = block_make(e, &c, &d, NULL);
	graph_make(&g, 4, 500, 0);
	g.spin = 10000;
	graph_register(&g, e);
	CHECK(pipe(exit_handler_pipe) == 0);
	if (busy)
		graph_submit(&g, e, NULL);
	pid = fork();
	if (!pid) {
		alarm(10 * SLOW);
		atexit(exit_handler);
		forked_calls(e, b);
		fflush(NULL);
		/* what the parent owns looks leaked from here */
		if (SLOW > 1 && exit_handler_pipe[0])
			_exit((exit_handler(), check_failures() != 0));
		exit(check_failures() != 0);
	}
	child_ended(pid, "after fork");
	CHECK(read(exit_handler_pipe[0], &byte, 1) == 1 && byte == 'x');
	if (!busy)
		graph_submit(&g, e, NULL); /* the parent lives on */
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, 1);
	graph_free(&g);
	moe_block_destroy(b);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static void forking(void)
{
	in_child("fork of an idle engine", fork_child, &(bool){ false });
	in_child("fork of a busy engine", fork_child, &(bool){ true });
}

/* ---- threads ---- */

/* Stops in the observer of the first submission, so that its thread is inside the block. */
struct gate {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	bool inside, open;
	struct moe_block *block;
	struct block_data *data;
	enum moe_status status;
};

static void gate_submitted(const struct moe_task_event *event, void *user)
{
	struct gate *g = user;

	(void)event;
	pthread_mutex_lock(&g->lock);
	g->inside = true;
	pthread_cond_broadcast(&g->changed);
	while (!g->open)
		pthread_cond_wait(&g->changed, &g->lock);
	pthread_mutex_unlock(&g->lock);
}

static void *gate_forward(void *arg)
{
	struct gate *g = arg;

	g->status = block_forward(g->block, g->data, true, g->data->out);
	return NULL;
}

static void busy_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	struct block_case c = { .E = 4, .k = 2, .H = 16, .I = 8, .r = 2, .T = 8 };
	struct block_data d;
	struct gate g = { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };
	struct moe_observer observer = { .submitted = gate_submitted, .user = &g };
	struct moe_adamw_params adamw = adamw_default();
	struct moe_array a;
	pthread_t thread;

	(void)arg;
	block_data_make(&d, &c);
	g.data = &d;
	g.block = block_make(e, &c, &d, NULL);
	CHECK_OK(moe_engine_observe(e, &observer));
	pthread_create(&thread, NULL, gate_forward, &g);
	pthread_mutex_lock(&g.lock);
	while (!g.inside)
		pthread_cond_wait(&g.changed, &g.lock);
	pthread_mutex_unlock(&g.lock);
	a = matrix_of(d.x, MOE_F32, c.T, c.H);
#define BUSY(call) CHECK_ERROR(call, MOE_ERR_BUSY, "another thread")
	BUSY(block_forward(g.block, &d, true, d.out));
	BUSY(moe_block_backward(g.block, &a, &a, NULL));
	BUSY(moe_block_backward_async(g.block, &a, &a, NULL));
	BUSY(moe_block_update(g.block, &adamw));
	BUSY(moe_block_zero_gradients(g.block));
	BUSY(moe_block_set(g.block, MOE_BLOCK_GATE_LORA_A, &a));
	BUSY(moe_block_get(g.block, MOE_BLOCK_GATE_LORA_A, &a));
	BUSY(moe_block_get_gradient(g.block, MOE_BLOCK_GATE_LORA_A, &a));
#undef BUSY
	pthread_mutex_lock(&g.lock);
	g.open = true;
	pthread_cond_broadcast(&g.changed);
	pthread_mutex_unlock(&g.lock);
	pthread_join(thread, NULL);
	CHECK(g.status == MOE_OK);
	CHECK_OK(moe_engine_observe(e, NULL));
	moe_block_destroy(g.block);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

#define THREADS 4

struct trainee {
	struct moe_engine *engine;
	struct block_case c;
	struct block_data d;
	uint64_t bits;
};

/* Lengths grow, so that buffers and worker scratch grow while others run. */
static void *train_one(void *arg)
{
	struct trainee *t = arg;
	struct moe_block *b = block_make(t->engine, &t->c, &t->d, NULL);
	int T = t->c.T;

	t->bits = 1;
	for (int i = 1; b && i <= 5; i++) {
		t->d.c.T = T * i / 5;
		t->bits = block_step(b, &t->d, t->bits);
	}
	t->d.c.T = T;
	moe_block_destroy(b);
	return NULL;
}

static void threads_child(const void *arg)
{
	struct trainee t[THREADS];
	uint64_t alone[THREADS];
	pthread_t thread[THREADS];
	struct moe_engine *e = open_with(2, 2, NULL);

	(void)arg;
	for (int i = 0; i < THREADS; i++) {
		t[i].engine = e;
		t[i].c = (struct block_case){ .E = 8,
					      .k = 2,
					      .H = 48 + 16 * i,
					      .I = 40,
					      .r = 3,
					      .T = 60 + 20 * i,
					      .router = i & 1,
					      .shared = i & 2 ? 24 : 0,
					      .seed = i };
		block_data_make(&t[i].d, &t[i].c);
		train_one(&t[i]);
		alone[i] = t[i].bits;
	}
	for (int round = 0; round < (moe_test_full() ? 20 : 3); round++) {
		for (int i = 0; i < THREADS; i++)
			pthread_create(&thread[i], NULL, train_one, &t[i]);
		for (int i = 0; i < THREADS; i++) {
			pthread_join(thread[i], NULL);
			CHECK(t[i].bits == alone[i]);
		}
	}
	for (int i = 0; i < THREADS; i++)
		block_data_free(&t[i].d);
	CHECK(info_of(e).handles == 0);
	CHECK(moe_memory_bytes(e, NULL, -1) == 0);
	CHECK_OK(moe_engine_close(e));
}

static void threads(void)
{
	in_child("busy", busy_child, NULL);
	in_child("many threads, many blocks", threads_child, NULL);
}

/* ---- allocation failures ---- */

/* Every step of a life; returns the first failure. */
static enum moe_status live(const struct block_case *c, struct block_data *d, struct moe_engine **e,
			    struct moe_block **b)
{
	struct moe_engine_params p = params_of(2, 2);
	struct moe_adamw_params adamw = adamw_default();
	enum moe_status st;

	if (!*e && (st = moe_engine_open(&p, e)) != MOE_OK)
		return st;
	if (!*b) {
		struct moe_block_params bp = block_params_of(c);

		if ((st = moe_block_create(*e, &bp, b)) != MOE_OK)
			return st;
		if ((st = block_fill(*b, d)) != MOE_OK)
			return st;
	}
	if ((st = block_forward(*b, d, true, d->out)) != MOE_OK)
		return st;
	if ((st = block_backward(*b, d)) != MOE_OK)
		return st;
	if ((st = moe_block_update(*b, &adamw)) != MOE_OK)
		return st;
	return moe_block_wait(*b);
}

static void ignore_event(const struct moe_task_event *event, void *user)
{
	(void)event, (void)user;
}

/* The n-th allocation fails: a clean error, and everything can be destroyed or go on. */
static void alloc_child(const void *arg)
{
	struct block_case c = { .E = 4,
				.k = 2,
				.H = 20,
				.I = 12,
				.r = 2,
				.T = 10,
				.shared = 8,
				.router = true,
				.base_grads = true };
	struct moe_observer observer = { .submitted = ignore_event };
	struct block_data d;
	int64_t n = 0, step = moe_test_full() ? 1 : 13, failures = 0;
	enum moe_status st;

	(void)arg;
	block_data_make(&d, &c);
	do {
		struct moe_engine *e = NULL;
		struct moe_block *b = NULL;

		moe_alloc_fail_after(n);
		st = live(&c, &d, &e, &b);
		moe_alloc_fail_after(-1);
		if (st != MOE_OK) {
			failures++;
			CHECK(st == MOE_ERR_NOMEM && strstr(moe_last_error(), "memory"));
			if (e &&
			    n % 2) { /* a second try with memory works; otherwise destroy at once */
				if (b) {
					CHECK_OK(moe_engine_observe(e, &observer));
					moe_block_destroy(b);
					b = NULL;
				}
				CHECK_OK(live(&c, &d, &e, &b));
			}
		}
		moe_block_destroy(b);
		if (e) {
			CHECK(info_of(e).handles == 0 && moe_memory_bytes(e, NULL, -1) == 0);
			CHECK_OK(moe_engine_close(e));
		}
		n += n < 60 ? 1 : step;
	} while (st != MOE_OK && !check_failures() && n < 100000);
	CHECK(failures > 20);
	block_data_free(&d);
}

/* As above on one block that lives on: forward, backward and update fail at every allocation. */
static void alloc_again_child(const void *arg)
{
	struct block_case c = { .E = 4, .k = 2, .H = 20, .I = 12, .r = 2, .T = 10 };
	struct moe_observer observer = { .submitted = ignore_event };
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = open_with(2, 2, NULL);
	struct block_data d;
	struct moe_block *b;
	float *want, *want_gx;
	size_t n_out = (size_t)(c.T * c.H);

	(void)arg;
	block_data_make(&d, &c);
	b = block_make(e, &c, &d, NULL);
	want = malloc(n_out * sizeof *want);
	want_gx = malloc(n_out * sizeof *want_gx);
	CHECK_OK(block_forward(b, &d, true, want));
	CHECK_OK(block_backward(b, &d));
	memcpy(want_gx, d.grad_x, n_out * sizeof *want);
	CHECK_OK(moe_block_zero_gradients(b));
	CHECK_OK(moe_engine_observe(e, &observer));
	for (int op = 0; op < 2; op++)
		for (int64_t n = 0;; n++) {
			enum moe_status st;

			if (op)
				CHECK_OK(block_forward(b, &d, true, d.out));
			moe_alloc_fail_after(n);
			st = op ? block_backward(b, &d) : block_forward(b, &d, true, d.out);
			moe_alloc_fail_after(-1);
			CHECK(st == MOE_OK || st == MOE_ERR_NOMEM);
			CHECK(moe_engine_outstanding(e) == 0); /* the caller may free its buffers */
			if (st != MOE_OK)
				CHECK(block_backward(b, &d) == MOE_ERR_STATE);
			if (st == MOE_OK || check_failures())
				break;
		}
	/* nothing that failed left a trace */
	CHECK_OK(moe_block_zero_gradients(b));
	CHECK_OK(block_forward(b, &d, true, d.out));
	CHECK_OK(block_backward(b, &d));
	CHECK(!memcmp(want, d.out, n_out * sizeof *want));
	CHECK(!memcmp(want_gx, d.grad_x, n_out * sizeof *want));
	for (int64_t n = 0;; n++) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = moe_block_update(b, &adamw);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK_ERROR(st, MOE_ERR_NOMEM, "memory");
		CHECK_ERROR(moe_block_update(b, &adamw), MOE_ERR_STATE, "backward");
		CHECK_OK(block_forward(b, &d, true, d.out));
		CHECK_OK(block_backward(b, &d));
	}
	CHECK_OK(moe_block_wait(b));
	moe_block_destroy(b);
	block_data_free(&d);
	free(want), free(want_gx);
	CHECK_OK(moe_engine_close(e));
}

static void allocation(void)
{
	in_child("a life", alloc_child, NULL);
	in_child("one block", alloc_again_child, NULL);
}

const struct moe_test moe_suite_tests[] = {
	{ "open, close, settings", opening },
	{ "every policy runs a graph", policies },
	{ "environment", environment },
	{ "idle workers sleep", sleeping },
	{ "hold, release, drain", holding },
	{ "fork", forking },
	{ "threads", threads },
	{ "allocation failures", allocation },
	{ NULL, NULL },
};
