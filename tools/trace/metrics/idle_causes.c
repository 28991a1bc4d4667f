/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Idle time by cause. Per worker, the gaps between its tasks are cut into pieces: from pop to start
 * of the next task; while a task of this worker was ready; the rest. Of a piece of the rest, the
 * part while any task was ready is placement, the other part submission or dependency: two sets of
 * times for the whole trace answer that by their prefix sums. All in integers, so causes add up.
 */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <stdlib.h>
#include <string.h>

const char *const trace_cause_name[TRACE_CAUSES] = { "submission", "dependency", "placement",
						     "data", "runtime" };

enum { REST = TRACE_CAUSES }; /* a piece that the sets of the whole trace decide */

struct piece {
	int64_t begin, end;
	uint8_t cause; /* enum trace_cause or REST */
};

struct worker {
	struct trace_set busy;
	struct piece *piece; /* ascending; [n] */
	uint32_t n, cap;
};

struct trace_idle {
	const struct trace *trace;
	struct worker *worker;
	struct trace_set ready;	     /* some task is ready and no worker has it */
	struct trace_set submission; /* none is, and some task is not submitted */
};

/* ---- the sets of the whole trace ---- */

static int make_ready(struct trace_idle *x)
{
	const struct trace *t = x->trace;

	for (uint32_t i = 0; i < t->n_tasks; i++)
		if (trace_set_add(&x->ready, trace_ready(t, i), trace_pop(t, i)))
			return -1;
	return trace_set_close(&x->ready);
}

/*
 * A step's tasks have to be submitted by the time it is the one that counts: from the end of the
 * steps before to its own end. After the last step, and in a trace without steps, all have to be.
 */
static int make_unsubmitted(const struct trace *t, struct trace_set *s)
{
	int64_t from = t->first, submitted = t->first, all = t->first;

	for (uint32_t i = 0; i < t->n_tasks; i++)
		all = trace_submit(t, i) > all ? trace_submit(t, i) : all;
	for (int i = 0; i < t->n_steps; i++) {
		int64_t until, unused;

		trace_step_time(t, i, &unused, &until);
		if (t->step[i].submitted > submitted)
			submitted = t->step[i].submitted;
		if (trace_set_add(s, from, submitted < until ? submitted : until))
			return -1;
		from = until > from ? until : from;
	}
	return trace_set_add(s, from, all) || trace_set_close(s) ? -1 : 0;
}

static int make_submission(struct trace_idle *x)
{
	struct trace_set unsubmitted = { 0 };
	int rc = make_unsubmitted(x->trace, &unsubmitted) ||
		 trace_set_subtract(&unsubmitted, &x->ready, &x->submission);

	trace_set_free(&unsubmitted);
	return rc ? -1 : 0;
}

/* ---- a worker's pieces ---- */

static int add_piece(struct worker *w, int64_t begin, int64_t end, int cause)
{
	if (end <= begin)
		return 0;
	if (w->n == w->cap) {
		uint32_t cap = w->cap ? 2 * w->cap : 64;
		struct piece *grown = realloc(w->piece, (size_t)cap * sizeof *grown);

		if (!grown)
			return -1;
		w->piece = grown;
		w->cap = cap;
	}
	w->piece[w->n++] = (struct piece){ begin, end, (uint8_t)cause };
	return 0;
}

/* Pieces of set a get a cause. */
static int add_pieces(struct worker *w, const struct trace_set *a, int cause)
{
	for (uint32_t i = 0; i < a->n; i++)
		if (add_piece(w, a->begin[i], a->end[i], cause))
			return -1;
	return 0;
}

/* `part` of `idle` gets a cause and leaves it. */
static int carve(struct worker *w, struct trace_set *idle, const struct trace_set *part, int cause)
{
	struct trace_set left = { 0 }, taken = { 0 };
	int rc = trace_set_subtract(idle, part, &left) || trace_set_subtract(idle, &left, &taken) ||
		 add_pieces(w, &taken, cause);

	trace_set_free(&taken);
	if (rc) {
		trace_set_free(&left);
		return -1;
	}
	trace_set_free(idle);
	*idle = left;
	return 0;
}

static int order_pieces(struct worker *w)
{
	struct trace_key *key = malloc(((size_t)w->n + 1) * sizeof *key);
	struct piece *sorted = malloc(((size_t)w->n + 1) * sizeof *sorted);
	int rc = -1;

	for (uint32_t i = 0; key && i < w->n; i++)
		key[i] = (struct trace_key){ w->piece[i].begin, i };
	if (key && sorted && trace_sort(key, w->n)) {
		for (uint32_t i = 0; i < w->n; i++)
			sorted[i] = w->piece[key[i].value];
		free(w->piece);
		w->piece = sorted;
		w->cap = w->n + 1;
		sorted = NULL;
		rc = 0;
	}
	free(key), free(sorted);
	return rc;
}

static int make_worker(const struct trace *t, int number, struct worker *w)
{
	struct trace_set taken = { 0 }, ready = { 0 }, idle = { 0 };
	struct trace_set all = { 0 };
	int rc = trace_set_add(&all, t->first, t->last);

	for (uint32_t i = t->worker_first[number]; !rc && i < t->worker_first[number + 1]; i++) {
		uint32_t k = t->by_worker[i];

		rc = trace_set_add(&w->busy, t->task[k].start, t->task[k].stop) ||
		     trace_set_add(&taken, trace_pop(t, k), t->task[k].start) ||
		     trace_set_add(&ready, trace_ready(t, k), trace_pop(t, k));
	}
	rc = rc || trace_set_close(&all) || trace_set_close(&w->busy) || trace_set_close(&taken) ||
	     trace_set_close(&ready) || trace_set_subtract(&all, &w->busy, &idle) ||
	     carve(w, &idle, &taken, t->data_wait ? TRACE_DATA : TRACE_RUNTIME) ||
	     carve(w, &idle, &ready, TRACE_RUNTIME) || add_pieces(w, &idle, REST) ||
	     order_pieces(w);
	trace_set_free(&taken), trace_set_free(&ready), trace_set_free(&idle);
	trace_set_free(&all);
	return rc ? -1 : 0;
}

struct trace_idle *trace_idle_new(const struct trace *t)
{
	struct trace_idle *x = calloc(1, sizeof *x);
	int rc;

	if (!x)
		return NULL;
	x->trace = t;
	x->worker = calloc((size_t)t->n_workers + 1, sizeof *x->worker);
	rc = !x->worker || make_ready(x) || make_submission(x);
	for (int w = 0; !rc && w < t->n_workers; w++)
		rc = make_worker(t, w, &x->worker[w]);
	if (!rc)
		return x;
	trace_idle_free(x);
	return NULL;
}

void trace_idle_free(struct trace_idle *x)
{
	for (int w = 0; x && x->worker && w < x->trace->n_workers; w++) {
		trace_set_free(&x->worker[w].busy);
		free(x->worker[w].piece);
	}
	if (!x)
		return;
	free(x->worker);
	trace_set_free(&x->ready);
	trace_set_free(&x->submission);
	free(x);
}

/* ---- questions ---- */

static void add_rest(const struct trace_idle *x, int64_t begin, int64_t end,
		     int64_t cause[TRACE_CAUSES])
{
	int64_t ready = trace_set_within(&x->ready, begin, end);
	int64_t submission = trace_set_within(&x->submission, begin, end);

	cause[TRACE_PLACEMENT] += ready;
	cause[TRACE_SUBMISSION] += submission;
	cause[TRACE_DEPENDENCY] += end - begin - ready - submission;
}

static void of_worker(const struct trace_idle *x, const struct worker *w, int64_t begin,
		      int64_t end, int64_t cause[TRACE_CAUSES])
{
	uint32_t low = 0, high = w->n;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (w->piece[middle].end <= begin)
			low = middle + 1;
		else
			high = middle;
	}
	for (; low < w->n && w->piece[low].begin < end; low++) {
		const struct piece *p = &w->piece[low];
		int64_t from = p->begin > begin ? p->begin : begin;
		int64_t to = p->end < end ? p->end : end;

		if (p->cause == REST)
			add_rest(x, from, to, cause);
		else
			cause[p->cause] += to - from;
	}
}

void trace_idle_within(const struct trace_idle *x, int worker, int64_t begin, int64_t end,
		       int64_t cause[TRACE_CAUSES])
{
	memset(cause, 0, TRACE_CAUSES * sizeof *cause);
	for (int w = 0; w < x->trace->n_workers; w++)
		if (worker < 0 || worker == w)
			of_worker(x, &x->worker[w], begin, end, cause);
}

int64_t trace_busy_within(const struct trace_idle *x, int worker, int64_t begin, int64_t end)
{
	int64_t sum = 0;

	for (int w = 0; w < x->trace->n_workers; w++)
		if (worker < 0 || worker == w)
			sum += trace_set_within(&x->worker[w].busy, begin, end);
	return sum;
}

/* ---- the section ---- */

struct totals {
	int64_t cause[TRACE_CAUSES], busy, idle, whole;
};

static struct totals totals(const struct trace_view *v)
{
	const struct trace_window *w = &v->window;
	struct totals s = { .busy = trace_busy_within(v->idle, -1, w->begin, w->end) };

	trace_idle_within(v->idle, -1, w->begin, w->end, s.cause);
	for (int i = 0; i < TRACE_CAUSES; i++)
		s.idle += s.cause[i];
	s.whole = (w->end - w->begin) * v->trace->n_workers;
	return s;
}

static int text(const struct trace_view *v, FILE *out)
{
	struct totals s = totals(v);
	char a[PRINT_BYTES];

	fprintf(out, "\nidle: %s of the workers' time",
		print_share((double)s.idle, (double)s.whole, a));
	for (int i = 0; i < TRACE_CAUSES; i++)
		fprintf(out, "%s %s %s", i ? "," : ":", trace_cause_name[i],
			print_share((double)s.cause[i], (double)s.whole, a));
	fprintf(out, "\n");
	return 0;
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	const struct trace_window *w = &v->window;
	struct totals s = totals(v);

	trace_json_integer(out, "worker_ns", s.whole);
	trace_json_integer(out, "busy_ns", s.busy);
	trace_json_integer(out, "idle_ns", s.idle);
	for (int i = 0; i < TRACE_CAUSES; i++) {
		char name[40];

		snprintf(name, sizeof name, "%s_ns", trace_cause_name[i]);
		trace_json_integer(out, name, s.cause[i]);
	}
	trace_json_array(out, "workers");
	for (int k = 0; k < v->trace->n_workers; k++) {
		int64_t cause[TRACE_CAUSES];

		trace_idle_within(v->idle, k, w->begin, w->end, cause);
		trace_json_object(out, NULL);
		trace_json_integer(out, "busy_ns", trace_busy_within(v->idle, k, w->begin, w->end));
		for (int i = 0; i < TRACE_CAUSES; i++)
			trace_json_integer(out, trace_cause_name[i], cause[i]);
		trace_json_end(out, '}');
	}
	trace_json_end(out, ']');
	return 0;
}

const struct trace_metric trace_metric_idle_causes = {
	.name = "idle", .order = 40, .text = text, .json = json
};
