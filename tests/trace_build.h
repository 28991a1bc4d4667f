/* SPDX-License-Identifier: Apache-2.0 */
/* Traces by hand: a table of tasks becomes a trace in memory. */
#ifndef MOE_TESTS_TRACE_BUILD_H
#define MOE_TESTS_TRACE_BUILD_H

#include "tests/child.h"
#include "tools/trace/metrics.h"

#include <math.h>

#define NA MOE_MXT_NA

/* ids are places in the table, from 1; times in ns. Zero is what is not named. */
struct made {
	int kind, worker;
	int64_t submit, ready, pop, start, stop;
	int pred[4]; /* ids, 0: none */
	int step, micro, phase, rows;
	int layer, group, part; /* from 1; 0: none */
	int64_t flops, read, written, local, remote, cpu;
};

static const char *const made_kinds[] = { "a",		 "b",	    "repack_bwd", "update",
					  "plan",	 "gate_up", "down",	  "down_bwd",
					  "gate_up_bwd", "combine", "repack",	  NULL };
enum { A, B, REPACK_BWD, UPDATE, PLAN, GATE_UP, DOWN, DOWN_BWD, GATE_UP_BWD, COMBINE, REPACK };

static inline void *made_copy(const void *from, size_t bytes)
{
	void *p = malloc(bytes + 1);

	memcpy(p, from, bytes);
	return p;
}

/* Nodes: worker w is on node w mod nodes; part p on node p mod nodes, with the workers there. */
static inline void made_machine(struct trace *t, int workers, int nodes)
{
	t->n_workers = workers;
	t->n_nodes = t->n_parts = nodes;
	t->worker = calloc((size_t)workers, sizeof *t->worker);
	t->part_node = calloc((size_t)nodes, sizeof *t->part_node);
	t->part_first = calloc((size_t)nodes + 1, sizeof *t->part_first);
	t->part_worker = calloc((size_t)workers, sizeof *t->part_worker);
	for (int w = 0; w < workers; w++)
		t->worker[w] = (struct trace_worker){ w % nodes, w };
	for (int p = 0, at = 0; p < nodes; p++) {
		t->part_node[p] = p;
		for (int w = p; w < workers; w += nodes)
			t->part_worker[at++] = w;
		t->part_first[p + 1] = (uint32_t)at;
	}
}

static inline void made_task(struct trace *t, uint32_t i, const struct made *m)
{
	struct trace_task *k = &t->task[i];

	*k = (struct trace_task){ .id = (int64_t)i + 1,
				  .submit = m->submit,
				  .ready = m->ready,
				  .pop = m->pop,
				  .start = m->start,
				  .stop = m->stop,
				  .cpu = m->cpu ? m->cpu : m->stop - m->start,
				  .rows = m->rows,
				  .flops = m->flops,
				  .read = m->read,
				  .written = m->written,
				  .local = m->local,
				  .remote = m->remote,
				  .cycles = NA,
				  .instructions = NA,
				  .llc_misses = NA,
				  .kind = m->kind,
				  .layer = m->layer - 1,
				  .group = m->group - 1,
				  .slice = -1,
				  .part = m->part - 1,
				  .micro = m->micro,
				  .worker = m->worker,
				  .core = -1,
				  .step = m->step,
				  .phase = (uint8_t)m->phase,
				  .first_pred = t->n_preds };
	for (int p = 0; p < 4 && m->pred[p]; p++, k->n_pred++)
		t->pred[t->n_preds++] = (uint32_t)m->pred[p] - 1;
}

/* false after a failed check; trace_free() it. header may be NULL. */
static inline bool made_trace(struct trace *t, const struct made *m, size_t n, int workers,
			      int nodes, const char *header)
{
	char error[200] = "";

	memset(t, 0, sizeof *t);
	made_machine(t, workers, nodes);
	t->header = strdup(header ? header : "");
	t->ended = true;
	t->n_tasks = (uint32_t)n;
	t->task = calloc(n + 1, sizeof *t->task);
	t->pred = calloc(4 * n + 1, sizeof *t->pred);
	while (made_kinds[t->n_kinds])
		t->n_kinds++;
	t->kind = calloc((size_t)t->n_kinds, sizeof *t->kind);
	for (int k = 0; k < t->n_kinds; k++)
		t->kind[k] = strdup(made_kinds[k]);
	for (size_t i = 0; i < n; i++)
		made_task(t, (uint32_t)i, &m[i]);
	if (check_at(trace_finish(t, error, sizeof error) == 0, error, __FILE__, __LINE__))
		return true;
	trace_free(t);
	return false;
}

static inline void made_routing(struct trace *t, const struct trace_routing *r, uint32_t n,
				const int64_t *load, uint32_t n_loads)
{
	t->routing = made_copy(r, n * sizeof *r);
	t->n_routing = n;
	t->load = made_copy(load, n_loads * sizeof *load);
	t->n_loads = n_loads;
}

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define MADE(t, table, workers, nodes, header)                                                     \
	made_trace(t, table, COUNT(table), workers, nodes, header)

static inline bool near(double got, double want)
{
	return fabs(got - want) <= 1e-9 * fabs(want);
}

#endif
