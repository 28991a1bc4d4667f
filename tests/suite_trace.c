/* SPDX-License-Identifier: Apache-2.0 */
/* The recorder: a trace says what happened, all of it. */
#include "engine/cost.h"
#include "engine/internal.h"
#include "tests/block_check.h"
#include "tests/graph_check.h"
#include "tests/trace_check.h"
#include "tests/trace_good.h"

#include <math.h>

const char moe_suite_name[] = "trace";

/* ---- every task once, in the order that StarPU enforces ---- */

struct seen {
	uint64_t first;
	int n;
	struct starpu_task *task[300];
};

static void handed_over(uint64_t id, struct starpu_task *task, void *user)
{
	struct seen *s = user;

	s->first = s->n ? s->first : id;
	s->task[s->n++] = task;
}

/* bits[i] has bit j where j is an ancestor of i; up to 300 tasks. */
#define WORDS 5
typedef uint64_t ancestors[300][WORDS];

static void inherit(ancestors a, int task, int dep)
{
	for (int w = 0; w < WORDS; w++)
		a[task][w] |= a[dep][w];
	a[task][dep / 64] |= 1ull << dep % 64;
}

/* Through StarPU's own tasks, which are in no list of ours. */
static void follow(ancestors a, const struct seen *s, struct starpu_task *t, int dep, int depth)
{
	struct starpu_task *next[300 * GRAPH_MAX_ACCESS];
	int n = starpu_task_get_task_succs(t, 300 * GRAPH_MAX_ACCESS, next);

	for (int i = 0; i < n; i++) {
		int k = 0;

		while (k < s->n && s->task[k] != next[i])
			k++;
		if (k < s->n)
			inherit(a, k, dep);
		else if (depth < 20)
			follow(a, s, next[i], dep, depth + 1);
	}
}

/* false: a worker took a task although the engine is held, so StarPU made fewer dependencies. */
static bool one_graph(struct moe_engine *e, int tensors, int tasks)
{
	static ancestors starpu, ours;
	struct seen s = { .n = 0 };
	struct graph g;
	struct trace t;
	int64_t first, *row;
	size_t at = 0;
	bool still;

	memset(starpu, 0, sizeof starpu);
	memset(ours, 0, sizeof ours);
	graph_make(&g, tensors, tasks, 2);
	graph_register(&g, e);
	CHECK_OK(moe_engine_wait(e));
	trace_start(e, trace_file("graph.mxt"), 0);
	e->handed_over = handed_over;
	e->handed_over_user = &s;
	CHECK_OK(moe_engine_hold(e));
	usleep(1000);
	graph_submit(&g, e, NULL);
	for (int i = 0; i < s.n; i++)
		follow(starpu, &s, s.task[i], i, 0);
	still = moe_engine_outstanding(e) == tasks;
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_engine_wait(e));
	e->handed_over = NULL;
	CHECK(trace_stop(e).tasks == tasks);
	graph_verify(&g, 1);
	CHECK(trace_is_good(trace_file("graph.mxt"), false, false));
	if (trace_open(&t, trace_file("graph.mxt"))) {
		row = trace_check(&t, &first);
		CHECK(row && first == (int64_t)s.first && t.reader.ended);
		CHECK(trace_rows(&t, MOE_MXT_DEPS) == (size_t)tasks);
		for (size_t i = 0; row && i < (size_t)tasks; i++) {
			CHECK(trace_at(&t, MOE_MXT_TASKS, MOE_MXT_TASK_GROUP, (size_t)row[i]) ==
			      (int64_t)i);
			CHECK(trace_at(&t, MOE_MXT_TASKS, MOE_MXT_TASK_ROWS, (size_t)row[i]) ==
			      (int64_t)i);
			for (int64_t k = trace_at(&t, MOE_MXT_DEPS, MOE_MXT_DEP_COUNT, i); k > 0;
			     k--)
				inherit(ours, (int)i,
					(int)(i - (size_t)trace_at(&t, MOE_MXT_DEPS,
								   MOE_MXT_DEP_BACK, at++)));
		}
		CHECK(!still || !memcmp(ours, starpu, sizeof ours));
		free(row);
		trace_close(&t);
	}
	graph_free(&g);
	return still;
}

static void graphs_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 2, arg);
	int rounds = moe_test_full() ? 200 : 20, compared = 0;

	graph_random = moe_test_seed();
	for (int i = 0; i < rounds; i++)
		compared += one_graph(e, 1 + below(12), 1 + below(i % 4 ? 60 : 290));
	CHECK(compared > rounds / 2);
	CHECK_OK(moe_engine_close(e));
}

static void graphs(void)
{
	in_child("lws", graphs_child, "lws");
	in_child("eager", graphs_child, "eager");
}

/* ---- a training step of a block ---- */

/* Rows of a kind, by layer's only part and micro-batch: what the plan dealt out. */
static int64_t rows_of(const struct trace *t, const char *kind, int64_t step, int part)
{
	int64_t sum = 0, index = -1;

	for (int k = 0; moe_kind_name(k); k++)
		index = strcmp(moe_kind_name(k), kind) ? index : k;
	for (size_t i = 0; i < trace_rows(t, MOE_MXT_TASKS); i++)
		if (trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_KIND, i) == index &&
		    trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_STEP, i) == step &&
		    trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_PART, i) == part)
			sum += trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_ROWS, i);
	return sum;
}

static void check_routing(const struct trace *t, const struct block_case *c, int steps)
{
	size_t at = 0;

	CHECK(trace_rows(t, MOE_MXT_ROUTING) == (size_t)steps);
	for (size_t i = 0; i < trace_rows(t, MOE_MXT_ROUTING); i++) {
		int64_t sum = 0, step = trace_at(t, MOE_MXT_ROUTING, MOE_MXT_ROUTING_STEP, i);

		CHECK(trace_at(t, MOE_MXT_ROUTING, MOE_MXT_ROUTING_TOKENS, i) == c->T);
		CHECK(trace_at(t, MOE_MXT_ROUTING, MOE_MXT_ROUTING_EXPERTS, i) == c->E);
		for (int k = 0; k < c->E; k++)
			sum += trace_at(t, MOE_MXT_ROUTING, MOE_MXT_ROUTING_LOADS, at++);
		CHECK(sum == trace_at(t, MOE_MXT_ROUTING, MOE_MXT_ROUTING_SLOTS, i));
		CHECK(sum == (int64_t)c->T * c->k);
		for (int part = 0; part < 2; part++) {
			CHECK(rows_of(t, "gate_up", step, part) == sum);
			CHECK(rows_of(t, "down_bwd", step, part) == sum);
		}
	}
}

/* Shares of a step in each phase; local and remote bytes of placed kinds. */
static void check_columns(const struct trace *t, int steps)
{
	int64_t phase[MOE_MXT_PHASES] = { 0 }, placed = 0, flops = 0, bytes = 0, na = 0;

	for (size_t i = 0; i < trace_rows(t, MOE_MXT_TASKS); i++) {
		int64_t p = trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_PHASE, i);
		int64_t local = trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_LOCAL, i);
		int64_t remote = trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_REMOTE, i);
		int64_t all = trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_READ, i) +
			      trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_WRITTEN, i);

		phase[p < 0 || p >= MOE_MXT_PHASES ? 0 : p]++;
		flops += trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_FLOPS, i);
		na += trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_LLC_MISSES, i) == 0;
		CHECK(local >= 0 && remote >= 0 && local + remote <= all + 1);
		placed += local + remote;
		bytes += all;
		CHECK(trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_CPU, i) >= 0);
		CHECK(trace_at(t, MOE_MXT_TASKS, MOE_MXT_TASK_CORE, i) >= 0);
	}
	CHECK(phase[MOE_MXT_PHASE_OTHER] == 0 && phase[MOE_MXT_PHASE_FORWARD] > 0);
	CHECK(phase[MOE_MXT_PHASE_BACKWARD] > 0 && phase[MOE_MXT_PHASE_UPDATE] >= steps);
	CHECK(flops > 0 && placed > bytes / 4);
	CHECK(!t->all[MOE_MXT_TASKS].column[MOE_MXT_TASK_LLC_MISSES].n || na == 0);
}

static void check_memory(const struct trace *t, struct moe_engine *e)
{
	const struct moe_mxt_table *m = &t->all[MOE_MXT_MEMORY];
	int64_t rss = trace_name(m, MOE_MXT_MEMORY_NAMES, "rss"), weights = 0, resident = 0,
		last = 0;
	int64_t index = trace_name(m, MOE_MXT_MEMORY_NAMES, "weights");

	CHECK(m->head.rows > 0 && rss >= 0 && index >= 0);
	for (size_t i = 0; i < m->head.rows; i++) {
		int64_t bytes = moe_mxt_at(m, MOE_MXT_MEMORY_BYTES, i);

		if (moe_mxt_at(m, MOE_MXT_MEMORY_PURPOSE, i) == rss)
			resident = bytes;
		if (moe_mxt_at(m, MOE_MXT_MEMORY_PURPOSE, i) != index)
			continue;
		weights = moe_mxt_at(m, MOE_MXT_MEMORY_TIME, i) == last ? weights + bytes : bytes;
		last = moe_mxt_at(m, MOE_MXT_MEMORY_TIME, i);
	}
	CHECK(weights == (int64_t)moe_memory_bytes(e, "weights", -1) && weights > 0);
	CHECK(resident > 1 << 20);
}

static void step_child(const void *arg)
{
	struct block_case c = {
		.E = 6, .k = 2, .H = 64, .I = 96, .r = 4, .T = 150, .router = true
	};
	struct moe_engine *e = open_with(2, 2, NULL);
	const char *config[] = { "model=tiny", "note=two\nlines" };
	struct moe_trace_params p = trace_params(trace_file("block.mxt"));
	struct moe_adamw_params adamw = adamw_default();
	struct block_data d;
	struct moe_block *b;
	struct trace t;
	char buf[100];
	int64_t first, *row;

	(void)arg;
	p.config = config;
	p.n_config = 2;
	block_data_make(&d, &c);
	b = block_make(e, &c, &d, NULL);
	CHECK_OK(moe_trace_start(e, &p));
	for (int i = 1; i <= 3; i++) {
		moe_trace_mark(e, MOE_TRACE_STEP_BEGIN, i, c.T, -1);
		CHECK_OK(block_forward(b, &d, true, d.out));
		CHECK_OK(block_backward(b, &d));
		CHECK_OK(moe_block_update(b, &adamw));
		CHECK_OK(moe_block_wait(b));
		moe_trace_mark(e, MOE_TRACE_STEP_END, i, c.T, 77);
	}
	trace_stop(e);
	CHECK(trace_is_good(trace_file("block.mxt"), false, false));
	if (trace_open(&t, trace_file("block.mxt"))) {
		row = trace_check(&t, &first);
		CHECK(row != NULL);
		check_routing(&t, &c, 3);
		check_columns(&t, 3);
		check_memory(&t, e);
		CHECK(trace_rows(&t, MOE_MXT_MARKS) == 6);
		CHECK(trace_at(&t, MOE_MXT_MARKS, MOE_MXT_MARK_TRAINED, 0) == MOE_MXT_NA);
		CHECK(trace_at(&t, MOE_MXT_MARKS, MOE_MXT_MARK_TRAINED, 5) == 77);
		CHECK(trace_at(&t, MOE_MXT_MARKS, MOE_MXT_MARK_STEP, 5) == 3);
		CHECK(trace_rows(&t, MOE_MXT_HOST) >= 6); /* submissions and waits */
		CHECK(trace_counter(&t, "executed") == (int64_t)trace_rows(&t, MOE_MXT_TASKS));
		CHECK(trace_counter(&t, "submitted") == (int64_t)trace_rows(&t, MOE_MXT_DEPS));
		CHECK(trace_counter(&t, "lost_executed") == 0);
		CHECK(moe_mxt_number(&t.reader, "workers", 0) == 2);
		CHECK(moe_mxt_number(&t.reader, "parts", 0) == 2);
		CHECK(!strcmp(moe_mxt_value(&t.reader, "kind.0", buf, sizeof buf), "load"));
		CHECK(!strcmp(moe_mxt_value(&t.reader, "config.note", buf, sizeof buf),
			      "two lines"));
		CHECK(moe_mxt_value(&t.reader, "hardware", buf, sizeof buf) != NULL);
		free(row);
		trace_close(&t);
	}
	moe_block_destroy(b);
	CHECK_OK(moe_engine_close(e));
	block_data_free(&d);
}

static void step(void)
{
	in_child("step", step_child, NULL);
}

/* ---- what is derived ---- */

/* Idle causes and busy time fill a worker's time from its first task to its last. */
static void idle_child(const void *arg)
{
	struct moe_engine *e = open_with(1, 1, NULL);
	struct moe_idle before, after;
	double start_s, wall, sum = 0;
	struct graph g;

	(void)arg;
	graph_random = 1;
	graph_make(&g, 4, 100, 0);
	g.spin = 20000;
	graph_register(&g, e);
	graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_wait(e));
	moe_engine_idle(e, &before);
	start_s = moe_now();
	usleep(100000); /* nothing is submitted */
	graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_wait(e));
	wall = moe_now() - start_s;
	moe_engine_idle(e, &after);
	for (int i = 0; i < MOE_IDLE_CAUSES; i++)
		sum += after.cause[i] - before.cause[i];
	CHECK(fabs(sum + after.busy - before.busy - wall) < .02 + .2 * wall);
	CHECK(after.cause[MOE_IDLE_SUBMISSION] - before.cause[MOE_IDLE_SUBMISSION] >= .095);
	CHECK(!strcmp(moe_idle_cause_name(MOE_IDLE_DEPENDENCY), "dependency"));
	CHECK(!moe_idle_cause_name(MOE_IDLE_CAUSES) && !moe_idle_cause_name(-1));
	graph_free(&g);
	CHECK_OK(moe_engine_close(e));
}

static void idle(void)
{
	in_child("idle", idle_child, NULL);
}

static void work(void)
{
	const struct moe_machine *m = moe_machine();
	struct moe_work w;
	double before = moe_cost_gemm_us(m, MOE_GEMM_FORWARD, 10, 20, 30, 2);

	moe_work_begin(&w);
	CHECK(moe_cost_gemm_us(m, MOE_GEMM_FORWARD, 10, 20, 30, 2) == 0);
	moe_cost_gemm_us(m, MOE_GEMM_BACKWARD, 0, 20, 30, 2); /* no rows: weights are not read */
	moe_cost_stream_us(m, 7, 5);
	moe_cost_pack_us(m, 11);
	moe_work_end();
	CHECK(w.flops == 2. * 10 * 20 * 30 && w.weights == 20 * 30 * 2);
	CHECK(w.read == 18 && w.written == 16);
	CHECK(before > 0 && moe_cost_gemm_us(m, MOE_GEMM_FORWARD, 10, 20, 30, 2) == before);
}

/* A model's step of 40,000 tasks: 60 steps of a block of 128 groups have as many tasks and dependencies. */
static void size_child(const void *arg)
{
	struct block_case c = { .E = 128,
				.k = 8,
				.H = 16,
				.I = 16,
				.r = 2,
				.T = 128,
				.router = true,
				.group_size = 1 };
	struct moe_engine *e = open_with(2, 1, NULL);
	struct moe_adamw_params adamw = adamw_default();
	int layers = SLOW > 1 ? 4 : 60;
	struct moe_trace_info info;
	struct block_data d;
	struct moe_block *b;
	struct trace t;
	int64_t first, *row = NULL;

	block_data_make(&d, &c);
	b = block_make(e, &c, &d, NULL);
	trace_start(e, arg, 4 << 20);
	for (int i = 0; i < layers; i++) {
		CHECK_OK(block_forward(b, &d, true, d.out));
		CHECK_OK(block_backward(b, &d));
		CHECK_OK(moe_block_update(b, &adamw));
	}
	info = trace_stop(e);
	CHECK(info.lost == 0);
	CHECK(info.tasks > 640 * layers);
	CHECK(info.bytes <= (int64_t)6000000 * layers / 60);
	printf("  %lld tasks, %lld bytes, %.1f each; writer %.2f us each ", (long long)info.tasks,
	       (long long)info.bytes, (double)info.bytes / (double)info.tasks,
	       1e6 * info.writer_seconds / (double)info.tasks);
	CHECK(trace_is_good(arg, false, false));
	if (trace_open(&t, arg)) {
		row = trace_check(&t, &first);
		CHECK(row && t.all[MOE_MXT_DEPS].column[MOE_MXT_DEP_BACK].n > (size_t)info.tasks);
		trace_close(&t);
	}
	free(row);
	moe_block_destroy(b);
	CHECK_OK(moe_engine_close(e));
	block_data_free(&d);
}

static void size(void)
{
	in_child("size", size_child, trace_file("size.mxt"));
}

const struct moe_test moe_suite_tests[] = {
	{ "random graphs: every task once, StarPU's dependencies", graphs },
	{ "steps of a block", step },
	{ "idle time by cause", idle },
	{ "flops and bytes", work },
	{ "a large step in 6 MB", size },
	{ NULL, NULL },
};
