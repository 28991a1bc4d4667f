/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/command.h"
#include "tools/trace/compare.h"
#include "tools/trace/print.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROWS_SHOWN 12

static int run(int argc, char **argv);

const struct trace_command trace_command_diff = {
	.name = "diff",
	.usage = "diff BEFORE AFTER",
	.summary = "what changed, per kind, layer and idle cause",
	.help = "  --max-regress P   exit status 1 where the gate's median grew by more than P\n"
		"                    (3% or .03) and its interval excludes 0\n"
		"  --gate NAME       what is gated: step (default), a kind, layer.N, idle.CAUSE\n"
		"  --all             all rows; else the largest changes\n"
		"  --json            numbers for programs\n"
		"Medians over steady steps; intervals: 95 % of bootstrap resamples of the steps.\n"
		"Where steps have different numbers of tokens, times are per 1000 tokens.\n",
	.run = run,
};

struct row {
	const char *name;
	enum trace_group group;
	struct trace_difference d;
};

struct rows {
	struct row *row;
	int n;
	bool per_token;
};

static const struct trace_series *find(const struct trace_series_list *l, const char *name)
{
	for (int i = 0; i < l->n_series; i++)
		if (!strcmp(l->series[i].name, name))
			return &l->series[i];
	return NULL;
}

static bool something(const struct trace_difference *d)
{
	return d->before > 0 || d->after > 0;
}

/* Every name of either; what one does not have took no time in it. */
static int make_rows(const struct trace_series_list *a, const struct trace_series_list *b,
		     struct rows *out)
{
	double *zero = calloc((size_t)(a->n > b->n ? a->n : b->n) + 1, sizeof *zero);

	out->n = 0;
	out->row = calloc((size_t)(a->n_series + b->n_series), sizeof *out->row);
	if (!zero || !out->row) {
		free(zero);
		return -1;
	}
	for (int i = 0; i < a->n_series + b->n_series; i++) {
		const struct trace_series *s =
			i < a->n_series ? &a->series[i] : &b->series[i - a->n_series];
		const struct trace_series *x = find(a, s->name), *y = find(b, s->name);
		struct row *row = &out->row[out->n];

		if (i >= a->n_series && x)
			continue;
		row->name = s->name;
		row->group = s->group;
		row->d = trace_difference(x ? x->value : zero, a->n, y ? y->value : zero, b->n);
		out->n += i == 0 || something(&row->d);
	}
	free(zero);
	return 0;
}

static double moved(const struct row *r)
{
	return fabs(r->d.after - r->d.before);
}

static int by_group(const void *a, const void *b)
{
	const struct row *p = a, *q = b;

	if (p->group != q->group)
		return p->group < q->group ? -1 : 1;
	return moved(p) > moved(q) ? -1 : moved(p) < moved(q);
}

/* ---- printing ---- */

static const char *percent(double v, char *buf)
{
	if (isfinite(v))
		snprintf(buf, PRINT_BYTES, "%+.1f %%", 100 * v);
	else
		snprintf(buf, PRINT_BYTES, "n/a");
	return buf;
}

static void print_row(const struct row *r, bool per_token)
{
	double scale = per_token ? 1000 : 1;
	char a[PRINT_BYTES], b[PRINT_BYTES], c[PRINT_BYTES], d[PRINT_BYTES], e[PRINT_BYTES];

	printf("  ");
	print_cell(stdout, r->name, 20);
	printf(" %11s %11s %10s", print_time(scale * r->d.before, a),
	       print_time(scale * r->d.after, b), percent(r->d.change, c));
	if (isfinite(r->d.low))
		printf("   [%s, %s]%s", percent(r->d.low, d), percent(r->d.high, e),
		       r->d.low > 0 || r->d.high < 0 ? " *" : "");
	putchar('\n');
}

static void print(const struct rows *rows, const char *const file[2], const int steps[2], bool all)
{
	static const char *const title[] = { "", "idle time of all workers, by cause",
					     "time in tasks, by kind", "time in tasks, by layer" };
	int shown = 0;

	printf("before: %s (%d steps)\nafter:  %s (%d steps)\n", file[0], steps[0], file[1],
	       steps[1]);
	printf("  %-20s %11s %11s %10s   %s\n", rows->per_token ? "per 1000 tokens" : "per step",
	       "before", "after", "change", "95 % interval; *: excludes 0");
	for (int i = 0; i < rows->n; i++) {
		bool first = i == 0 || rows->row[i].group != rows->row[i - 1].group;

		shown = first ? 0 : shown + 1;
		if (first && *title[rows->row[i].group])
			printf("%s\n", title[rows->row[i].group]);
		if (all || shown < ROWS_SHOWN)
			print_row(&rows->row[i], rows->per_token);
		else if (shown == ROWS_SHOWN)
			printf("  ... (--all)\n");
	}
}

static void print_json(const struct rows *rows, const struct row *gate, bool regressed)
{
	static const char *const group[] = { "step", "cause", "kind", "layer" };
	struct trace_json j = { .out = stdout, .lines = true };

	trace_json_object(&j, NULL);
	trace_json_text(&j, "unit", rows->per_token ? "ns/token" : "ns/step");
	trace_json_text(&j, "gate", gate->name);
	trace_json_bool(&j, "regressed", regressed);
	trace_json_array(&j, "rows");
	for (int i = 0; i < rows->n; i++) {
		const struct row *r = &rows->row[i];

		trace_json_object(&j, NULL);
		trace_json_text(&j, "name", r->name);
		trace_json_text(&j, "group", group[r->group]);
		trace_json_number(&j, "before", r->d.before);
		trace_json_number(&j, "after", r->d.after);
		trace_json_number(&j, "change", r->d.change);
		trace_json_number(&j, "low", r->d.low);
		trace_json_number(&j, "high", r->d.high);
		trace_json_end(&j, '}');
	}
	trace_json_end(&j, ']');
	trace_json_end(&j, '}');
	putchar('\n');
}

/* ---- the gate ---- */

/* A change from nothing has no percentage: it is beyond every limit. */
static bool is_regression(const struct trace_difference *d, double limit)
{
	if (!isfinite(d->change))
		return d->after > 0 && !(d->before > 0);
	return d->change > limit && !(d->low <= 0);
}

struct options {
	bool json, all, gated;
	double limit;
	const char *gate;
};

static int judge(struct rows *rows, const struct options *o, const char *const file[2],
		 const int steps[2])
{
	const struct row *gate = NULL;
	bool regressed;
	char a[PRINT_BYTES], b[PRINT_BYTES];

	qsort(rows->row, (size_t)rows->n, sizeof *rows->row, by_group);
	for (int i = 0; i < rows->n; i++)
		if (!strcmp(rows->row[i].name, o->gate))
			gate = &rows->row[i];
	if (!gate)
		return trace_fail(
			"--gate: '%s' is in neither trace (step, a kind, layer.N, idle.CAUSE)",
			o->gate);
	regressed = o->gated && is_regression(&gate->d, o->limit);
	if (o->json)
		print_json(rows, gate, regressed);
	else
		print(rows, file, steps, o->all);
	if (regressed && !o->json)
		printf("regression: %s %s, more than %s\n", gate->name, percent(gate->d.change, a),
		       percent(o->limit, b));
	return regressed ? TRACE_EXIT_FOUND : TRACE_EXIT_DONE;
}

static int compare(const struct trace t[2], const struct options *o, const char *const file[2])
{
	struct trace_series_list a = { 0 }, b = { 0 };
	struct rows rows = { 0 };
	int rc = trace_series(&t[0], false, &a) || trace_series(&t[1], false, &b);

	if (!rc && a.tokens > 0 && b.tokens > 0 && a.tokens != b.tokens) {
		rows.per_token = true;
		trace_series_free(&a);
		trace_series_free(&b);
		rc = trace_series(&t[0], true, &a) || trace_series(&t[1], true, &b);
	}
	rc = rc || make_rows(&a, &b, &rows);
	rc = rc ? trace_fail("no memory") : judge(&rows, o, file, (int[]){ a.n, b.n });
	free(rows.row);
	trace_series_free(&a);
	trace_series_free(&b);
	return rc;
}

static int run(int argc, char **argv)
{
	struct options o = { .gate = "step" };
	const char *file[2], *limit = NULL;
	const struct trace_flag flags[] = { { .name = "--max-regress", .text = &limit },
					    { .name = "--gate", .text = &o.gate },
					    { .name = "--all", .set = &o.all },
					    { .name = "--json", .set = &o.json },
					    { 0 } };
	struct trace t[2];
	int rc = trace_flags(&trace_command_diff, argc, argv, flags, file, 2, 2), loaded = 0;

	if (rc)
		return rc < 0 ? TRACE_EXIT_DONE : rc;
	if (limit && trace_flag_number("--max-regress", limit, &o.limit))
		return TRACE_EXIT_BAD;
	o.gated = limit != NULL;
	while (!rc && loaded < 2) {
		rc = trace_load(&t[loaded], file[loaded], NULL);
		if (!rc && !t[loaded++].n_tasks)
			rc = trace_fail("%s: no task has run", file[loaded - 1]);
	}
	if (!rc)
		rc = compare(t, &o, file);
	while (loaded)
		trace_free(&t[--loaded]);
	return rc;
}
