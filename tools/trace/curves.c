/* SPDX-License-Identifier: Apache-2.0 */
/* How many tasks are in a state, over time. */
#include "tools/trace/metrics.h"

#include <stdlib.h>
#include <string.h>

static void state_of(const struct trace *t, uint32_t i, enum trace_curve what, int64_t *from,
		     int64_t *to)
{
	const struct trace_task *k = &t->task[i];

	*from = what == TRACE_CURVE_READY     ? trace_ready(t, i)
		: what == TRACE_CURVE_RUNNING ? k->start
					      : trace_submit(t, i);
	*to = what == TRACE_CURVE_READY ? trace_pop(t, i) : k->stop;
}

/* Number of tasks in the state at `begin`, and the changes after it: 1 and -1 by time. */
static int64_t changes(const struct trace *t, enum trace_curve what, int64_t begin, int64_t end,
		       struct trace_key *key, size_t *n)
{
	int64_t now = 0;

	*n = 0;
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		int64_t from, to;

		state_of(t, i, what, &from, &to);
		if (to <= from || from >= end || to <= begin)
			continue;
		now += from <= begin;
		if (from > begin)
			key[(*n)++] = (struct trace_key){ from, 1 };
		if (to < end)
			key[(*n)++] = (struct trace_key){ to, 0 };
	}
	return now;
}

/* One stretch of time with the same number, into the bins it touches. */
static void spread(int64_t from, int64_t to, int64_t now, int64_t begin, double width, int bins,
		   float *mean, int32_t *highest)
{
	int first = (int)((double)(from - begin) / width), last;

	last = to > from ? (int)((double)(to - begin) / width) : first;
	first = first < bins ? first : bins - 1;
	last = last < bins ? last : bins - 1;
	for (int b = first; b <= last; b++) {
		double left = (double)begin + width * b, right = left + width;
		double a = (double)from > left ? (double)from : left;
		double z = (double)to < right ? (double)to : right;

		if (z <= a)
			continue;
		mean[b] += (float)((double)now * (z - a) / width);
		if (highest && now > highest[b])
			highest[b] = (int32_t)now;
	}
}

int trace_curve(const struct trace *t, enum trace_curve what, int64_t begin, int64_t end, int bins,
		float *mean, int32_t *highest)
{
	struct trace_key *key = malloc((2 * (size_t)t->n_tasks + 1) * sizeof *key);
	double width = (double)(end - begin) / bins;
	int64_t now, at = begin;
	size_t n;

	memset(mean, 0, (size_t)bins * sizeof *mean);
	if (highest)
		memset(highest, 0, (size_t)bins * sizeof *highest);
	if (!key)
		return -1;
	now = changes(t, what, begin, end, key, &n);
	if (!trace_sort(key, n)) {
		free(key);
		return -1;
	}
	for (size_t i = 0; i < n && end > begin; i++) {
		if (key[i].key > at)
			spread(at, key[i].key, now, begin, width, bins, mean, highest);
		at = key[i].key;
		now += key[i].value ? 1 : -1;
	}
	if (end > at)
		spread(at, end, now, begin, width, bins, mean, highest);
	free(key);
	return 0;
}
