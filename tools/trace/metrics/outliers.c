/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tasks that took much longer than others like them: the same kind and about as many rows (two
 * sizes per doubling). Much: more than 6 deviations above the median and more than half of it. The
 * deviation is 1.4826 times the median of distances from the median, which outliers do not move.
 */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DEVIATIONS 6
#define ENOUGH 8 /* tasks in a class */
#define SHOWN 5

/* 0: none, 1, 2, 3, then two per doubling: 4, 6, 8, 12, ... */
static int size_class(int64_t rows)
{
	int log = 0;

	if (rows <= 3)
		return rows < 0 ? 0 : (int)rows;
	while (rows >> (log + 1))
		log++;
	return 2 * log + (int)(rows >> (log - 1) & 1);
}

static int by_excess(const void *a, const void *b)
{
	const struct trace_key *p = a, *q = b;

	return p->key > q->key ? -1 : p->key < q->key ? 1 : p->value < q->value ? -1 : 1;
}

struct found {
	struct trace_outliers *o;
	uint32_t cap;
};

static int add(struct found *f, const struct trace *t, uint32_t task, int64_t expected)
{
	const struct trace_task *k = &t->task[task];
	int64_t duration = trace_duration(t, task);
	struct trace_outliers *o = f->o;

	if (o->n == f->cap) {
		uint32_t cap = f->cap ? 2 * f->cap : 64;
		struct trace_outlier *grown = realloc(o->list, (size_t)cap * sizeof *grown);

		if (!grown)
			return -1;
		o->list = grown;
		f->cap = cap;
	}
	o->list[o->n] = (struct trace_outlier){
		task, expected, k->cpu != MOE_MXT_NA && (double)k->cpu < .8 * (double)duration
	};
	o->preempted += o->list[o->n++].preempted;
	o->excess += duration - expected;
	return 0;
}

/* A class, ascending durations. */
static int look(struct found *f, const struct trace *t, const struct trace_key *c, uint32_t n,
		struct trace_key *spare)
{
	int64_t median = trace_duration(t, c[(n - 1) / 2].value), limit;
	double deviation;

	if (n < ENOUGH)
		return 0;
	for (uint32_t i = 0; i < n; i++) {
		int64_t d = trace_duration(t, c[i].value) - median;

		spare[i] = (struct trace_key){ d < 0 ? -d : d, 0 };
	}
	if (!trace_sort(spare, n))
		return -1;
	deviation = 1.4826 * (double)spare[(n - 1) / 2].key;
	limit = median + llrint(fmax(DEVIATIONS * deviation, .5 * (double)median));
	for (uint32_t i = n; i-- > 0 && trace_duration(t, c[i].value) > limit;)
		if (add(f, t, c[i].value, median))
			return -1;
	return 0;
}

static int order_list(struct trace_outliers *o, const struct trace *t)
{
	struct trace_key *key = malloc(((size_t)o->n + 1) * sizeof *key);
	struct trace_outlier *sorted = malloc(((size_t)o->n + 1) * sizeof *sorted);

	if (!key || !sorted) {
		free(key), free(sorted);
		return -1;
	}
	for (uint32_t i = 0; i < o->n; i++)
		key[i] = (struct trace_key){
			trace_duration(t, o->list[i].task) - o->list[i].expected, i
		};
	if (o->n)
		qsort(key, o->n, sizeof *key, by_excess);
	for (uint32_t i = 0; i < o->n; i++)
		sorted[i] = o->list[key[i].value];
	free(o->list), free(key);
	o->list = sorted;
	return 0;
}

int trace_outliers(const struct trace_window *w, struct trace_outliers *o)
{
	const struct trace *t = w->trace;
	struct trace_key *key = malloc(((size_t)w->n + 1) * sizeof *key);
	struct trace_key *spare = malloc(((size_t)w->n + 1) * sizeof *spare);
	struct found f = { .o = o };
	bool good;

	memset(o, 0, sizeof *o);
	for (uint32_t i = 0; key && i < w->n; i++)
		key[i] = (struct trace_key){ trace_duration(t, w->task[i]), w->task[i] };
	good = key && spare && trace_sort(key, w->n);
	for (uint32_t i = 0; good && i < w->n; i++) {
		const struct trace_task *k = &t->task[key[i].value];

		key[i].key = (int64_t)k->kind * 256 + size_class(k->rows);
	}
	good = good && trace_sort(key, w->n);
	for (uint32_t i = 0, k; good && i < w->n; i = k) {
		for (k = i; k < w->n && key[k].key == key[i].key; k++)
			;
		good = !look(&f, t, key + i, k - i, spare);
	}
	good = good && !order_list(o, t);
	free(key), free(spare);
	if (good)
		return 0;
	trace_outliers_free(o);
	return -1;
}

void trace_outliers_free(struct trace_outliers *o)
{
	free(o->list);
	memset(o, 0, sizeof *o);
}

/* ---- the section ---- */

static int text(const struct trace_view *v, FILE *out)
{
	const struct trace *t = v->trace;
	struct trace_outliers o;
	char a[PRINT_BYTES], b[PRINT_BYTES];

	if (trace_outliers(&v->window, &o))
		return -1;
	fprintf(out, "\noutliers: %u tasks, %s over what others of their kind and size take", o.n,
		print_time((double)o.excess, a));
	if (o.n)
		fprintf(out, "; %u of them did not have their core all the time", o.preempted);
	fprintf(out, "\n");
	for (uint32_t i = 0; i < o.n && i < SHOWN; i++) {
		const struct trace_task *k = &t->task[o.list[i].task];

		fprintf(out, "  task %-9lld ", (long long)k->id);
		print_cell(out, t->kind[k->kind], 16);
		fprintf(out, " layer %-3d step %-4d worker %-3d %10s, expected %s%s\n", k->layer,
			k->step, k->worker,
			print_time((double)trace_duration(t, o.list[i].task), a),
			print_time((double)o.list[i].expected, b),
			o.list[i].preempted ? ", preempted" : "");
	}
	trace_outliers_free(&o);
	return 0;
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	const struct trace *t = v->trace;
	struct trace_outliers o;

	if (trace_outliers(&v->window, &o))
		return -1;
	trace_json_integer(out, "tasks", o.n);
	trace_json_integer(out, "preempted", o.preempted);
	trace_json_integer(out, "excess_ns", o.excess);
	trace_json_array(out, "worst");
	for (uint32_t i = 0; i < o.n && i < 20; i++) {
		const struct trace_task *k = &t->task[o.list[i].task];

		trace_json_object(out, NULL);
		trace_json_integer(out, "task", k->id);
		trace_json_text(out, "kind", t->kind[k->kind]);
		trace_json_integer(out, "layer", k->layer);
		trace_json_integer(out, "step", k->step);
		trace_json_integer(out, "worker", k->worker);
		trace_json_integer(out, "start_ns", k->start);
		trace_json_integer(out, "time_ns", trace_duration(t, o.list[i].task));
		trace_json_integer(out, "expected_ns", o.list[i].expected);
		trace_json_bool(out, "preempted", o.list[i].preempted);
		trace_json_end(out, '}');
	}
	trace_json_end(out, ']');
	trace_outliers_free(&o);
	return 0;
}

const struct trace_metric trace_metric_outliers = {
	.name = "outliers", .order = 90, .text = text, .json = json
};
