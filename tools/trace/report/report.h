/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The HTML report: one file that needs nothing else. Numbers are computed here, by metrics.h; the
 * page's script (this folder's .js, embedded by cmake/embed.cmake) draws them. It gets a JSON
 * document with what was computed, and every task's facts as columns for the time line.
 */
#ifndef MOE_TOOLS_TRACE_REPORT_H
#define MOE_TOOLS_TRACE_REPORT_H

#include "tools/trace/metrics.h"

/* Tasks of a packed table; the next ones go into another. */
#define REPORT_TABLE_ROWS (1u << 17)

/* path: the report. name: what the page calls the trace. 0, or -1 with a text. */
int trace_report(const struct trace *t, const char *name, const char *path, char *error,
		 size_t size);

/* ---- its parts: 0, or -1 without memory ---- */

/*
 * Tasks in order of worker and start, then dependencies in order of tasks, as payloads of .mxt
 * tables (engine/trace_format.h) in base64, a script element each. Columns: columns.c, and decode()
 * in base.js.
 */
int report_columns(const struct trace *t, FILE *out);

/* What the page shows as "all", "the median step", ...: a member of the list of views. */
int report_view(const struct trace_view *v, const char *name, struct trace_json *j);
/* What does not depend on a view: header, workers, steps, memory. */
int report_facts(const struct trace *t, const char *name, struct trace_json *j);

#endif
