/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shadow of StarPU's implicit dependencies: what the observer reports is what StarPU enforces
 * (asked through starpu_task_get_task_succs while held), and the execution keeps to it.
 */
#include "engine/internal.h"
#include "tests/graph_check.h"

#include <math.h>

const char moe_suite_name[] = "tracker";

/* What the observer and the engine's hook report, by index from `first` on. */
struct record {
	uint64_t first; /* id of task 0 */
	int n, cap;
	struct {
		uint64_t *deps;
		int n_deps, worker;
		double start, end;
		struct starpu_task *task;
		int64_t rows;
	} * task;
};

static void submitted(const struct moe_task_event *event, void *user)
{
	struct record *r = user;

	if (!r->n)
		r->first = event->id;
	CHECK(event->id == r->first + (uint64_t)r->n && r->n < r->cap);
	r->task[r->n].n_deps = event->n_deps;
	r->task[r->n].deps = malloc(((size_t)event->n_deps + 1) * sizeof(uint64_t));
	memcpy(r->task[r->n].deps, event->deps, (size_t)event->n_deps * sizeof(uint64_t));
	for (int i = 0; i < event->n_deps; i++) /* ascending, each once, only earlier tasks */
		CHECK(event->deps[i] < (i + 1 < event->n_deps ? event->deps[i + 1] : event->id));
	r->n++;
}

static void handed_over(uint64_t id, struct starpu_task *task, void *user)
{
	struct record *r = user;

	r->task[id - r->first].task = task;
}

static void executed(const struct moe_task_event *event, void *user)
{
	struct record *r = user;
	int i = (int)(event->id - r->first);

	r->task[i].start = event->start;
	r->task[i].end = event->end;
	r->task[i].worker = event->worker;
	r->task[i].rows = event->tag.rows;
}

static void record_begin(struct record *r, struct moe_engine *e, int cap)
{
	struct moe_observer o = { .submitted = submitted, .executed = executed, .user = r };

	memset(r, 0, sizeof *r);
	r->cap = cap;
	r->task = calloc((size_t)cap, sizeof *r->task);
	CHECK_OK(moe_engine_wait(e));
	CHECK_OK(moe_engine_observe(e, &o));
	e->handed_over = handed_over;
	e->handed_over_user = r;
}

static void record_end(struct record *r, struct moe_engine *e)
{
	e->handed_over = NULL;
	CHECK_OK(moe_engine_observe(e, NULL));
	for (int i = 0; i < r->n; i++)
		free(r->task[i].deps);
	free(r->task);
}

/* ---- ancestors as bit sets ---- */

struct ancestors {
	int n, words;
	uint64_t *bits;
};

static struct ancestors ancestors_new(int n)
{
	struct ancestors a = { .n = n, .words = (n + 63) / 64 };

	a.bits = calloc((size_t)n * (size_t)a.words, sizeof *a.bits);
	return a;
}

/* dep and its ancestors become ancestors of task */
static void ancestors_add(struct ancestors *a, int task, int dep)
{
	uint64_t *t = a->bits + (size_t)task * (size_t)a->words;
	const uint64_t *d = a->bits + (size_t)dep * (size_t)a->words;

	for (int w = 0; w < a->words; w++)
		t[w] |= d[w];
	t[dep / 64] |= 1ull << (dep % 64);
}

static bool ancestors_equal(const struct ancestors *a, const struct ancestors *b)
{
	return !memcmp(a->bits, b->bits, (size_t)a->n * (size_t)a->words * sizeof *a->bits);
}

static struct ancestors of_tracker(const struct record *r)
{
	struct ancestors a = ancestors_new(r->n);

	for (int i = 0; i < r->n; i++)
		for (int j = 0; j < r->task[i].n_deps; j++)
			ancestors_add(&a, i, (int)(r->task[i].deps[j] - r->first));
	return a;
}

static int index_of(const struct record *r, const struct starpu_task *t)
{
	for (int i = 0; i < r->n; i++)
		if (r->task[i].task == t)
			return i;
	return -1; /* a task of StarPU's own */
}

/* The successors of t, through tasks that are not ours, get dep as an ancestor. */
static void follow(struct ancestors *a, const struct record *r, struct starpu_task *t, int dep,
		   int depth)
{
	/* it never says how many there are (1.3.10), only how many fit: one per access at most */
	unsigned most = (unsigned)r->n * GRAPH_MAX_ACCESS * 2;
	struct starpu_task **succs = malloc(most * sizeof *succs);
	int n = starpu_task_get_task_succs(t, most, succs);

	CHECK(n < (int)most);
	for (int i = 0; i < n; i++) {
		int s = index_of(r, succs[i]);

		if (s >= 0)
			ancestors_add(a, s, dep);
		else if (depth < 20)
			follow(a, r, succs[i], dep, depth + 1);
	}
	free(succs);
}

static struct ancestors of_starpu(const struct record *r)
{
	struct ancestors a = ancestors_new(r->n);

	for (int i = 0; i < r->n; i++) /* in order, so that a task's own ancestors are complete */
		follow(&a, r, r->task[i].task, i, 0);
	return a;
}

/* Sequential consistency by definition: order matters where two tasks share a tensor and one
 * writes. */
static struct ancestors of_definition(const struct graph *g)
{
	struct ancestors a = ancestors_new(g->n_tasks);

	for (int i = 0; i < g->n_tasks; i++)
		for (int j = 0; j < i; j++)
			for (int x = 0; x < g->task[i].n; x++)
				for (int y = 0; y < g->task[j].n; y++)
					if (g->task[i].tensor[x] == g->task[j].tensor[y] &&
					    (g->task[i].mode[x] != MOE_R ||
					     g->task[j].mode[y] != MOE_R))
						ancestors_add(&a, i, j);
	return a;
}

static void check_order(const struct record *r)
{
	int early = 0;

	for (int i = 0; i < r->n; i++) {
		CHECK(r->task[i].end >= r->task[i].start && r->task[i].start > 0);
		CHECK(r->task[i].rows == i);
		for (int j = 0; j < r->task[i].n_deps; j++)
			early += r->task[i].start < r->task[r->task[i].deps[j] - r->first].end;
	}
	CHECK(early == 0);
}

/* false: a worker that was looking for work when the engine was held took a task all the same, so
 * StarPU had fewer dependencies to make. */
static bool one_graph(struct moe_engine *e, int tensors, int tasks)
{
	struct record r;
	struct graph g;
	struct ancestors ours, starpu, definition;
	bool still;

	graph_make(&g, tensors, tasks, 2);
	graph_register(&g, e);
	record_begin(&r, e, tasks);
	CHECK_OK(moe_engine_hold(e));
	usleep(1000);
	graph_submit(&g, e, NULL);
	ours = of_tracker(&r);
	starpu = of_starpu(&r);
	definition = of_definition(&g);
	still = moe_engine_outstanding(e) == tasks;
	CHECK(ancestors_equal(&ours, &definition));
	CHECK(!still || ancestors_equal(&ours, &starpu));
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, 1);
	check_order(&r);
	record_end(&r, e);
	graph_free(&g);
	free(ours.bits), free(starpu.bits), free(definition.bits);
	return still;
}

static void random_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 2, arg);
	int rounds = moe_test_full() ? 300 : 30, compared = 0;

	graph_random = moe_test_seed();
	for (int i = 0; i < rounds; i++)
		compared += one_graph(e, 1 + below(12), 1 + below(i % 5 ? 60 : 250));
	CHECK(compared > rounds / 2);
	CHECK_OK(moe_engine_close(e));
}

static void random_graphs(void)
{
	in_child("lws", random_child, "lws");
	in_child("eager", random_child, "eager");
}

/* ---- long lists ---- */

static void readers_child(const void *arg)
{
	int n = *(const int *)arg;
	struct moe_engine *e = open_with(2, 1, NULL);
	struct record r;
	struct graph g;

	graph_make(&g, 1, n + 2, 0);
	for (int i = 0; i < n + 2; i++) {
		g.task[i].n = 1;
		g.task[i].tensor[0] = 0;
		g.task[i].mode[0] = i == 0 ? MOE_W : i == n + 1 ? MOE_RW : MOE_R;
	}
	graph_register(&g, e);
	record_begin(&r, e, n + 2);
	graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_wait(e));
	CHECK(r.task[0].n_deps == 0);
	for (int i = 1; i <= n; i++)
		CHECK(r.task[i].n_deps == 1 && r.task[i].deps[0] == r.first);
	CHECK(r.task[n + 1].n_deps == n); /* no cap */
	check_order(&r);
	graph_verify(&g, 1);
	record_end(&r, e);
	graph_free(&g);
	CHECK_OK(moe_engine_close(e));
}

static void many_readers(void)
{
	in_child("500 readers", readers_child, &(int){ 500 });
	in_child("5000 readers", readers_child, &(int){ 5000 });
}

/* ---- observers that come and go ---- */

static void observers_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	struct record r;
	struct graph g;

	(void)arg;
	graph_make(&g, 1, 3, 0);
	for (int i = 0; i < 3; i++) {
		g.task[i].n = 1;
		g.task[i].tensor[0] = 0;
		g.task[i].mode[0] = i == 1 ? MOE_R : MOE_RW;
	}
	graph_register(&g, e);
	for (int round = 0; round < 3; round++) {
		record_begin(&r, e, 3);
		graph_submit(&g, e, NULL);
		CHECK_OK(moe_engine_wait(e));
		CHECK(r.task[0].n_deps == 0); /* nothing of what an earlier observer saw */
		CHECK(r.task[1].n_deps == 1 && r.task[2].n_deps == 1);
		record_end(&r, e);
		graph_submit(&g, e, NULL); /* unseen */
		CHECK_OK(moe_engine_wait(e));
	}
	graph_verify(&g, 6);
	/* a failed allocation in the tracker leaves no trace of its task */
	record_begin(&r, e, 3);
	for (int64_t n = 0, i = 0; i < 3;) {
		enum moe_status st;

		CHECK_OK(moe_submit_begin(e));
		moe_alloc_fail_after(n++);
		st = graph_submit_task(&g, e, (int)i, NULL);
		moe_alloc_fail_after(-1);
		moe_submit_end(e);
		CHECK(st == MOE_OK || st == MOE_ERR_NOMEM);
		if (st == MOE_OK)
			i++, n = 0;
	}
	CHECK_OK(moe_engine_wait(e));
	CHECK(r.n == 3 && r.task[1].n_deps == 1 && r.task[2].n_deps == 1);
	graph_verify(&g, 7);
	record_end(&r, e);
	graph_free(&g);
	CHECK_OK(moe_engine_close(e));
}

static void observers(void)
{
	in_child("observers", observers_child, NULL);
}

const struct moe_test moe_suite_tests[] = {
	{ "random graphs: the same ancestors as StarPU", random_graphs },
	{ "many readers", many_readers },
	{ "observers come and go", observers },
	{ NULL, NULL },
};
