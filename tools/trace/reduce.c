/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which dependencies say something that no other path says. A writer that waits for many readers
 * makes most dependencies of a step; drawing all of them hides the rest.
 */
#include "tools/trace/exporter.h"

#include <stdlib.h>
#include <string.h>

struct search {
	const struct trace *trace;
	uint32_t *level; /* longest chain of predecessors */
	uint32_t *seen;	 /* task + 1 whose search came by */
	uint32_t *stack;
};

/* Predecessors have lower indices (tasks are in order of submission), so one pass will do. */
static void levels(struct search *s)
{
	const struct trace *t = s->trace;

	for (uint32_t i = 0; i < t->n_tasks; i++) {
		const struct trace_task *k = t->task + i;

		s->level[i] = 0;
		for (uint32_t e = k->first_pred; e < k->first_pred + k->n_pred; e++)
			if (s->level[i] <= s->level[t->pred[e]])
				s->level[i] = s->level[t->pred[e]] + 1;
	}
}

/*
 * Marks ancestors of task `from` whose level is at least `floor`. The stack holds each task at most
 * once, since one is marked when it is pushed.
 */
static void mark(struct search *s, uint32_t from, uint32_t floor, uint32_t stamp)
{
	const struct trace *t = s->trace;
	uint32_t n = 0;

	s->stack[n++] = from;
	while (n) {
		const struct trace_task *k = t->task + s->stack[--n];

		for (uint32_t e = k->first_pred; e < k->first_pred + k->n_pred; e++) {
			uint32_t p = t->pred[e];

			if (s->seen[p] == stamp || s->level[p] < floor)
				continue;
			s->seen[p] = stamp;
			s->stack[n++] = p;
		}
	}
}

/*
 * An ancestor of a predecessor lies on a lower level than it; so what lies one level below the task
 * is needed, and nothing below the lowest predecessor has to be looked at.
 */
static void reduce_task(struct search *s, uint32_t task, uint8_t *needed)
{
	const struct trace *t = s->trace;
	const struct trace_task *k = t->task + task;
	const uint32_t *pred = t->pred + k->first_pred;
	uint32_t lowest = UINT32_MAX;

	for (uint32_t i = 0; i < k->n_pred; i++)
		if (s->level[pred[i]] < lowest)
			lowest = s->level[pred[i]];
	for (uint32_t i = 0; i < k->n_pred; i++)
		if (s->level[pred[i]] > lowest)
			mark(s, pred[i], lowest, task + 1);
	for (uint32_t i = 0; i < k->n_pred; i++)
		needed[k->first_pred + i] = s->seen[pred[i]] != task + 1;
}

uint8_t *trace_reduce(const struct trace *t)
{
	size_t n = (size_t)t->n_tasks + 1;
	struct search s = { t, calloc(n, sizeof(uint32_t)), calloc(n, sizeof(uint32_t)),
			    malloc(n * sizeof(uint32_t)) };
	uint8_t *needed = calloc((size_t)t->n_preds + 1, 1);

	if (s.level && s.seen && s.stack && needed) {
		levels(&s);
		for (uint32_t i = 0; i < t->n_tasks; i++)
			reduce_task(&s, i, needed);
	} else {
		free(needed);
		needed = NULL;
	}
	free(s.level);
	free(s.seen);
	free(s.stack);
	return needed;
}
