/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a trace says about a window of time (a step, or all): the definitions of
 * docs/trace-metrics.md, computed once and shared by summary, report, diff and whatif. Times are
 * nanoseconds, sums of times exact integers. Functions that return int: 0, or -1 where memory ran
 * out; what they fill is freed by the function of the same name with _free.
 *
 * Tasks that lie partly in a window count with the part inside.
 */
#ifndef MOE_TOOLS_TRACE_METRICS_H
#define MOE_TOOLS_TRACE_METRICS_H

#include "tools/trace/json.h"
#include "tools/trace/trace.h"

/* ---- windows ---- */

struct trace_window {
	const struct trace *trace;
	int64_t begin, end;
	uint32_t *task; /* tasks that overlap it, ascending start */
	uint32_t n;
	int32_t first_step, last_step; /* that it stands for; 0, 0: none */
	int64_t tokens, trained;       /* of those steps; MOE_MXT_NA: not known */
};

int trace_window(const struct trace *t, int64_t begin, int64_t end, struct trace_window *w);
/*
 * Time of step number i of trace.step: from the end of the steps before, or its own beginning where
 * that is later, to its end. Steps overlap (two are in flight); these windows do not, so their
 * lengths are what throughput is made of.
 */
void trace_step_time(const struct trace *t, int i, int64_t *begin, int64_t *end);
/* Steps i to j (indices) as one window, gaps between them included. */
int trace_window_steps(const struct trace *t, int i, int j, struct trace_window *w);
/* First steady step: without the first, where there are more than two. -1: no steps. */
int trace_steady(const struct trace *t);
/* All steady steps, or the whole trace where it has none. */
int trace_window_steady(const struct trace *t, struct trace_window *w);
/* Steps first..last (numbers; 0, 0: as trace_window_steady). 0 or -1 and a text. */
int trace_choose(const struct trace *t, int first, int last, struct trace_window *w, char *error,
		 size_t size);
void trace_window_free(struct trace_window *w);
/* Of a task, ns. */
int64_t trace_inside(const struct trace_window *w, uint32_t task);

/* ---- sets of times: disjoint, ascending, not empty ---- */

struct trace_set {
	int64_t *begin, *end; /* [n] */
	int64_t *sum;	      /* [n + 1] length of the intervals before; by trace_set_close() */
	uint32_t n, cap;
};

int trace_set_add(struct trace_set *s, int64_t begin, int64_t end); /* any order, may overlap */
int trace_set_close(struct trace_set *s);			    /* sorts and merges */
int64_t trace_set_length(const struct trace_set *s);
int64_t trace_set_within(const struct trace_set *s, int64_t begin, int64_t end);
int64_t trace_set_common(const struct trace_set *a,
			 const struct trace_set *b); /* of the intersection */
/* Closed sets in, a closed set out. */
int trace_set_subtract(const struct trace_set *a, const struct trace_set *b, struct trace_set *out);
void trace_set_free(struct trace_set *s);
/* Of doubles, for qsort (statistics.c). */
int trace_by_value(const void *a, const void *b);

/* ---- bounds ---- */

struct trace_bounds {
	double makespan;
	double area;	      /* work / workers; the worst set of parts where placement is strict */
	double critical_path; /* longest path of durations */
	double bandwidth;     /* bytes / rate of the busiest node; NaN: no bytes or no rate */
	bool guessed_rate;    /* bandwidth comes from guessed rates and is not in lower */
	int area_parts;	      /* how many parts bind the area, 0: all work on all workers */
	int bandwidth_node;
	double lower;	   /* the largest of them */
	double efficiency; /* lower / makespan */
};
int trace_bounds(const struct trace_window *w, struct trace_bounds *b);

/* Longest path of durations. */
struct trace_path {
	uint32_t *task; /* first to last */
	uint32_t n;
	int64_t length;	   /* ns, its durations */
	int64_t *by_kind;  /* [n_kinds] share of length */
	int64_t *by_layer; /* [n_layers + 1], the last one: of no layer */
	int64_t *slack; /* beside window.task: how much longer the task could take before it makes
			   the path longer; NULL unless wanted */
};
int trace_critical_path(const struct trace_window *w, bool slack, struct trace_path *p);
void trace_path_free(struct trace_path *p);

/* What the last task waited for, and that, and so on. */
enum trace_link {
	TRACE_LINK_FIRST,      /* the path's first task */
	TRACE_LINK_DEPENDENCY, /* a predecessor ended last */
	TRACE_LINK_WORKER,     /* the task before it on its worker did */
	TRACE_LINK_SUBMISSION, /* it was submitted after both: the path continues at the later one
				*/
	TRACE_LINKS
};
extern const char *const trace_link_name[TRACE_LINKS];
struct trace_realised {
	uint32_t *task; /* first to last */
	uint8_t *link;	/* why it could not begin before */
	uint32_t n;
	int64_t busy, gaps; /* ns of the window in its tasks; between them, and before the first
			       where that waited for a task that ended before the window */
	int64_t gap_after[TRACE_LINKS]; /* gaps by the link of the task after the gap */
	uint32_t links[TRACE_LINKS];
	int64_t *by_kind, *by_layer; /* as in trace_path */
};
int trace_realised(const struct trace_window *w, struct trace_realised *r);
void trace_realised_free(struct trace_realised *r);

/* ---- idle time ---- */

enum trace_cause {
	TRACE_SUBMISSION, /* no task was ready, and some task was not submitted yet */
	TRACE_DEPENDENCY, /* no task was ready, all were submitted */
	TRACE_PLACEMENT,  /* tasks were ready, none of them on this worker */
	TRACE_DATA,	  /* acquiring data */
	TRACE_RUNTIME,	  /* pop, push, callbacks */
	TRACE_CAUSES
};
extern const char *const trace_cause_name[TRACE_CAUSES];

/* Prepared once for a trace; then any interval is cheap. */
struct trace_idle;
struct trace_idle *trace_idle_new(const struct trace *t); /* NULL: no memory */
void trace_idle_free(struct trace_idle *x);
/* Idle time of a worker (-1: all together) within an interval, by cause; the sum is all of it. */
void trace_idle_within(const struct trace_idle *x, int worker, int64_t begin, int64_t end,
		       int64_t cause[TRACE_CAUSES]);
/* Time in tasks, likewise. */
int64_t trace_busy_within(const struct trace_idle *x, int worker, int64_t begin, int64_t end);

/* ---- where the time goes ---- */

struct trace_kind_time {
	int64_t time, cpu;    /* sums over tasks; cpu MOE_MXT_NA: not known */
	int64_t flops, bytes; /* MOE_MXT_NA: no task of it has a model */
	int64_t median, p95;  /* of a task's whole duration */
	uint32_t n;
};
struct trace_times {
	struct trace_kind_time *kind; /* [n_kinds] */
	struct trace_kind_time *cell; /* [n_kinds * (n_layers + 1)]: kind * (n_layers + 1) + layer,
					 the last layer: none; median and p95 are not set */
	int64_t (*layer)[MOE_MXT_PHASES]; /* [n_layers + 1] time by phase */
	struct trace_kind_time all;
};
int trace_times(const struct trace_window *w, struct trace_times *t);
void trace_times_free(struct trace_times *t);

/* time[a * n_kinds + b]: while a task of kind a and one of kind b run; [a, a]: while one of a runs.
 */
int trace_overlap(const struct trace_window *w, int64_t **time); /* free() it */

/* A kind's time that nothing hides. */
struct trace_exposure {
	int64_t time;	 /* while one of its tasks runs */
	int64_t blocked; /* of it: no task of another kind runs or could */
	int64_t on_path; /* of it: on the realised critical path */
	int64_t exposed; /* blocked or on the path: the cheap version */
};
/* Kinds whose name is one of "a|b|c". */
int trace_exposed(const struct trace_window *w, const struct trace_realised *r, const char *kinds,
		  struct trace_exposure *x);

/* ---- experts ---- */

enum trace_direction { TRACE_FORWARD, TRACE_BACKWARD, TRACE_DIRECTIONS };

/* Of one (step, layer, direction). */
struct trace_imbalance {
	int32_t step, layer, direction;
	int32_t experts, dead; /* dead: without a token; experts 0: no routing recorded */
	int32_t groups;
	double tokens_ratio,
		tokens_cv;	    /* max / mean, standard deviation / mean, over experts; NaN */
	double time_ratio, time_cv; /* over expert groups */
	int32_t top[3];		    /* experts with most tokens, -1: none */
	int64_t top_tokens[3];
};
struct trace_spread {
	double median, p95; /* nearest rank; NaN: no values */
};
struct trace_experts {
	struct trace_imbalance *row; /* by step, layer, direction */
	uint32_t n;
	struct trace_spread tokens_ratio[TRACE_DIRECTIONS], time_ratio[TRACE_DIRECTIONS],
		dead[TRACE_DIRECTIONS];
	uint32_t worst; /* row with the highest time ratio; n: none */
};
/* Whole layers of the window's steps, also where parts of them ran before it. */
int trace_experts(const struct trace_window *w, struct trace_experts *x);
void trace_experts_free(struct trace_experts *x);
/* Whether a task is an expert group's work; direction by phase. */
bool trace_is_expert(const struct trace *t, uint32_t task);

/* ---- outliers ---- */

struct trace_outlier {
	uint32_t task;
	int64_t expected; /* ns: median of its kind and size */
	bool preempted;	  /* its worker had the core for less than 4/5 of it */
};
struct trace_outliers {
	struct trace_outlier *list; /* most excess first */
	uint32_t n, preempted;
	int64_t excess; /* ns over expected, all together */
};
int trace_outliers(const struct trace_window *w, struct trace_outliers *o);
void trace_outliers_free(struct trace_outliers *o);

/* ---- NUMA ---- */

struct trace_numa {
	bool known;
	int64_t local, remote, unplaced; /* bytes */
	int64_t (*kind)[2];		 /* [n_kinds] local, remote */
	int64_t (*layer)[2];		 /* [n_layers + 1] */
	int64_t *matrix; /* [n_nodes * (n_nodes + 1)]: node of the worker, node of the bytes (the
			    last column: another one, not known which) */
};
int trace_numa(const struct trace_window *w, struct trace_numa *x);
void trace_numa_free(struct trace_numa *x);

/* ---- steps ---- */

struct trace_interval {
	double median, low, high; /* 95 %: bootstrap over steps; NaN: unknown, fewer than 3 */
	int n;
};
/* Median and bootstrap interval of values, NaNs left out; the same values give the same interval.
 */
struct trace_interval trace_bootstrap(const double *value, int n);

struct trace_rate {
	int32_t step;
	int64_t time;			      /* ns, trace_step_time() */
	double tokens, trained, gflops, gbps; /* per second; NaN: not known */
};
struct trace_rates {
	struct trace_rate *step; /* steady ones */
	int n;
	struct trace_interval seconds, tokens, trained, gflops, gbps;
};
int trace_rates(const struct trace *t, struct trace_rates *r);
void trace_rates_free(struct trace_rates *r);

/* ---- curves ---- */

enum trace_curve {
	TRACE_CURVE_READY,     /* ready, no worker has it yet */
	TRACE_CURVE_SUBMITTED, /* submitted, not ended */
	TRACE_CURVE_RUNNING,
	TRACE_CURVES
};
/* Tasks in that state, mean and highest in each of `bins` equal parts of the interval. */
int trace_curve(const struct trace *t, enum trace_curve what, int64_t begin, int64_t end, int bins,
		float *mean, int32_t *highest);

/* ---- replays (tools/trace/replay.h) ---- */

/* Makespans of a window's replays, ns; MOE_MXT_NA: not run, or nothing to leave out. */
struct replay_gains {
	int64_t recorded, base, without_repack, without_update, equal_experts;
};

/* ---- the summary: a metric is a file of tools/trace/metrics/ ---- */

/* What metrics share; summary, report and diff make one. */
struct trace_view {
	const struct trace *trace;
	struct trace_window window;
	struct trace_idle *idle;
	struct trace_realised realised;
	struct replay_gains gains; /* strict versions; MOE_MXT_NA until trace_view_replay() */
};
/* Of steps first..last (numbers; 0, 0: the steady ones, or all). 0 or -1 and a text. */
int trace_view_open(const struct trace *t, int first, int last, struct trace_view *v, char *error,
		    size_t size);
/* Replays for the strict versions of exposure and imbalance: most of the summary's time. */
int trace_view_replay(struct trace_view *v);
void trace_view_close(struct trace_view *v);

/* A section of the summary. */
struct trace_metric {
	const char *name;
	int order; /* in the text */
	/* Both: 0, or -1 without memory. json: members of an object that is open. */
	int (*text)(const struct trace_view *v, FILE *out);
	int (*json)(const struct trace_view *v, struct trace_json *out);
};
extern const struct trace_metric *const trace_metric_list[]; /* generated */

/* All sections as one JSON object, and as text. */
int trace_summary_json(const struct trace_view *v, struct trace_json *out);
int trace_summary_text(const struct trace_view *v, FILE *out);
/* A line that says what is missing; nothing for a whole trace. */
void trace_note_not_whole(const struct trace *t, FILE *out);

#endif
