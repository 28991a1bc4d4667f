/* SPDX-License-Identifier: Apache-2.0 */
/* How unevenly tokens and time lie on experts, and what that costs. */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROWS_WRITTEN 10000

/* Kinds that work for one expert group. Not lora_grad: a task of it may serve several. */
static const char *const expert_kinds[] = { "gather",	"gate_up",     "down",	      "scatter",
					    "down_bwd", "gate_up_bwd", "weight_grad", NULL };

bool trace_is_expert(const struct trace *t, uint32_t task)
{
	const struct trace_task *k = &t->task[task];
	const char *name = t->kind[k->kind];

	if (k->group < 0 || k->layer < 0)
		return false;
	for (int i = 0; expert_kinds[i]; i++)
		if (!strcmp(name, expert_kinds[i]))
			return true;
	return false;
}

static bool *expert_flags(const struct trace *t)
{
	bool *flag = calloc((size_t)t->n_kinds + 1, sizeof *flag);

	for (int k = 0; flag && k < t->n_kinds; k++)
		for (int i = 0; expert_kinds[i]; i++)
			flag[k] = flag[k] || !strcmp(t->kind[k], expert_kinds[i]);
	return flag;
}

/* ---- spread of a list ---- */

static void spread(const double *v, uint32_t n, double *ratio, double *cv)
{
	double sum = 0, squares = 0, most = 0, mean;

	for (uint32_t i = 0; i < n; i++) {
		sum += v[i];
		most = v[i] > most ? v[i] : most;
	}
	mean = n ? sum / n : 0;
	for (uint32_t i = 0; i < n; i++)
		squares += (v[i] - mean) * (v[i] - mean);
	*ratio = mean > 0 ? most / mean : NAN;
	*cv = mean > 0 ? sqrt(squares / n) / mean : NAN;
}

/* ---- time: one row per (step, layer, direction) ---- */

struct work {
	const struct trace_window *w;
	struct trace_key *key; /* [n] expert tasks by (step, layer, direction, group) */
	uint32_t n;
	struct trace_experts *out;
	double *group; /* scratch */
	size_t group_cap;
	double *load; /* scratch of routing */
	size_t load_cap;
};

static int direction_of(const struct trace_task *k)
{
	return k->phase == MOE_MXT_PHASE_BACKWARD ? TRACE_BACKWARD : TRACE_FORWARD;
}

/* Tasks of the window's steps, whenever they ran: parts of a layer would say nothing. */
static const uint32_t *tasks_of(const struct trace_window *w, uint32_t *n)
{
	const struct trace *t = w->trace;
	uint32_t first = 0, end = 0;

	*n = w->n;
	if (!w->first_step)
		return w->task;
	for (int i = 0; i < t->n_steps; i++) {
		if (t->step[i].step == w->first_step)
			first = t->step[i].first;
		if (t->step[i].step == w->last_step)
			end = t->step[i].first + t->step[i].n;
	}
	*n = end - first;
	return t->by_step + first;
}

static int sort_work(struct work *x)
{
	const struct trace_task *task = x->w->trace->task;
	bool *expert = expert_flags(x->w->trace);
	uint32_t n;
	const uint32_t *list = tasks_of(x->w, &n);

	x->key = malloc(((size_t)n + 1) * sizeof *x->key);
	if (!expert || !x->key) {
		free(expert);
		return -1;
	}
	for (uint32_t i = 0; i < n; i++) {
		const struct trace_task *k = &task[list[i]];

		if (expert[k->kind] && k->group >= 0 && k->layer >= 0)
			x->key[x->n++] = (struct trace_key){ k->group, list[i] };
	}
	free(expert);
	if (!trace_sort(x->key, x->n))
		return -1;
	for (uint32_t i = 0; i < x->n; i++) {
		const struct trace_task *k = &task[x->key[i].value];

		x->key[i].key = (int64_t)k->step << 18 | (int64_t)k->layer << 1 | direction_of(k);
	}
	return trace_sort(x->key, x->n) ? 0 : -1;
}

static double *room(double **a, size_t *cap, size_t n)
{
	double *grown = *a;

	if (n > *cap) {
		grown = realloc(*a, 2 * n * sizeof *grown);
		if (!grown)
			return NULL;
		*a = grown;
		*cap = 2 * n;
	}
	memset(grown, 0, n * sizeof *grown);
	return grown;
}

/* Groups [from, to) of keys are one row: time of each group. */
static int add_row(struct work *x, uint32_t from, uint32_t to)
{
	const struct trace *t = x->w->trace;
	const struct trace_task *last = &t->task[x->key[to - 1].value];
	struct trace_imbalance *row = &x->out->row[x->out->n++];
	uint32_t groups = 0;
	double *group;

	*row = (struct trace_imbalance){ .step = last->step,
					 .layer = last->layer,
					 .direction = direction_of(last),
					 .tokens_ratio = NAN,
					 .tokens_cv = NAN,
					 .top = { -1, -1, -1 } };
	group = room(&x->group, &x->group_cap, to - from);
	if (!group)
		return -1;
	for (uint32_t i = from; i < to; i++) {
		const struct trace_task *k = &t->task[x->key[i].value];

		if (i == from || k->group != t->task[x->key[i - 1].value].group)
			groups++;
		group[groups - 1] += (double)trace_duration(t, x->key[i].value);
	}
	row->groups = (int32_t)groups;
	spread(group, groups, &row->time_ratio, &row->time_cv);
	return 0;
}

static int add_rows(struct work *x)
{
	uint32_t rows = 0;

	for (uint32_t i = 0; i < x->n; i++)
		rows += i == 0 || x->key[i].key != x->key[i - 1].key;
	x->out->row = malloc(((size_t)rows + 1) * sizeof *x->out->row);
	if (!x->out->row)
		return -1;
	for (uint32_t i = 0, k; i < x->n; i = k) {
		for (k = i; k < x->n && x->key[k].key == x->key[i].key; k++)
			;
		if (add_row(x, i, k))
			return -1;
	}
	return 0;
}

/* ---- tokens, from the routing ---- */

static void top_three(struct trace_imbalance *row, const double *load, int32_t n)
{
	for (int32_t e = 0; e < n; e++) {
		int i = 3;

		if (load[e] <= 0)
			continue;
		for (; i && (row->top[i - 1] < 0 || (double)row->top_tokens[i - 1] < load[e]); i--)
			if (i < 3) {
				row->top[i] = row->top[i - 1];
				row->top_tokens[i] = row->top_tokens[i - 1];
			}
		if (i < 3) {
			row->top[i] = e;
			row->top_tokens[i] = (int64_t)load[e];
		}
	}
}

/* Routings [from, to) of one (step, layer), all micro-batches: into the rows of that layer. */
static int add_tokens(struct work *x, const struct trace_key *order, uint32_t from, uint32_t to,
		      uint32_t *at)
{
	const struct trace *t = x->w->trace;
	int32_t experts = 0;
	double *load;

	while (*at < x->out->n &&
	       ((int64_t)x->out->row[*at].step << 17 | x->out->row[*at].layer) < order[from].key)
		++*at;
	for (uint32_t i = from; i < to; i++)
		if (t->routing[order[i].value].experts > experts)
			experts = t->routing[order[i].value].experts;
	load = room(&x->load, &x->load_cap, (size_t)experts + 1);
	if (!load)
		return -1;
	for (uint32_t i = from; i < to; i++) {
		const struct trace_routing *r = &t->routing[order[i].value];

		for (int32_t e = 0; e < r->experts; e++)
			load[e] += (double)t->load[r->first_load + (uint32_t)e];
	}
	for (uint32_t i = *at; i < x->out->n && ((int64_t)x->out->row[i].step << 17 |
						 x->out->row[i].layer) == order[from].key;
	     i++) {
		struct trace_imbalance *row = &x->out->row[i];

		row->experts = experts;
		for (int32_t e = 0; e < experts; e++)
			row->dead += load[e] <= 0;
		spread(load, (uint32_t)experts, &row->tokens_ratio, &row->tokens_cv);
		top_three(row, load, experts);
	}
	return 0;
}

static int add_routings(struct work *x)
{
	const struct trace *t = x->w->trace;
	struct trace_key *order = malloc(((size_t)t->n_routing + 1) * sizeof *order);
	uint32_t n = 0, at = 0;
	int rc;

	for (uint32_t i = 0; order && i < t->n_routing; i++)
		if (t->routing[i].layer >= 0)
			order[n++] = (struct trace_key){
				(int64_t)t->routing[i].step << 17 | t->routing[i].layer, i
			};
	rc = !order || !trace_sort(order, n);
	for (uint32_t i = 0, k; !rc && i < n; i = k) {
		for (k = i; k < n && order[k].key == order[i].key; k++)
			;
		rc = add_tokens(x, order, i, k, &at);
	}
	free(order);
	return rc ? -1 : 0;
}

/* ---- over layers and steps ---- */

/* Nearest rank. */
static double percentile(const double *sorted, uint32_t n, unsigned percent)
{
	return n ? sorted[(percent * (uint64_t)n + 99) / 100 - 1] : NAN;
}

static int distribute(struct trace_experts *x)
{
	double *v = malloc(((size_t)x->n + 1) * sizeof *v);

	x->worst = x->n;
	for (uint32_t i = 0; i < x->n; i++)
		if (isfinite(x->row[i].time_ratio) &&
		    (x->worst == x->n || x->row[i].time_ratio > x->row[x->worst].time_ratio))
			x->worst = i;
	for (int what = 0; v && what < 3; what++)
		for (int d = 0; d < TRACE_DIRECTIONS; d++) {
			uint32_t n = 0;

			for (uint32_t i = 0; i < x->n; i++) {
				const struct trace_imbalance *r = &x->row[i];
				double value = what == 0    ? r->tokens_ratio
					       : what == 1  ? r->time_ratio
					       : r->experts ? r->dead
							    : NAN;

				if (r->direction == d && isfinite(value))
					v[n++] = value;
			}
			if (n)
				qsort(v, n, sizeof *v, trace_by_value);
			*(what == 0   ? &x->tokens_ratio[d]
			  : what == 1 ? &x->time_ratio[d]
				      : &x->dead[d]) =
				(struct trace_spread){ percentile(v, n, 50), percentile(v, n, 95) };
		}
	free(v);
	return v ? 0 : -1;
}

int trace_experts(const struct trace_window *w, struct trace_experts *x)
{
	struct work work = { .w = w, .out = x };
	int rc;

	memset(x, 0, sizeof *x);
	rc = sort_work(&work) || add_rows(&work) || add_routings(&work) || distribute(x);
	free(work.key), free(work.group), free(work.load);
	if (!rc)
		return 0;
	trace_experts_free(x);
	return -1;
}

void trace_experts_free(struct trace_experts *x)
{
	free(x->row);
	memset(x, 0, sizeof *x);
}

/* ---- the section ---- */

static const char *const direction_name[TRACE_DIRECTIONS] = { "forward", "backward" };

static void worst(const struct trace_experts *x, FILE *out)
{
	const struct trace_imbalance *r = &x->row[x->worst];

	if (x->worst == x->n)
		return;
	fprintf(out, "  worst: layer %d, step %d, %s: time %.2f, tokens %.2f", r->layer, r->step,
		direction_name[r->direction], r->time_ratio, r->tokens_ratio);
	for (int i = 0; i < 3 && r->top[i] >= 0; i++)
		fprintf(out, "%s expert %d (%lld)", i ? "," : "; most tokens:", r->top[i],
			(long long)r->top_tokens[i]);
	fprintf(out, "\n");
}

static int text(const struct trace_view *v, FILE *out)
{
	struct trace_experts x;
	char a[PRINT_BYTES], b[PRINT_BYTES];

	if (trace_experts(&v->window, &x))
		return -1;
	if (x.n)
		fprintf(out, "\nexperts: max / mean over (step, layer), median and p95\n");
	for (int d = 0; d < TRACE_DIRECTIONS; d++)
		if (isfinite(x.time_ratio[d].median))
			fprintf(out,
				"  %-9s tokens %.2f, %.2f; time of groups %.2f, %.2f; dead "
				"experts %.0f, %.0f\n",
				direction_name[d], x.tokens_ratio[d].median, x.tokens_ratio[d].p95,
				x.time_ratio[d].median, x.time_ratio[d].p95, x.dead[d].median,
				x.dead[d].p95);
	if (x.n)
		worst(&x, out);
	if (x.n && v->gains.equal_experts != MOE_MXT_NA && v->gains.base != MOE_MXT_NA)
		fprintf(out,
			"  with equal experts a replay is %s shorter (%s); replays are %+.1f %% "
			"off what "
			"was recorded\n",
			print_time((double)(v->gains.base - v->gains.equal_experts), a),
			print_share((double)(v->gains.base - v->gains.equal_experts),
				    (double)v->gains.base, b),
			100 * ((double)v->gains.base / (double)v->gains.recorded - 1));
	trace_experts_free(&x);
	return 0;
}

static void row_json(const struct trace_imbalance *r, struct trace_json *out)
{
	trace_json_object(out, NULL);
	trace_json_integer(out, "step", r->step);
	trace_json_integer(out, "layer", r->layer);
	trace_json_text(out, "direction", direction_name[r->direction]);
	trace_json_integer(out, "experts", r->experts);
	trace_json_integer(out, "dead", r->dead);
	trace_json_integer(out, "groups", r->groups);
	trace_json_number(out, "tokens_ratio", r->tokens_ratio);
	trace_json_number(out, "tokens_cv", r->tokens_cv);
	trace_json_number(out, "time_ratio", r->time_ratio);
	trace_json_number(out, "time_cv", r->time_cv);
	trace_json_array(out, "top");
	for (int i = 0; i < 3 && r->top[i] >= 0; i++) {
		trace_json_array(out, NULL);
		trace_json_integer(out, NULL, r->top[i]);
		trace_json_integer(out, NULL, r->top_tokens[i]);
		trace_json_end(out, ']');
	}
	trace_json_end(out, ']');
	trace_json_end(out, '}');
}

static void spread_json(const char *name, const struct trace_spread *s, struct trace_json *out)
{
	trace_json_array(out, name);
	trace_json_number(out, NULL, s->median);
	trace_json_number(out, NULL, s->p95);
	trace_json_end(out, ']');
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	const struct replay_gains *g = &v->gains;
	struct trace_experts x;

	if (trace_experts(&v->window, &x))
		return -1;
	trace_json_integer(out, "replay_ns", g->base);
	trace_json_integer(out, "recorded_ns", g->recorded);
	trace_json_integer(out, "equal_experts_ns", g->equal_experts);
	for (int d = 0; d < TRACE_DIRECTIONS; d++) {
		trace_json_object(out, direction_name[d]);
		spread_json("tokens_ratio", &x.tokens_ratio[d], out);
		spread_json("time_ratio", &x.time_ratio[d], out);
		spread_json("dead", &x.dead[d], out);
		trace_json_end(out, '}');
	}
	trace_json_array(out, "rows");
	for (uint32_t i = 0; i < x.n && i < ROWS_WRITTEN; i++)
		row_json(&x.row[i], out);
	trace_json_end(out, ']');
	trace_json_integer(out, "rows_left_out", x.n > ROWS_WRITTEN ? x.n - ROWS_WRITTEN : 0);
	trace_experts_free(&x);
	return 0;
}

const struct trace_metric trace_metric_imbalance = {
	.name = "experts", .order = 70, .text = text, .json = json
};
