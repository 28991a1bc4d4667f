/* SPDX-License-Identifier: Apache-2.0 */
/* While kinds of tasks run beside each other, and what of a kind's time nothing hides. */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <stdlib.h>
#include <string.h>

#define KINDS_SHOWN 6

/* ---- the matrix ---- */

/* Per kind, the union of its tasks' times in the window. */
static struct trace_set *unions(const struct trace_window *w)
{
	const struct trace *t = w->trace;
	struct trace_set *set = calloc((size_t)t->n_kinds + 1, sizeof *set);
	bool good = set;

	for (uint32_t i = 0; good && i < w->n; i++) {
		const struct trace_task *k = &t->task[w->task[i]];

		good = !trace_set_add(&set[k->kind], k->start > w->begin ? k->start : w->begin,
				      k->stop < w->end ? k->stop : w->end);
	}
	for (int k = 0; good && k < t->n_kinds; k++)
		good = !trace_set_close(&set[k]);
	if (good)
		return set;
	for (int k = 0; set && k < t->n_kinds; k++)
		trace_set_free(&set[k]);
	free(set);
	return NULL;
}

int trace_overlap(const struct trace_window *w, int64_t **time)
{
	size_t n = (size_t)w->trace->n_kinds;
	struct trace_set *set = unions(w);

	*time = set ? calloc(n * n + 1, sizeof **time) : NULL;
	for (size_t a = 0; *time && a < n; a++)
		for (size_t b = a; b < n; b++) {
			int64_t v = a == b ? trace_set_length(&set[a])
					   : trace_set_common(&set[a], &set[b]);

			(*time)[a * n + b] = (*time)[b * n + a] = v;
		}
	for (size_t k = 0; set && k < n; k++)
		trace_set_free(&set[k]);
	free(set);
	return *time ? 0 : -1;
}

/* ---- exposure ---- */

/* Whether a name is one of "a|b". */
static bool is_one_of(const char *name, const char *list)
{
	size_t n = strlen(name);

	for (const char *p = list; p; p = strchr(p, '|')) {
		p += *p == '|';
		if (!strncmp(p, name, n) && (p[n] == '|' || !p[n]))
			return true;
	}
	return false;
}

static int add_clipped(struct trace_set *s, const struct trace_window *w, int64_t begin,
		       int64_t end)
{
	return trace_set_add(s, begin > w->begin ? begin : w->begin, end < w->end ? end : w->end);
}

struct sets {
	struct trace_set mine, others, path, alone, alone_or_path;
};

/* Others: from when a task of another kind could run to when it has. */
static int fill(const struct trace_window *w, const struct trace_realised *r, const bool *is_mine,
		struct sets *s)
{
	const struct trace *t = w->trace;

	for (uint32_t i = 0; i < w->n; i++) {
		const struct trace_task *k = &t->task[w->task[i]];
		bool mine = is_mine[k->kind];

		if (add_clipped(mine ? &s->mine : &s->others, w,
				mine ? k->start : trace_ready(t, w->task[i]), k->stop))
			return -1;
	}
	for (uint32_t i = 0; i < r->n; i++) {
		const struct trace_task *k = &t->task[r->task[i]];

		if (is_mine[k->kind] && add_clipped(&s->path, w, k->start, k->stop))
			return -1;
	}
	if (trace_set_close(&s->mine) || trace_set_close(&s->others) || trace_set_close(&s->path) ||
	    trace_set_subtract(&s->mine, &s->others, &s->alone))
		return -1;
	for (uint32_t i = 0; i < s->alone.n; i++)
		if (trace_set_add(&s->alone_or_path, s->alone.begin[i], s->alone.end[i]))
			return -1;
	for (uint32_t i = 0; i < s->path.n; i++)
		if (trace_set_add(&s->alone_or_path, s->path.begin[i], s->path.end[i]))
			return -1;
	return trace_set_close(&s->alone_or_path);
}

/* Tasks that wait beyond the window's end count too: they could run. */
static int add_waiting(const struct trace_window *w, const bool *is_mine, struct sets *s)
{
	const struct trace *t = w->trace;

	for (int k = 0; k < t->n_workers; k++) {
		uint32_t low = t->worker_first[k], high = t->worker_first[k + 1], end = high;

		while (low < high) { /* the first that starts at or after the end */
			uint32_t middle = low + (high - low) / 2;

			if (t->task[t->by_worker[middle]].start < w->end)
				low = middle + 1;
			else
				high = middle;
		}
		for (uint32_t i = low; i < end; i++) {
			uint32_t task = t->by_worker[i];

			if (!is_mine[t->task[task].kind] &&
			    add_clipped(&s->others, w, trace_ready(t, task), w->end))
				return -1;
		}
	}
	return 0;
}

int trace_exposed(const struct trace_window *w, const struct trace_realised *r, const char *kinds,
		  struct trace_exposure *x)
{
	const struct trace *t = w->trace;
	bool *is_mine = calloc((size_t)t->n_kinds + 1, sizeof *is_mine), any = false;
	struct sets s = { 0 };
	int rc;

	memset(x, 0, sizeof *x);
	for (int k = 0; is_mine && k < t->n_kinds; k++)
		any |= is_mine[k] = is_one_of(t->kind[k], kinds);
	rc = !is_mine || (any && (add_waiting(w, is_mine, &s) || fill(w, r, is_mine, &s)));
	if (!rc && any) {
		x->time = trace_set_length(&s.mine);
		x->blocked = trace_set_length(&s.alone);
		x->on_path = trace_set_length(&s.path);
		x->exposed = trace_set_length(&s.alone_or_path);
	}
	free(is_mine);
	trace_set_free(&s.mine), trace_set_free(&s.others), trace_set_free(&s.path);
	trace_set_free(&s.alone), trace_set_free(&s.alone_or_path);
	return rc ? -1 : 0;
}

/* ---- the sections ---- */

static int64_t gain_of(const struct replay_gains *g, int64_t without)
{
	return without == MOE_MXT_NA || g->base == MOE_MXT_NA ? MOE_MXT_NA : g->base - without;
}

static void exposure_line(const struct trace_view *v, const char *name,
			  const struct trace_exposure *x, int64_t gain, FILE *out)
{
	double whole = (double)(v->window.end - v->window.begin);
	char a[PRINT_BYTES], b[PRINT_BYTES], c[PRINT_BYTES], d[PRINT_BYTES];

	if (!x->time)
		return;
	fprintf(out, "%s: %s (%s of the time), exposed %s, hidden %s", name,
		print_time((double)x->time, a), print_share((double)x->time, whole, b),
		print_time((double)x->exposed, c), print_time((double)(x->time - x->exposed), d));
	if (gain != MOE_MXT_NA)
		fprintf(out, "; a replay without it is %s shorter", print_time((double)gain, a));
	fprintf(out, "\n");
}

static int exposures(const struct trace_view *v, struct trace_exposure x[2])
{
	return trace_exposed(&v->window, &v->realised, "repack|repack_bwd", &x[0]) ||
			       trace_exposed(&v->window, &v->realised, "update", &x[1])
		       ? -1
		       : 0;
}

/* Kinds that run longest, at most KINDS_SHOWN. */
static int longest(const int64_t *time, int n, int *order)
{
	int shown = 0;

	for (int k = 0; k < n; k++) {
		int64_t mine = time[(size_t)k * (size_t)n + (size_t)k];
		int i = shown < KINDS_SHOWN ? shown : KINDS_SHOWN;

		if (!mine)
			continue;
		for (; i && time[(size_t)order[i - 1] * (size_t)n + (size_t)order[i - 1]] < mine;
		     i--)
			if (i < KINDS_SHOWN)
				order[i] = order[i - 1];
		if (i < KINDS_SHOWN)
			order[i] = k;
		shown += shown < KINDS_SHOWN;
	}
	return shown;
}

static int text(const struct trace_view *v, FILE *out)
{
	const struct trace *t = v->trace;
	struct trace_exposure x[2];
	int order[KINDS_SHOWN] = { 0 }, n;
	size_t kinds = (size_t)t->n_kinds;
	char a[PRINT_BYTES];
	int64_t *time;

	if (trace_overlap(&v->window, &time))
		return -1;
	n = longest(time, t->n_kinds, order);
	if (n > 1) {
		fprintf(out,
			"\noverlap: of the time with a task of the row, share with one of the "
			"column\n"
			"  %-14s",
			"");
		for (int b = 0; b < n; b++)
			putc(' ', out), print_cell(out, t->kind[order[b]], 9);
		putc('\n', out);
	}
	for (int i = 0; n > 1 && i < n; i++) {
		const int64_t *row = time + (size_t)order[i] * kinds;

		fprintf(out, "  ");
		print_cell(out, t->kind[order[i]], 14);
		for (int b = 0; b < n; b++)
			fprintf(out, " %-9s",
				b == i ? "-"
				       : print_share((double)row[order[b]], (double)row[order[i]],
						     a));
		putc('\n', out);
	}
	free(time);
	if (exposures(v, x))
		return -1;
	exposure_line(v, "repack", &x[0], gain_of(&v->gains, v->gains.without_repack), out);
	exposure_line(v, "update", &x[1], gain_of(&v->gains, v->gains.without_update), out);
	return 0;
}

static void member(struct trace_json *out, const char *name, const struct trace_exposure *x,
		   int64_t gain)
{
	trace_json_object(out, name);
	trace_json_integer(out, "time_ns", x->time);
	trace_json_integer(out, "blocked_ns", x->blocked);
	trace_json_integer(out, "on_path_ns", x->on_path);
	trace_json_integer(out, "exposed_ns", x->exposed);
	trace_json_integer(out, "hidden_ns", x->time - x->exposed);
	trace_json_integer(out, "replay_gain_ns", gain);
	trace_json_end(out, '}');
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	const struct trace *t = v->trace;
	size_t n = (size_t)t->n_kinds;
	struct trace_exposure x[2];
	int64_t *time;

	if (exposures(v, x) || trace_overlap(&v->window, &time))
		return -1;
	member(out, "repack", &x[0], gain_of(&v->gains, v->gains.without_repack));
	member(out, "update", &x[1], gain_of(&v->gains, v->gains.without_update));
	trace_json_object(out, "matrix_ns");
	for (size_t a = 0; a < n; a++) {
		if (!time[a * n + a])
			continue;
		trace_json_object(out, t->kind[a]);
		for (size_t b = 0; b < n; b++)
			if (time[a * n + b])
				trace_json_integer(out, t->kind[b], time[a * n + b]);
		trace_json_end(out, '}');
	}
	trace_json_end(out, '}');
	free(time);
	return 0;
}

const struct trace_metric trace_metric_overlap = {
	.name = "overlap", .order = 60, .text = text, .json = json
};
