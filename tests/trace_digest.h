/* SPDX-License-Identifier: Apache-2.0 */
/* Everything moesaic-trace does with a file, for inputs that may be anything. */
#ifndef MOE_TESTS_TRACE_DIGEST_H
#define MOE_TESTS_TRACE_DIGEST_H

#include "tools/trace/compare.h"
#include "tools/trace/exporter.h"
#include "tools/trace/replay.h"
#include "tools/trace/verify.h"

#include <stdlib.h>

/* What reports and exports draw, beside what they write down as it is. */
static inline bool trace_digest_drawn(const struct trace *t)
{
	struct trace_host_tracks host = { .n = 0 };
	uint32_t n;
	int *tracks = NULL;
	uint8_t *needed = trace_reduce(t), *track = trace_tracks(t, &tracks);
	struct trace_change *ready = trace_ready_changes(t, &n), *memory = trace_memory_changes(t, &n);
	bool good = needed && track && ready && memory && trace_host_tracks(t, &host) == 0;

	free(needed), free(track), free(tracks), free(ready), free(memory);
	trace_host_tracks_free(&host);
	return good;
}

/* Number of tasks that were read; -1: the file was refused, with a text; -2: memory ran out. */
static inline int64_t trace_digest(const char *path, FILE *out, char *error, size_t size)
{
	struct trace_verify v = { .out = out, .most = 3 };
	struct trace_json json = { .out = out };
	struct trace_series_list series;
	struct trace_view view;
	struct trace t;
	int64_t n;

	if (trace_read(&t, path, NULL, error, size))
		return -1;
	n = t.n_tasks;
	if (trace_verify(&t, &v) < 0)
		n = -2;
	if (n > 0) {
		if (trace_view_open(&t, 0, 0, &view, error, size)) {
			trace_free(&t);
			return -2;
		}
		if (trace_view_replay(&view) || trace_summary_text(&view, out) ||
		    trace_summary_json(&view, &json))
			n = -2;
		trace_view_close(&view);
		if (!trace_digest_drawn(&t))
			n = -2;
		if (trace_series(&t, false, &series))
			n = -2;
		else
			trace_series_free(&series);
	}
	trace_free(&t);
	return n;
}

#endif
