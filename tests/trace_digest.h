/* SPDX-License-Identifier: Apache-2.0 */
/* Everything moesaic-trace does with a file, for inputs that may be anything. */
#ifndef MOE_TESTS_TRACE_DIGEST_H
#define MOE_TESTS_TRACE_DIGEST_H

#include "tools/trace/compare.h"
#include "tools/trace/replay.h"
#include "tools/trace/verify.h"

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
		if (trace_series(&t, false, &series))
			n = -2;
		else
			trace_series_free(&series);
	}
	trace_free(&t);
	return n;
}

#endif
