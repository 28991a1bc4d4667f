/* SPDX-License-Identifier: Apache-2.0 */
/* A window of the trace as JSON: all that the page says about it. Times are ns. */
#include "tools/trace/report/report.h"

#include <stdlib.h>
#include <string.h>

#define BINS 480 /* of the strips above the time line */
#define MOST_OUTLIERS 20
#define MOST_IMBALANCES 12

static void integers(struct trace_json *j, const char *name, const int64_t *v, size_t n)
{
	trace_json_array(j, name);
	for (size_t i = 0; i < n; i++)
		trace_json_integer(j, NULL, v[i]);
	trace_json_end(j, ']');
}

/* ---- bounds, paths ---- */

static int put_bounds(const struct trace_view *v, struct trace_json *j)
{
	struct trace_bounds b;

	if (trace_bounds(&v->window, &b))
		return -1;
	trace_json_object(j, "bounds");
	trace_json_number(j, "makespan", b.makespan);
	trace_json_number(j, "area", b.area);
	trace_json_number(j, "critical_path", b.critical_path);
	trace_json_number(j, "bandwidth", b.bandwidth);
	trace_json_bool(j, "guessed_rate", b.guessed_rate);
	trace_json_integer(j, "area_parts", b.area_parts);
	trace_json_integer(j, "bandwidth_node", b.bandwidth_node);
	trace_json_number(j, "lower", b.lower);
	trace_json_number(j, "efficiency", b.efficiency);
	trace_json_end(j, '}');
	return 0;
}

static int put_paths(const struct trace_view *v, struct trace_json *j)
{
	const struct trace_realised *r = &v->realised;
	size_t layers = (size_t)v->trace->n_layers + 1, kinds = (size_t)v->trace->n_kinds;
	struct trace_path p;

	if (trace_critical_path(&v->window, false, &p))
		return -1;
	trace_json_object(j, "path");
	trace_json_integer(j, "tasks", p.n);
	trace_json_integer(j, "length", p.length);
	integers(j, "by_kind", p.by_kind, kinds);
	integers(j, "by_layer", p.by_layer, layers);
	trace_json_end(j, '}');
	trace_path_free(&p);
	trace_json_object(j, "realised");
	trace_json_integer(j, "busy", r->busy);
	trace_json_integer(j, "gaps", r->gaps);
	trace_json_array(j, "links");
	for (int i = 0; i < TRACE_LINKS; i++)
		trace_json_integer(j, NULL, r->links[i]);
	trace_json_end(j, ']');
	integers(j, "gap_after", r->gap_after, TRACE_LINKS);
	integers(j, "by_kind", r->by_kind, kinds);
	integers(j, "by_layer", r->by_layer, layers);
	trace_json_array(j, "task");
	for (uint32_t i = 0; i < r->n; i++)
		trace_json_integer(j, NULL, r->task[i]);
	trace_json_end(j, ']');
	trace_json_array(j, "link");
	for (uint32_t i = 0; i < r->n; i++)
		trace_json_integer(j, NULL, r->link[i]);
	trace_json_end(j, ']');
	trace_json_end(j, '}');
	return 0;
}

/* ---- idle time and curves ---- */

static void put_idle(const struct trace_view *v, struct trace_json *j)
{
	const struct trace_window *w = &v->window;
	int64_t cause[TRACE_CAUSES];

	trace_json_integer(j, "busy", trace_busy_within(v->idle, -1, w->begin, w->end));
	trace_idle_within(v->idle, -1, w->begin, w->end, cause);
	integers(j, "idle", cause, TRACE_CAUSES);
	trace_json_array(j, "by_worker");
	for (int i = 0; i < v->trace->n_workers; i++) {
		trace_json_object(j, NULL);
		trace_json_integer(j, "busy", trace_busy_within(v->idle, i, w->begin, w->end));
		trace_idle_within(v->idle, i, w->begin, w->end, cause);
		integers(j, "idle", cause, TRACE_CAUSES);
		trace_json_end(j, '}');
	}
	trace_json_end(j, ']');
}

static int put_strip(const struct trace_view *v, struct trace_json *j)
{
	int64_t begin = v->window.begin, end = v->window.end, span = end - begin;
	int64_t idle[BINS][TRACE_CAUSES];
	float mean[BINS];
	int32_t highest[BINS];

	for (int i = 0; i < BINS; i++)
		trace_idle_within(v->idle, -1, begin + (int64_t)((double)span / BINS * i),
				  begin + (int64_t)((double)span / BINS * (i + 1)), idle[i]);
	if (trace_curve(v->trace, TRACE_CURVE_READY, begin, end, BINS, mean, highest))
		return -1;
	trace_json_object(j, "strip");
	trace_json_integer(j, "bins", BINS);
	trace_json_array(j, "idle");
	for (int c = 0; c < TRACE_CAUSES; c++) {
		trace_json_array(j, NULL);
		for (int i = 0; i < BINS; i++)
			trace_json_integer(j, NULL, idle[i][c]);
		trace_json_end(j, ']');
	}
	trace_json_end(j, ']');
	trace_json_array(j, "ready");
	for (int i = 0; i < BINS; i++)
		trace_json_number(j, NULL, (int64_t)((double)mean[i] * 100 + .5) / 100.0);
	trace_json_end(j, ']');
	trace_json_array(j, "ready_highest");
	for (int i = 0; i < BINS; i++)
		trace_json_integer(j, NULL, highest[i]);
	trace_json_end(j, ']');
	trace_json_end(j, '}');
	return 0;
}

/* ---- times ---- */

static void put_kind(struct trace_json *j, const struct trace_kind_time *k)
{
	trace_json_integer(j, "n", k->n);
	trace_json_integer(j, "time", k->time);
	trace_json_integer(j, "cpu", k->cpu);
	trace_json_integer(j, "flops", k->flops);
	trace_json_integer(j, "bytes", k->bytes);
	trace_json_integer(j, "median", k->median);
	trace_json_integer(j, "p95", k->p95);
}

static int put_times(const struct trace_view *v, struct trace_json *j)
{
	const struct trace *t = v->trace;
	struct trace_times x;

	if (trace_times(&v->window, &x))
		return -1;
	trace_json_array(j, "kinds");
	for (int k = 0; k < t->n_kinds; k++) {
		if (!x.kind[k].n)
			continue;
		trace_json_object(j, NULL);
		trace_json_integer(j, "kind", k);
		put_kind(j, x.kind + k);
		trace_json_end(j, '}');
	}
	trace_json_end(j, ']');
	trace_json_object(j, "all");
	put_kind(j, &x.all);
	trace_json_end(j, '}');
	trace_json_array(j, "layers");
	for (int l = 0; l <= t->n_layers; l++)
		integers(j, NULL, x.layer[l], MOE_MXT_PHASES);
	trace_json_end(j, ']');
	trace_times_free(&x);
	return 0;
}

static int put_exposure(const struct trace_view *v, const char *name, const char *kinds,
			int64_t gain, struct trace_json *j)
{
	struct trace_exposure x;

	if (trace_exposed(&v->window, &v->realised, kinds, &x))
		return -1;
	trace_json_object(j, name);
	trace_json_integer(j, "time", x.time);
	trace_json_integer(j, "blocked", x.blocked);
	trace_json_integer(j, "on_path", x.on_path);
	trace_json_integer(j, "exposed", x.exposed);
	trace_json_integer(j, "gain", gain);
	trace_json_end(j, '}');
	return 0;
}

static int64_t less(int64_t base, int64_t changed)
{
	return base == MOE_MXT_NA || changed == MOE_MXT_NA ? MOE_MXT_NA : base - changed;
}

static int put_gains(const struct trace_view *v, struct trace_json *j)
{
	struct replay_gains g = v->gains;

	trace_json_object(j, "replay");
	trace_json_integer(j, "recorded", g.recorded);
	trace_json_integer(j, "base", g.base);
	trace_json_integer(j, "equal_experts", less(g.base, g.equal_experts));
	trace_json_end(j, '}');
	return put_exposure(v, "repack", "repack|repack_bwd", less(g.base, g.without_repack), j) ||
			       put_exposure(v, "update", "update", less(g.base, g.without_update),
					    j)
		       ? -1
		       : 0;
}

/* ---- experts ---- */

static void put_imbalance(const struct trace_imbalance *x, struct trace_json *j)
{
	trace_json_object(j, NULL);
	trace_json_integer(j, "step", x->step);
	trace_json_integer(j, "layer", x->layer);
	trace_json_integer(j, "direction", x->direction);
	trace_json_integer(j, "experts", x->experts);
	trace_json_integer(j, "dead", x->dead);
	trace_json_integer(j, "groups", x->groups);
	trace_json_number(j, "tokens_ratio", x->tokens_ratio);
	trace_json_number(j, "tokens_cv", x->tokens_cv);
	trace_json_number(j, "time_ratio", x->time_ratio);
	trace_json_number(j, "time_cv", x->time_cv);
	trace_json_array(j, "top");
	for (int i = 0; i < 3 && x->top[i] >= 0; i++) {
		trace_json_array(j, NULL);
		trace_json_integer(j, NULL, x->top[i]);
		trace_json_integer(j, NULL, x->top_tokens[i]);
		trace_json_end(j, ']');
	}
	trace_json_end(j, ']');
	trace_json_end(j, '}');
}

/* Rows with the highest time ratio, at most MOST_IMBALANCES: each pass finds the next lower one. */
static void put_worst(const struct trace_experts *x, struct trace_json *j)
{
	uint32_t taken[MOST_IMBALANCES];

	trace_json_array(j, "worst");
	for (int n = 0; n < MOST_IMBALANCES; n++) {
		uint32_t best = x->n;

		for (uint32_t i = 0; i < x->n; i++) {
			bool again = !(x->row[i].time_ratio > 0);

			for (int k = 0; k < n; k++)
				again |= taken[k] == i;
			if (!again &&
			    (best == x->n || x->row[i].time_ratio > x->row[best].time_ratio))
				best = i;
		}
		if (best == x->n)
			break;
		taken[n] = best;
		put_imbalance(x->row + best, j);
	}
	trace_json_end(j, ']');
}

/*
 * sums[layer][column], only layers that have any; columns: experts, or groups. ratio: the highest
 * over the mean of a layer, of the sums over the window.
 */
static void put_heat(struct trace_json *j, const char *name, const int64_t *sum, int layers,
		     int columns)
{
	trace_json_object(j, name);
	trace_json_integer(j, "columns", columns);
	trace_json_array(j, "rows");
	for (int l = 0; l < layers; l++) {
		const int64_t *row = sum + (size_t)l * (size_t)columns;
		int64_t all = 0;
		int top = 0;

		for (int c = 0; c < columns; c++) {
			all += row[c];
			top = row[c] > row[top] ? c : top;
		}
		if (all <= 0)
			continue;
		trace_json_object(j, NULL);
		trace_json_integer(j, "layer", l);
		trace_json_integer(j, "top", top);
		trace_json_number(j, "ratio", (double)row[top] * columns / (double)all);
		integers(j, "v", row, (size_t)columns);
		trace_json_end(j, '}');
	}
	trace_json_end(j, ']');
	trace_json_end(j, '}');
}

#define MOST_COLUMNS 4096

static int put_tokens(const struct trace_view *v, struct trace_json *j)
{
	const struct trace *t = v->trace;
	const struct trace_window *w = &v->window;
	int columns = 1;
	int64_t *sum;

	for (uint32_t i = 0; i < t->n_routing; i++)
		if (t->routing[i].experts > columns)
			columns = t->routing[i].experts;
	columns = columns < MOST_COLUMNS ? columns : MOST_COLUMNS;
	sum = calloc((size_t)t->n_layers * (size_t)columns + 1, sizeof *sum);
	if (!sum)
		return -1;
	for (uint32_t i = 0; i < t->n_routing; i++) {
		const struct trace_routing *r = t->routing + i;

		bool inside = w->first_step ? r->step >= w->first_step && r->step <= w->last_step
					    : r->time >= w->begin && r->time < w->end;

		if (!inside || r->layer < 0 || r->layer >= t->n_layers)
			continue;
		for (int e = 0; e < r->experts && e < columns; e++)
			sum[(size_t)r->layer * (size_t)columns + (size_t)e] +=
				t->load[r->first_load + (uint32_t)e];
	}
	put_heat(j, "tokens", sum, t->n_layers, columns);
	free(sum);
	return 0;
}

static int put_group_times(const struct trace_view *v, struct trace_json *j)
{
	const struct trace *t = v->trace;
	const struct trace_window *w = &v->window;
	int columns = 1;
	int64_t *sum;

	for (uint32_t i = 0; i < w->n; i++)
		if (trace_is_expert(t, w->task[i]) && t->task[w->task[i]].group >= columns)
			columns = t->task[w->task[i]].group + 1;
	columns = columns < MOST_COLUMNS ? columns : MOST_COLUMNS;
	sum = calloc((size_t)t->n_layers * (size_t)columns + 1, sizeof *sum);
	if (!sum)
		return -1;
	for (uint32_t i = 0; i < w->n; i++) {
		const struct trace_task *k = t->task + w->task[i];

		if (k->layer >= 0 && k->group >= 0 && k->group < columns &&
		    trace_is_expert(t, w->task[i]))
			sum[(size_t)k->layer * (size_t)columns + (size_t)k->group] +=
				trace_inside(w, w->task[i]);
	}
	put_heat(j, "group_times", sum, t->n_layers, columns);
	free(sum);
	return 0;
}

static int put_experts(const struct trace_view *v, struct trace_json *j)
{
	static const char *const direction[TRACE_DIRECTIONS] = { "forward", "backward" };
	struct trace_experts x;
	int rc;

	if (trace_experts(&v->window, &x))
		return -1;
	trace_json_object(j, "experts");
	for (int d = 0; d < TRACE_DIRECTIONS; d++) {
		trace_json_object(j, direction[d]);
		trace_json_number(j, "tokens_ratio", x.tokens_ratio[d].median);
		trace_json_number(j, "tokens_ratio_p95", x.tokens_ratio[d].p95);
		trace_json_number(j, "time_ratio", x.time_ratio[d].median);
		trace_json_number(j, "time_ratio_p95", x.time_ratio[d].p95);
		trace_json_number(j, "dead", x.dead[d].median);
		trace_json_end(j, '}');
	}
	put_worst(&x, j);
	rc = put_tokens(v, j) || put_group_times(v, j) ? -1 : 0;
	trace_json_end(j, '}');
	trace_experts_free(&x);
	return rc;
}

/* ---- the rest ---- */

static int put_outliers(const struct trace_view *v, struct trace_json *j)
{
	struct trace_outliers o;

	if (trace_outliers(&v->window, &o))
		return -1;
	trace_json_object(j, "outliers");
	trace_json_integer(j, "n", o.n);
	trace_json_integer(j, "preempted", o.preempted);
	trace_json_integer(j, "excess", o.excess);
	trace_json_array(j, "list");
	for (uint32_t i = 0; i < o.n && i < MOST_OUTLIERS; i++) {
		trace_json_object(j, NULL);
		trace_json_integer(j, "task", o.list[i].task);
		trace_json_integer(j, "expected", o.list[i].expected);
		trace_json_bool(j, "preempted", o.list[i].preempted);
		trace_json_end(j, '}');
	}
	trace_json_end(j, ']');
	trace_json_end(j, '}');
	trace_outliers_free(&o);
	return 0;
}

static int put_numa(const struct trace_view *v, struct trace_json *j)
{
	struct trace_numa x;
	int nodes = v->trace->n_nodes;

	if (trace_numa(&v->window, &x))
		return -1;
	trace_json_object(j, "numa");
	trace_json_bool(j, "known", x.known);
	if (x.known) {
		trace_json_integer(j, "local", x.local);
		trace_json_integer(j, "remote", x.remote);
		trace_json_integer(j, "unplaced", x.unplaced);
		trace_json_array(j, "matrix");
		for (int i = 0; i < nodes; i++)
			integers(j, NULL, x.matrix + (size_t)i * ((size_t)nodes + 1),
				 (size_t)nodes + 1);
		trace_json_end(j, ']');
	}
	trace_json_end(j, '}');
	trace_numa_free(&x);
	return 0;
}

int report_view(const struct trace_view *v, const char *name, struct trace_json *j)
{
	const struct trace_window *w = &v->window;
	int rc;

	trace_json_object(j, NULL);
	trace_json_text(j, "name", name);
	trace_json_integer(j, "begin", w->begin);
	trace_json_integer(j, "end", w->end);
	trace_json_integer(j, "tasks", w->n);
	trace_json_integer(j, "first_step", w->first_step);
	trace_json_integer(j, "last_step", w->last_step);
	trace_json_integer(j, "tokens", w->tokens);
	put_idle(v, j);
	rc = put_bounds(v, j) || put_paths(v, j) || put_strip(v, j) || put_times(v, j) ||
			     put_gains(v, j) || put_experts(v, j) || put_outliers(v, j) ||
			     put_numa(v, j)
		     ? -1
		     : 0;
	trace_json_end(j, '}');
	return rc;
}
