/* SPDX-License-Identifier: Apache-2.0 */
/* What viewers need beside tasks: tracks without overlaps, and counters over time. */
#include "tools/trace/exporter.h"

#include <stdlib.h>

#define TRACKS 256 /* of a worker; in the last one, tasks may overlap */

uint8_t *trace_tracks(const struct trace *t, int **tracks)
{
	uint8_t *track = calloc((size_t)t->n_tasks + 1, 1);
	int *count = calloc((size_t)t->n_workers + 1, sizeof *count);

	if (!track || !count) {
		free(track);
		free(count);
		return NULL;
	}
	for (int w = 0; w < t->n_workers; w++) {
		int64_t stop[TRACKS];

		for (uint32_t i = t->worker_first[w]; i < t->worker_first[w + 1]; i++) {
			const struct trace_task *k = t->task + t->by_worker[i];
			int at = 0;

			while (at < count[w] && stop[at] > k->start && at < TRACKS - 1)
				at++;
			if (at == count[w])
				count[w]++;
			stop[at] = k->stop;
			track[t->by_worker[i]] = (uint8_t)at;
		}
	}
	*tracks = count;
	return track;
}

struct trace_change *trace_ready_changes(const struct trace *t, uint32_t *n)
{
	size_t size = 2 * (size_t)t->n_tasks;
	struct trace_key *event = malloc((size + 1) * sizeof *event);
	struct trace_change *change = malloc((size + 1) * sizeof *change);
	int64_t ready = 0;

	*n = 0;
	for (uint32_t i = 0; event && i < t->n_tasks; i++) {
		event[2 * i] = (struct trace_key){ trace_ready(t, i), 1 };
		event[2 * i + 1] = (struct trace_key){ trace_pop(t, i), 0 };
	}
	if (!event || !change || !trace_sort(event, size)) {
		free(event);
		free(change);
		return NULL;
	}
	for (size_t i = 0; i < size; i++) {
		ready += event[i].value ? 1 : -1;
		if (i + 1 == size || event[i + 1].key != event[i].key)
			change[(*n)++] = (struct trace_change){ event[i].key, ready, 0 };
	}
	free(event);
	return change;
}

struct trace_change *trace_memory_changes(const struct trace *t, uint32_t *n)
{
	size_t cells = (size_t)t->n_purposes * ((size_t)t->n_parts + 1);
	int64_t *bytes = calloc(cells + 1, sizeof *bytes);
	struct trace_change *change = malloc(((size_t)t->n_memory + 1) * sizeof *change);

	*n = 0;
	if (!bytes || !change) {
		free(bytes);
		free(change);
		return NULL;
	}
	for (uint32_t i = 0; i < t->n_memory; i++) {
		const struct trace_memory *m = t->memory + i;
		int64_t *row = bytes + (size_t)m->purpose * ((size_t)t->n_parts + 1), sum = 0;

		if (m->part < -1 || m->part >= t->n_parts)
			continue;
		row[m->part + 1] = m->bytes;
		for (int p = 0; p <= t->n_parts; p++)
			sum += row[p];
		if (*n && change[*n - 1].time == m->time && change[*n - 1].what == m->purpose)
			--*n;
		change[(*n)++] = (struct trace_change){ m->time, sum, m->purpose };
	}
	free(bytes);
	return change;
}

static int host_track(struct trace_host_tracks *h, const struct trace_host *x)
{
	for (int i = 0; i < h->n_tracks; i++)
		if (h->track[i].what == x->what && h->track[i].thread == x->thread)
			return i;
	h->track[h->n_tracks] = (struct trace_host_track){ x->what, x->thread };
	return h->n_tracks++;
}

int trace_host_tracks(const struct trace *t, struct trace_host_tracks *h)
{
	size_t n = (size_t)t->n_hosts + 1;
	struct trace_key *order = malloc(n * sizeof *order);
	int64_t *last = malloc(n * sizeof *last);
	bool done;

	*h = (struct trace_host_tracks){ .track = malloc(n * sizeof *h->track),
					 .slice = malloc(n * sizeof *h->slice) };
	done = order && last && h->track && h->slice;
	for (uint32_t i = 0; done && i < t->n_hosts; i++) {
		order[i] = (struct trace_key){ t->host[i].begin, i };
		last[i] = INT64_MIN;
	}
	done = done && trace_sort(order, t->n_hosts);
	for (uint32_t i = 0; done && i < t->n_hosts; i++) {
		const struct trace_host *x = t->host + order[i].value;
		int at = host_track(h, x);
		int64_t begin = x->begin > last[at] ? x->begin : last[at];

		if (begin >= x->end)
			continue;
		last[at] = x->end;
		h->slice[h->n++] = (struct trace_host_slice){ at, begin, x->end };
	}
	free(order);
	free(last);
	if (!done)
		trace_host_tracks_free(h);
	return done ? 0 : -1;
}

void trace_host_tracks_free(struct trace_host_tracks *h)
{
	free(h->track);
	free(h->slice);
	*h = (struct trace_host_tracks){ .n = 0 };
}
