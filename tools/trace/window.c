/* SPDX-License-Identifier: Apache-2.0 */
/* Windows of time, and the tasks in them. */
#include "tools/trace/metrics.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* First task of a worker that has not stopped before `begin`. */
static uint32_t first_of(const struct trace *t, int worker, int64_t begin)
{
	uint32_t low = t->worker_first[worker], high = t->worker_first[worker + 1];

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (t->stop_before[middle] <= begin)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static bool overlaps(const struct trace_task *k, int64_t begin, int64_t end)
{
	return k->start < end && (k->stop > begin || (k->start == k->stop && k->start >= begin));
}

/* Counts them, or lists them too. */
static uint32_t collect(const struct trace *t, int64_t begin, int64_t end, struct trace_key *key)
{
	uint32_t n = 0;

	for (int w = 0; w < t->n_workers; w++)
		for (uint32_t i = first_of(t, w, begin); i < t->worker_first[w + 1]; i++) {
			const struct trace_task *k = &t->task[t->by_worker[i]];

			if (k->start >= end)
				break;
			if (!overlaps(k, begin, end))
				continue;
			if (key)
				key[n] = (struct trace_key){ k->start, t->by_worker[i] };
			n++;
		}
	return n;
}

int trace_window(const struct trace *t, int64_t begin, int64_t end, struct trace_window *w)
{
	struct trace_key *key;

	memset(w, 0, sizeof *w);
	w->trace = t;
	w->begin = begin;
	w->end = end > begin ? end : begin;
	w->tokens = w->trained = MOE_MXT_NA;
	w->n = collect(t, begin, w->end, NULL);
	key = malloc(((size_t)w->n + 1) * sizeof *key);
	w->task = malloc(((size_t)w->n + 1) * sizeof *w->task);
	if (!key || !w->task) {
		free(key);
		trace_window_free(w);
		return -1;
	}
	collect(t, begin, w->end, key);
	if (!trace_sort(key, w->n)) {
		free(key);
		trace_window_free(w);
		return -1;
	}
	for (uint32_t i = 0; i < w->n; i++)
		w->task[i] = key[i].value;
	free(key);
	return 0;
}

void trace_window_free(struct trace_window *w)
{
	free(w->task);
	memset(w, 0, sizeof *w);
}

int64_t trace_inside(const struct trace_window *w, uint32_t task)
{
	const struct trace_task *k = &w->trace->task[task];
	int64_t begin = k->start > w->begin ? k->start : w->begin;
	int64_t end = k->stop < w->end ? k->stop : w->end;

	return end > begin ? end - begin : 0;
}

/* ---- steps ---- */

void trace_step_time(const struct trace *t, int i, int64_t *begin, int64_t *end)
{
	*begin = t->step[i].from;
	*end = t->step[i].end > *begin ? t->step[i].end : *begin;
}

static int64_t sum_of(int64_t a, int64_t b)
{
	return a == MOE_MXT_NA || b == MOE_MXT_NA ? MOE_MXT_NA : a + b;
}

int trace_window_steps(const struct trace *t, int i, int j, struct trace_window *w)
{
	int64_t begin, end, unused;

	trace_step_time(t, i, &begin, &unused);
	trace_step_time(t, j, &unused, &end);
	if (trace_window(t, begin, end, w))
		return -1;
	w->first_step = t->step[i].step;
	w->last_step = t->step[j].step;
	w->tokens = w->trained = 0;
	for (int k = i; k <= j; k++) {
		w->tokens = sum_of(w->tokens, t->step[k].tokens);
		w->trained = sum_of(w->trained, t->step[k].trained);
	}
	return 0;
}

int trace_steady(const struct trace *t)
{
	return t->n_steps == 0 ? -1 : t->n_steps > 2 ? 1 : 0;
}

int trace_window_steady(const struct trace *t, struct trace_window *w)
{
	int first = trace_steady(t);

	return first < 0 ? trace_window(t, t->first, t->last, w)
			 : trace_window_steps(t, first, t->n_steps - 1, w);
}

/* Index of the first step that is not below a number. */
static int find(const struct trace *t, int number)
{
	int i = 0;

	while (i < t->n_steps && t->step[i].step < number)
		i++;
	return i;
}

int trace_choose(const struct trace *t, int first, int last, struct trace_window *w, char *error,
		 size_t size)
{
	int i = find(t, first), k = find(t, last + 1) - 1;
	int rc;

	if (!first && !last) {
		rc = trace_window_steady(t, w);
	} else if (i > k) {
		snprintf(error, size, "no step from %d to %d: the trace has %s", first, last,
			 t->n_steps ? "other ones" : "no steps");
		if (t->n_steps)
			snprintf(error, size, "no step from %d to %d: the trace has %d to %d",
				 first, last, t->step[0].step, t->step[t->n_steps - 1].step);
		return -1;
	} else {
		rc = trace_window_steps(t, i, k, w);
	}
	if (rc)
		snprintf(error, size, "no memory");
	return rc;
}
