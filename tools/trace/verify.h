/* SPDX-License-Identifier: Apache-2.0 */
/* What must hold in any good trace: docs/trace-metrics.md lists the rules. */
#ifndef MOE_TOOLS_TRACE_VERIFY_H
#define MOE_TOOLS_TRACE_VERIFY_H

#include "tools/trace/trace.h"

#include <stdio.h>

enum trace_rule {
	TRACE_RULE_FILE,      /* whole, with nothing impossible in it, nothing lost */
	TRACE_RULE_ORDER,     /* submitted, ready, popped, started, in that order */
	TRACE_RULE_DEPS,      /* no task is ready before its predecessors have ended */
	TRACE_RULE_WORKER,    /* one task at a time on a worker */
	TRACE_RULE_PLACEMENT, /* strict: on the part's workers */
	TRACE_RULE_TOKENS,    /* routed slots all go to experts, and experts get as many rows */
	TRACE_RULE_REPACK,    /* a repack ends before its readers start, and disturbs none */
	TRACE_RULES
};

struct trace_verify {
	bool partial;	    /* the trace may be cut off, and tasks lost */
	bool skipped_slots; /* slots may go to no expert (ids of -1, masked experts) */
	FILE *out;	    /* findings, at most `most` lines per rule; NULL: none */
	int most;
	int64_t found[TRACE_RULES];
};
/* Number of findings; -1: no memory. */
int64_t trace_verify(const struct trace *t, struct trace_verify *v);

#endif
