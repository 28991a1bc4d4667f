/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of times. */
#include "tools/trace/metrics.h"

#include <stdlib.h>
#include <string.h>

static int reserve(struct trace_set *s, uint32_t n)
{
	uint32_t cap = s->cap ? s->cap : 16;
	int64_t *begin, *end;

	if (n <= s->cap)
		return 0;
	while (cap < n)
		cap *= 2;
	begin = realloc(s->begin, (size_t)cap * sizeof *begin);
	if (begin)
		s->begin = begin;
	end = realloc(s->end, (size_t)cap * sizeof *end);
	if (end)
		s->end = end;
	if (!begin || !end)
		return -1;
	s->cap = cap;
	return 0;
}

int trace_set_add(struct trace_set *s, int64_t begin, int64_t end)
{
	if (end <= begin)
		return 0;
	if (s->n && s->end[s->n - 1] == begin) { /* the usual case for one worker */
		s->end[s->n - 1] = end;
		return 0;
	}
	if (reserve(s, s->n + 1))
		return -1;
	s->begin[s->n] = begin;
	s->end[s->n++] = end;
	return 0;
}

static int sort(struct trace_set *s)
{
	struct trace_key *key;
	int64_t *end;
	uint32_t i = 1;

	while (i < s->n && s->begin[i] >= s->begin[i - 1])
		i++;
	if (i >= s->n)
		return 0;
	key = malloc((size_t)s->n * sizeof *key);
	end = malloc((size_t)s->cap * sizeof *end);
	for (i = 0; key && i < s->n; i++)
		key[i] = (struct trace_key){ s->begin[i], i };
	if (!key || !end || !trace_sort(key, s->n)) {
		free(key), free(end);
		return -1;
	}
	for (i = 0; i < s->n; i++) {
		s->begin[i] = key[i].key;
		end[i] = s->end[key[i].value];
	}
	free(s->end);
	s->end = end;
	free(key);
	return 0;
}

int trace_set_close(struct trace_set *s)
{
	uint32_t n = 0;

	if (sort(s))
		return -1;
	for (uint32_t i = 0; i < s->n; i++)
		if (n && s->begin[i] <= s->end[n - 1]) {
			if (s->end[i] > s->end[n - 1])
				s->end[n - 1] = s->end[i];
		} else {
			s->begin[n] = s->begin[i];
			s->end[n++] = s->end[i];
		}
	s->n = n;
	free(s->sum);
	s->sum = malloc(((size_t)n + 1) * sizeof *s->sum);
	if (!s->sum)
		return -1;
	s->sum[0] = 0;
	for (uint32_t i = 0; i < n; i++)
		s->sum[i + 1] = s->sum[i] + s->end[i] - s->begin[i];
	return 0;
}

int64_t trace_set_length(const struct trace_set *s)
{
	return s->n ? s->sum[s->n] : 0;
}

/* Length of what lies before a time. */
static int64_t before(const struct trace_set *s, int64_t time)
{
	uint32_t low = 0, high = s->n;

	while (low < high) { /* the first that begins at or after it */
		uint32_t middle = low + (high - low) / 2;

		if (s->begin[middle] < time)
			low = middle + 1;
		else
			high = middle;
	}
	if (!low)
		return 0;
	return s->end[low - 1] <= time ? s->sum[low] : s->sum[low - 1] + time - s->begin[low - 1];
}

int64_t trace_set_within(const struct trace_set *s, int64_t begin, int64_t end)
{
	return s->n && end > begin ? before(s, end) - before(s, begin) : 0;
}

int64_t trace_set_common(const struct trace_set *a, const struct trace_set *b)
{
	int64_t sum = 0;

	for (uint32_t i = 0, k = 0; i < a->n && k < b->n;) {
		int64_t begin = a->begin[i] > b->begin[k] ? a->begin[i] : b->begin[k];
		int64_t end = a->end[i] < b->end[k] ? a->end[i] : b->end[k];

		if (end > begin)
			sum += end - begin;
		if (a->end[i] < b->end[k])
			i++;
		else
			k++;
	}
	return sum;
}

int trace_set_subtract(const struct trace_set *a, const struct trace_set *b, struct trace_set *out)
{
	uint32_t k = 0;

	memset(out, 0, sizeof *out);
	for (uint32_t i = 0; i < a->n; i++) {
		int64_t from = a->begin[i];

		while (k < b->n && b->end[k] <= from)
			k++;
		for (; k < b->n && b->begin[k] < a->end[i]; k++) {
			if (trace_set_add(out, from, b->begin[k]))
				return -1;
			from = b->end[k];
			if (from >= a->end[i])
				break;
		}
		if (trace_set_add(out, from, a->end[i]))
			return -1;
	}
	return trace_set_close(out);
}

void trace_set_free(struct trace_set *s)
{
	free(s->begin), free(s->end), free(s->sum);
	memset(s, 0, sizeof *s);
}
