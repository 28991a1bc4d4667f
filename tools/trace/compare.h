/* SPDX-License-Identifier: Apache-2.0 */
/* Two traces, value by value, with intervals over steps. */
#ifndef MOE_TOOLS_TRACE_COMPARE_H
#define MOE_TOOLS_TRACE_COMPARE_H

#include "tools/trace/metrics.h"

struct trace_difference {
	double before, after; /* medians over steps; NaN: not in that trace */
	double change;	      /* after / before - 1 */
	double low, high; /* 95 % of bootstrap resamples of both; NaN: fewer than 3 steps in one */
};
/* NaNs are left out. The same values give the same interval. */
struct trace_difference trace_difference(const double *before, int n_before, const double *after,
					 int n_after);

enum trace_group { TRACE_GROUP_STEP, TRACE_GROUP_CAUSE, TRACE_GROUP_KIND, TRACE_GROUP_LAYER };

/* A value per steady step (or one, of all, where a trace has no steps). */
struct trace_series {
	char name[64];
	enum trace_group group;
	double *value; /* [n of the list]: ns, or ns per token */
};
struct trace_series_list {
	struct trace_series *series; /* [0]: "step", the time of a step */
	int n_series, n;	     /* n: steps */
	double tokens;		     /* median per step, NaN: not known */
};
/*
 * Step time; idle time of all workers by cause ("idle.dependency"); time in tasks by kind and by
 * layer
 * ("layer.3"). per_token divides each step by its tokens. 0 or -1 without memory.
 */
int trace_series(const struct trace *t, bool per_token, struct trace_series_list *list);
void trace_series_free(struct trace_series_list *list);

#endif
