/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine where things go wrong around it: fork, calls from several threads, failing allocations. Everything that opens
 * an engine runs in a child of its own.
 */
#include "engine/internal.h"
#include "tests/block_check.h"
#include "tests/graph_check.h"

#include <pthread.h>

const char moe_suite_name[] = "engine_faults";

static struct moe_engine_params params_of(int workers, int parts)
{
	return (struct moe_engine_params){ .struct_size = sizeof(struct moe_engine_params),
					   .workers = workers,
					   .parts = parts };
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
	{ "fork", forking },
	{ "threads", threads },
	{ "allocation failures", allocation },
	{ NULL, NULL },
};
