/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a trace says about a window of time (a step, or all): the definitions of docs/trace-metrics.md,
 * computed once and shared by summary, report, diff and whatif. Times are nanoseconds.
 */
#ifndef MOE_TOOLS_TRACE_METRICS_H
#define MOE_TOOLS_TRACE_METRICS_H

#include "tools/trace/trace.h"

enum trace_cause {
	TRACE_SUBMISSION, /* no task was ready, and some task was not submitted yet */
	TRACE_DEPENDENCY, /* no task was ready, all were submitted */
	TRACE_PLACEMENT,  /* tasks were ready, none of them on this worker */
	TRACE_DATA,	  /* acquiring data */
	TRACE_RUNTIME,	  /* pop, push, callbacks */
	TRACE_CAUSES
};

extern const char *const trace_cause_name[TRACE_CAUSES];

/* The interval that metrics are about, and the tasks in it. */
struct trace_window {
	const struct trace *trace;
	int64_t begin, end;
	const uint32_t *task; /* indices, ascending start */
	uint32_t n;
	int64_t tokens; /* MOE_MXT_NA: not known */
};

struct trace_kind_time {
	int64_t time, cpu; /* sums over tasks */
	int64_t flops, bytes; /* MOE_MXT_NA: no task of it has a model */
	uint32_t n;
};

struct trace_bounds {
	double area;	      /* sum of durations / workers */
	double critical_path; /* longest path of durations */
	double bandwidth;     /* bytes / rate of the busiest node; NaN: no bytes or no rate */
	double lower;	      /* the largest of them */
	double efficiency;    /* lower / makespan */
};

#endif
