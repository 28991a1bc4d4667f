/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random graphs of small tasks over a few tensors, and what they must compute: what running the
 * tasks one after the other computes.
 */
#ifndef MOE_TESTS_GRAPH_CHECK_H
#define MOE_TESTS_GRAPH_CHECK_H

#include "engine/codelet.h"
#include "tests/child.h"

#define GRAPH_MAX_ACCESS 6

struct graph_task {
	int n, part, priority;
	int tensor[GRAPH_MAX_ACCESS];
	enum moe_mode mode[GRAPH_MAX_ACCESS];
};

struct graph {
	int n_tensors, n_tasks;
	struct graph_task *task;
	uint64_t *value; /* of each tensor */
	struct moe_tensor **tensor;
	long spin; /* loop turns of a task's body */
};

struct graph_args {
	struct graph *g;
	int task;
};

static inline uint64_t mix(uint64_t x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdull;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ull;
	return x ^ x >> 33;
}

/* Repeatable numbers below n. */
static uint64_t graph_random;
static inline int below(int n)
{
	graph_random += 0x9e3779b97f4a7c15ull;
	return (int)(mix(graph_random) % (uint64_t)n);
}

static inline void graph_execute(struct graph *g, int i, uint64_t *value)
{
	const struct graph_task *t = &g->task[i];
	uint64_t h = mix((uint64_t)i + 1);

	for (int j = 0; j < t->n; j++)
		if (t->mode[j] != MOE_W)
			h = mix(h ^ value[t->tensor[j]]);
	for (volatile long s = 0; s < g->spin; s++)
		;
	for (int j = 0; j < t->n; j++)
		if (t->mode[j] != MOE_R)
			value[t->tensor[j]] = mix(h + (uint64_t)j);
}

static void graph_run(const void *args, struct moe_worker *worker)
{
	const struct graph_args *a = args;

	worker->rows = a->task;
	graph_execute(a->g, a->task, a->g->value);
}

static double graph_cost(const void *args)
{
	(void)args;
	return 5;
}

static MOE_CODELET(graph, graph_run, graph_cost);

static inline void graph_make(struct graph *g, int n_tensors, int n_tasks, int parts)
{
	*g = (struct graph){ .n_tensors = n_tensors, .n_tasks = n_tasks };
	g->task = calloc((size_t)n_tasks, sizeof *g->task);
	g->value = calloc((size_t)n_tensors, sizeof *g->value);
	g->tensor = calloc((size_t)n_tensors, sizeof(struct moe_tensor *));
	for (int i = 0; i < n_tasks; i++) {
		struct graph_task *t = &g->task[i];
		int want = 1 + below(GRAPH_MAX_ACCESS);

		t->part = parts ? below(parts + 1) - 1 : -1;
		t->priority = below(2000) - 1000;
		while (t->n < want && t->n < n_tensors) {
			int x = below(n_tensors);
			bool there = false;

			for (int j = 0; j < t->n; j++)
				there |= t->tensor[j] == x;
			if (there)
				continue;
			t->tensor[t->n] = x;
			t->mode[t->n++] = below(3) ? MOE_R : below(2) ? MOE_W : MOE_RW;
		}
	}
}

static inline void graph_register(struct graph *g, struct moe_engine *e)
{
	for (int i = 0; i < g->n_tensors; i++) {
		char name[32];

		snprintf(name, sizeof name, "t%d", i);
		CHECK_OK(moe_tensor_create(e, name, 8, -1, &g->tensor[i]));
		moe_tensor_set_initialised(g->tensor[i]);
	}
}

static inline enum moe_status graph_submit_task(struct graph *g, struct moe_engine *e, int i,
						struct moe_ticket *ticket)
{
	const struct graph_task *t = &g->task[i];
	struct graph_args args = { g, i };
	struct moe_access access[GRAPH_MAX_ACCESS];
	struct moe_task_desc d = {
		.codelet = &moe_cl_graph,
		.args = &args,
		.args_size = sizeof args,
		.access = access,
		.n_access = t->n,
		.priority = t->priority,
		.tag = { .layer = -1, .group = (int16_t)i, .part = (int16_t)t->part },
		.ticket = ticket
	};

	for (int j = 0; j < t->n; j++)
		access[j] = (struct moe_access){ g->tensor[t->tensor[j]], t->mode[j] };
	return moe_submit(e, &d);
}

static inline void graph_submit(struct graph *g, struct moe_engine *e, struct moe_ticket *ticket)
{
	if (!CHECK_OK(moe_submit_begin(e)))
		return;
	for (int i = 0; i < g->n_tasks; i++)
		if (!CHECK_OK(graph_submit_task(g, e, i, ticket)))
			break;
	moe_submit_end(e);
}

/* After waiting: the values are those of a run in order. */
static inline void graph_verify(struct graph *g, int runs)
{
	uint64_t *want = calloc((size_t)g->n_tensors, sizeof *want);

	for (int r = 0; r < runs; r++)
		for (int i = 0; i < g->n_tasks; i++)
			graph_execute(g, i, want);
	CHECK(!memcmp(want, g->value, (size_t)g->n_tensors * sizeof *want));
	free(want);
}

static inline void graph_free(struct graph *g)
{
	for (int i = 0; i < g->n_tensors; i++)
		moe_tensor_destroy(g->tensor[i]);
	free(g->task);
	free(g->value);
	free(g->tensor);
}

#endif
