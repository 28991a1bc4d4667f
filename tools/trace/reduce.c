/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which dependencies say something that no other path says. A writer that waits for many readers
 * makes most dependencies of a step; drawing all of them hides the rest.
 */
#include "tools/trace/exporter.h"

#include <stdlib.h>

/*
 * Dependencies looked at for one task, and for all together. To prove that a task of the step
 * before is no ancestor of another predecessor would take a walk through the whole step, for each
 * of a million tasks; where the walk ends early, a dependency counts as needed. In a trace of the
 * demo 31424 are left, where 31356 are needed.
 */
#define MOST_STEPS 4096
#define FEWEST_STEPS 256
#define ALL_STEPS ((uint32_t)1 << 30)

struct walk {
	const struct trace *trace;
	uint32_t *level; /* longest chain of predecessors */
	uint32_t *seen;	 /* task + 1 whose walk came by */
	uint32_t *open;	 /* task + 1 that has it as a predecessor which may be implied */
	uint32_t *queue;
	uint32_t most; /* dependencies looked at for a task */
};

/* Predecessors have lower indices (tasks are in order of submission), so one pass will do. */
static void make_levels(struct walk *s)
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
 * Marks ancestors of the predecessors, nearest first. An ancestor of a predecessor lies on a lower
 * level than it: so what lies one level below the task is needed, and only the `open` others are
 * looked for.
 */
static void mark(struct walk *s, uint32_t task, uint32_t open, uint32_t lowest)
{
	const struct trace *t = s->trace;
	const struct trace_task *k = t->task + task;
	uint32_t head = 0, tail = 0, steps = 0;

	for (uint32_t i = k->n_pred; i-- > 0;)
		s->queue[tail++] = t->pred[k->first_pred + i];
	while (head < tail && open && steps < s->most) {
		const struct trace_task *q = t->task + s->queue[head++];

		steps += q->n_pred;
		for (uint32_t e = q->first_pred; e < q->first_pred + q->n_pred; e++) {
			uint32_t p = t->pred[e];

			if (s->seen[p] == task + 1 || s->level[p] < lowest)
				continue;
			s->seen[p] = task + 1;
			s->queue[tail++] = p;
			open -= s->open[p] == task + 1;
		}
	}
}

static void reduce_task(struct walk *s, uint32_t task, uint8_t *needed)
{
	const struct trace *t = s->trace;
	const struct trace_task *k = t->task + task;
	const uint32_t *pred = t->pred + k->first_pred;
	uint32_t lowest = UINT32_MAX, open = 0;

	for (uint32_t i = 0; i < k->n_pred; i++) {
		lowest = s->level[pred[i]] < lowest ? s->level[pred[i]] : lowest;
		if (s->level[pred[i]] + 1 < s->level[task]) {
			s->open[pred[i]] = task + 1;
			open++;
		}
	}
	if (open)
		mark(s, task, open, lowest);
	for (uint32_t i = 0; i < k->n_pred; i++)
		needed[k->first_pred + i] = s->seen[pred[i]] != task + 1;
}

uint8_t *trace_reduce(const struct trace *t)
{
	size_t n = (size_t)t->n_tasks + 1;
	struct walk s = { .trace = t,
			  .level = malloc(n * sizeof *s.level),
			  .seen = calloc(n, sizeof *s.seen),
			  .open = calloc(n, sizeof *s.open),
			  .queue = malloc(2 * n * sizeof *s.queue),
			  .most = ALL_STEPS / (uint32_t)n };
	uint8_t *needed = calloc((size_t)t->n_preds + 1, 1);

	if (s.level && s.seen && s.open && s.queue && needed) {
		s.most = s.most > MOST_STEPS	 ? MOST_STEPS
			 : s.most < FEWEST_STEPS ? FEWEST_STEPS
						 : s.most;
		make_levels(&s);
		for (uint32_t i = 0; i < t->n_tasks; i++)
			reduce_task(&s, i, needed);
	} else {
		free(needed);
		needed = NULL;
	}
	free(s.level);
	free(s.seen);
	free(s.open);
	free(s.queue);
	return needed;
}
