/* SPDX-License-Identifier: Apache-2.0 */
/* Time per kind and layer. */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define KINDS_SHOWN 12

static void start(struct trace_kind_time *k)
{
	*k = (struct trace_kind_time){ .cpu = MOE_MXT_NA,
				       .flops = MOE_MXT_NA,
				       .bytes = MOE_MXT_NA };
}

static void add_known(int64_t *sum, int64_t v)
{
	if (v != MOE_MXT_NA)
		*sum = (*sum == MOE_MXT_NA ? 0 : *sum) + v;
}

static void add(struct trace_kind_time *k, const struct trace_task *task, int64_t inside)
{
	k->n++;
	k->time += inside;
	add_known(&k->cpu, task->cpu);
	add_known(&k->flops, task->flops);
	add_known(&k->bytes, task->read);
	add_known(&k->bytes, task->written);
}

/* Median and 95th percentile (nearest rank) of each kind's durations. */
static int percentiles(const struct trace_window *w, struct trace_times *out)
{
	const struct trace *t = w->trace;
	struct trace_key *key = malloc(((size_t)w->n + 1) * sizeof *key);
	bool good;

	for (uint32_t i = 0; key && i < w->n; i++)
		key[i] = (struct trace_key){ trace_duration(t, w->task[i]), w->task[i] };
	good = key && trace_sort(key, w->n);
	for (uint32_t i = 0; good && i < w->n; i++)
		key[i].key = t->task[key[i].value].kind;
	good = good && trace_sort(key, w->n);
	for (uint32_t i = 0, n; good && i < w->n; i += n) {
		struct trace_kind_time *k = &out->kind[key[i].key];

		n = k->n;
		k->median = trace_duration(t, key[i + (n - 1) / 2].value);
		k->p95 = trace_duration(t, key[i + (uint32_t)((95ull * n + 99) / 100) - 1].value);
	}
	free(key);
	return good ? 0 : -1;
}

int trace_times(const struct trace_window *w, struct trace_times *out)
{
	const struct trace *t = w->trace;
	size_t layers = (size_t)t->n_layers + 1, cells = layers * (size_t)t->n_kinds;

	memset(out, 0, sizeof *out);
	out->kind = malloc(((size_t)t->n_kinds + 1) * sizeof *out->kind);
	out->cell = malloc((cells + 1) * sizeof *out->cell);
	out->layer = calloc(layers, sizeof *out->layer);
	if (!out->kind || !out->cell || !out->layer) {
		trace_times_free(out);
		return -1;
	}
	for (int k = 0; k < t->n_kinds; k++)
		start(&out->kind[k]);
	for (size_t i = 0; i < cells; i++)
		start(&out->cell[i]);
	start(&out->all);
	for (uint32_t i = 0; i < w->n; i++) {
		const struct trace_task *k = &t->task[w->task[i]];
		size_t layer = k->layer < 0 ? layers - 1 : (size_t)k->layer;
		int64_t inside = trace_inside(w, w->task[i]);

		add(&out->kind[k->kind], k, inside);
		add(&out->cell[(size_t)k->kind * layers + layer], k, inside);
		add(&out->all, k, inside);
		out->layer[layer][k->phase < MOE_MXT_PHASES ? k->phase : 0] += inside;
	}
	if (percentiles(w, out) == 0)
		return 0;
	trace_times_free(out);
	return -1;
}

void trace_times_free(struct trace_times *t)
{
	free(t->kind), free(t->cell), free(t->layer);
	memset(t, 0, sizeof *t);
}

/* ---- the section ---- */

/* Kinds by time, most first. Returns how many have any. */
static int rank_kinds(const struct trace *t, const struct trace_times *s, int *order)
{
	int n = 0;

	for (int k = 0; k < t->n_kinds; k++) {
		int i = n;

		if (!s->kind[k].n)
			continue;
		for (; i && s->kind[order[i - 1]].time < s->kind[k].time; i--)
			order[i] = order[i - 1];
		order[i] = k;
		n++;
	}
	return n;
}

static double per_second(int64_t v, int64_t ns)
{
	return v == MOE_MXT_NA || ns <= 0 ? NAN : (double)v / (double)ns * 1e9;
}

static void kind_line(const struct trace *t, const struct trace_times *s, int k, FILE *out)
{
	const struct trace_kind_time *x = &s->kind[k];
	char a[PRINT_BYTES], b[PRINT_BYTES], c[PRINT_BYTES], d[PRINT_BYTES], e[PRINT_BYTES],
		f[PRINT_BYTES];

	fprintf(out, "  ");
	print_cell(out, t->kind[k], 16);
	fprintf(out, " %8u %8s %9s %10s %10s %9s %9s\n", x->n,
		print_share((double)x->time, (double)s->all.time, a),
		print_time((double)x->time, b), print_time((double)x->median, c),
		print_time((double)x->p95, d), print_count(per_second(x->flops, x->time), e),
		print_count(per_second(x->bytes, x->time), f));
}

static void layer_lines(const struct trace *t, const struct trace_times *s, FILE *out)
{
	int most = -1, least = -1;
	int64_t time[2] = { 0, 0 };
	char a[PRINT_BYTES], b[PRINT_BYTES];

	for (int l = 0; l < t->n_layers; l++) {
		int64_t sum = 0;

		for (int p = 0; p < MOE_MXT_PHASES; p++)
			sum += s->layer[l][p];
		if (most < 0 || sum > time[0])
			most = l, time[0] = sum;
		if (least < 0 || sum < time[1])
			least = l, time[1] = sum;
	}
	if (t->n_layers > 1)
		fprintf(out, "  layers: most in %d (%s), least in %d (%s)\n", most,
			print_time((double)time[0], a), least, print_time((double)time[1], b));
}

static int text(const struct trace_view *v, FILE *out)
{
	const struct trace *t = v->trace;
	int *order = malloc(((size_t)t->n_kinds + 1) * sizeof *order), n;
	struct trace_times s;
	char a[PRINT_BYTES];

	if (!order || trace_times(&v->window, &s)) {
		free(order);
		return -1;
	}
	n = rank_kinds(t, &s, order);
	fprintf(out, "\n  %-16s %8s %8s %9s %10s %10s %9s %9s\n", "kind", "tasks", "share", "time",
		"median", "p95", "FLOP/s", "B/s");
	for (int i = 0; i < n && i < KINDS_SHOWN; i++)
		kind_line(t, &s, order[i], out);
	if (n > KINDS_SHOWN) {
		int64_t rest = 0;

		for (int i = KINDS_SHOWN; i < n; i++)
			rest += s.kind[order[i]].time;
		fprintf(out, "  %d more kinds: %s\n", n - KINDS_SHOWN,
			print_share((double)rest, (double)s.all.time, a));
	}
	layer_lines(t, &s, out);
	free(order);
	trace_times_free(&s);
	return 0;
}

static void member(struct trace_json *out, const struct trace_kind_time *x)
{
	trace_json_integer(out, "tasks", x->n);
	trace_json_integer(out, "time_ns", x->time);
	trace_json_integer(out, "cpu_ns", x->cpu);
	trace_json_integer(out, "flops", x->flops);
	trace_json_integer(out, "bytes", x->bytes);
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	const struct trace *t = v->trace;
	struct trace_times s;

	if (trace_times(&v->window, &s))
		return -1;
	member(out, &s.all);
	trace_json_object(out, "kinds");
	for (int k = 0; k < t->n_kinds; k++) {
		if (!s.kind[k].n)
			continue;
		trace_json_object(out, t->kind[k]);
		member(out, &s.kind[k]);
		trace_json_integer(out, "median_ns", s.kind[k].median);
		trace_json_integer(out, "p95_ns", s.kind[k].p95);
		trace_json_array(out, "layers_ns");
		for (int l = 0; l <= t->n_layers; l++)
			trace_json_integer(
				out, NULL,
				s.cell[(size_t)k * (size_t)(t->n_layers + 1) + (size_t)l].time);
		trace_json_end(out, ']');
		trace_json_end(out, '}');
	}
	trace_json_end(out, '}');
	trace_json_array(out, "layers");
	for (int l = 0; l <= t->n_layers; l++) {
		trace_json_object(out, NULL);
		for (int p = 0; p < MOE_MXT_PHASES; p++)
			trace_json_integer(out, moe_mxt_phase_name(p), s.layer[l][p]);
		trace_json_end(out, '}');
	}
	trace_json_end(out, ']');
	trace_times_free(&s);
	return 0;
}

const struct trace_metric trace_metric_times = {
	.name = "times", .order = 50, .text = text, .json = json
};
