/* SPDX-License-Identifier: Apache-2.0 */
/* Lower bounds of a window's time. */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CLASSES 12 /* of parts with the same workers; beyond, only each one and all */

/* ---- area ---- */

struct area_class {
	uint64_t *workers; /* bits */
	int64_t work;
	int parts;
};

struct area {
	struct area_class *list;
	int n, words, n_workers;
	int64_t any; /* work that may run anywhere */
};

static int count_bits(const uint64_t *bits, int words)
{
	int n = 0;

	for (int i = 0; i < words; i++)
		n += __builtin_popcountll(bits[i]);
	return n;
}

/* The class of a part's workers, made where it is new; NULL: no memory. */
static struct area_class *class_of(struct area *a, const struct trace *t, int part)
{
	struct area_class *c = &a->list[a->n];

	c->workers = calloc((size_t)a->words, sizeof *c->workers);
	if (!c->workers)
		return NULL;
	for (uint32_t i = t->part_first[part]; i < t->part_first[part + 1]; i++)
		c->workers[t->part_worker[i] / 64] |= 1ull << t->part_worker[i] % 64;
	for (int i = 0; i < a->n; i++)
		if (!memcmp(a->list[i].workers, c->workers, (size_t)a->words * 8)) {
			free(c->workers);
			c->workers = NULL;
			return &a->list[i];
		}
	a->n++;
	return c;
}

/* Work by classes of parts; with soft placement everything may run anywhere. */
static int make_area(const struct trace_window *w, struct area *a)
{
	const struct trace *t = w->trace;
	int64_t *work = calloc((size_t)t->n_parts + 1, sizeof *work);

	memset(a, 0, sizeof *a);
	a->n_workers = t->n_workers;
	a->words = (t->n_workers + 63) / 64;
	a->list = calloc((size_t)t->n_parts + 1, sizeof *a->list);
	if (!work || !a->list) {
		free(work);
		return -1;
	}
	for (uint32_t i = 0; i < w->n; i++) {
		int32_t part = t->task[w->task[i]].part;
		bool bound = t->strict && t->part_first && part >= 0 && part < t->n_parts &&
			     t->part_first[part] < t->part_first[part + 1];

		*(bound ? &work[part] : &a->any) += trace_inside(w, w->task[i]);
	}
	for (int p = 0; p < t->n_parts; p++) {
		struct area_class *c = work[p] ? class_of(a, t, p) : NULL;

		if (work[p] && !c) {
			free(work);
			return -1;
		}
		if (c) {
			c->work += work[p];
			c->parts++;
		}
	}
	free(work);
	return 0;
}

static bool within(const uint64_t *inner, const uint64_t *outer, int words)
{
	for (int i = 0; i < words; i++)
		if (inner[i] & ~outer[i])
			return false;
	return true;
}

/* All work that must run on the workers in `bits`, over their number. */
static double load_of(const struct area *a, const uint64_t *bits, int *parts)
{
	int64_t work = 0;

	*parts = 0;
	for (int i = 0; i < a->n; i++)
		if (within(a->list[i].workers, bits, a->words)) {
			work += a->list[i].work;
			*parts += a->list[i].parts;
		}
	return (double)work / count_bits(bits, a->words);
}

/* The fullest set of workers. Exact for up to MAX_CLASSES classes of parts. */
static int worst_area(const struct area *a, struct trace_bounds *b)
{
	uint64_t *bits = malloc(((size_t)a->words + 1) * sizeof *bits);
	int64_t all = a->any;
	bool exact = a->n <= MAX_CLASSES;
	uint32_t sets = exact ? 1u << a->n : (uint32_t)a->n + 1;

	if (!bits)
		return -1;
	for (int i = 0; i < a->n; i++)
		all += a->list[i].work;
	b->area = (double)all / (a->n_workers ? a->n_workers : 1);
	for (uint32_t s = 1; s < sets; s++) {
		double load;
		int parts;

		memset(bits, 0, (size_t)a->words * sizeof *bits);
		for (int i = 0; i < a->n; i++)
			if (exact ? s >> i & 1 : (uint32_t)i == s - 1)
				for (int k = 0; k < a->words; k++)
					bits[k] |= a->list[i].workers[k];
		load = load_of(a, bits, &parts);
		if (load > b->area * (1 + 1e-12)) {
			b->area = load;
			b->area_parts = parts;
		}
	}
	free(bits);
	return 0;
}

static int area(const struct trace_window *w, struct trace_bounds *b)
{
	struct area a;
	int rc = make_area(w, &a) || worst_area(&a, b);

	for (int i = 0; a.list && i < a.n; i++)
		free(a.list[i].workers);
	free(a.list);
	return rc ? -1 : 0;
}

/* ---- bandwidth ---- */

/* Bytes of a task that lie in the window. */
static double share(const struct trace_window *w, uint32_t i, int64_t bytes)
{
	int64_t whole = trace_duration(w->trace, i);

	if (bytes == MOE_MXT_NA || bytes < 0)
		return 0;
	return whole > 0 ? (double)bytes * (double)trace_inside(w, i) / (double)whole
			 : (double)bytes;
}

/* Bytes per node of memory: placed ones where they lie, others with the worker. */
static void add_bytes(const struct trace_window *w, double *node)
{
	const struct trace *t = w->trace;

	for (uint32_t i = 0; i < w->n; i++) {
		const struct trace_task *k = &t->task[w->task[i]];
		double all = share(w, w->task[i], k->read) + share(w, w->task[i], k->written);
		double remote = share(w, w->task[i], k->remote);
		int here = t->worker[k->worker].node, home = trace_home(t, w->task[i]);

		remote = remote < all ? remote : all;
		node[here] += all - remote;
		if (home >= 0 || t->n_nodes < 2)
			node[home >= 0 ? home : here] += remote;
		else /* not known where: spread */
			for (int n = 0; n < t->n_nodes; n++)
				node[n] += n == here ? 0 : remote / (t->n_nodes - 1);
	}
}

static int bandwidth(const struct trace_window *w, struct trace_bounds *b)
{
	const struct trace *t = w->trace;
	double rate = trace_number(t, "rates.read_all_gbps", NAN) / t->n_nodes;
	double *node = calloc((size_t)t->n_nodes + 1, sizeof *node);

	if (!node)
		return -1;
	b->guessed_rate = trace_number(t, "rates.measured", 0) != 1;
	b->bandwidth = NAN;
	add_bytes(w, node);
	for (int n = 0; n < t->n_nodes; n++)
		if (node[n] > 0 && rate > 0 && !(b->bandwidth >= node[n] / rate)) {
			b->bandwidth = node[n] / rate; /* bytes / (GB/s) is ns */
			b->bandwidth_node = n;
		}
	free(node);
	return 0;
}

int trace_bounds(const struct trace_window *w, struct trace_bounds *b)
{
	struct trace_path p;

	memset(b, 0, sizeof *b);
	b->makespan = (double)(w->end - w->begin);
	if (area(w, b) || bandwidth(w, b) || trace_critical_path(w, false, &p))
		return -1;
	b->critical_path = (double)p.length;
	trace_path_free(&p);
	b->lower = fmax(b->area, b->critical_path);
	if (!b->guessed_rate && b->bandwidth > b->lower)
		b->lower = b->bandwidth;
	b->efficiency = b->makespan > 0 ? b->lower / b->makespan : NAN;
	return 0;
}

/* ---- the section ---- */

static const char *binding(const struct trace_bounds *b)
{
	return b->lower == b->area	      ? "work"
	       : b->lower == b->critical_path ? "the critical path"
					      : "memory bandwidth";
}

/* The largest shares of a path: "gate_up 31.2 %, ...". */
static void print_shares(const struct trace *t, const int64_t *by_kind, int64_t whole, FILE *out)
{
	int64_t below = INT64_MAX;
	char a[PRINT_BYTES];

	for (int shown = 0, last = -1; shown < 5; shown++) {
		int best = -1;

		for (int k = 0; k < t->n_kinds; k++) {
			bool after = by_kind[k] < below || (by_kind[k] == below && k > last);

			if (by_kind[k] > 0 && after && (best < 0 || by_kind[k] > by_kind[best]))
				best = k;
		}
		if (best < 0)
			break;
		fprintf(out, "%s ", shown ? "," : "");
		print_cell(out, t->kind[best], (int)strnlen(t->kind[best], 20));
		fprintf(out, " %s", print_share((double)by_kind[best], (double)whole, a));
		below = by_kind[best];
		last = best;
	}
	fprintf(out, "\n");
}

static int text(const struct trace_view *v, FILE *out)
{
	const struct trace *t = v->trace;
	const struct trace_realised *r = &v->realised;
	struct trace_bounds b;
	struct trace_path p;
	char a[PRINT_BYTES], c[PRINT_BYTES], d[PRINT_BYTES], e[PRINT_BYTES];

	if (trace_bounds(&v->window, &b) || trace_critical_path(&v->window, false, &p))
		return -1;
	fprintf(out, "\nbounds: area %s", print_time(b.area, a));
	if (b.area_parts)
		fprintf(out, " (of %d part%s)", b.area_parts, b.area_parts > 1 ? "s" : "");
	fprintf(out, ", critical path %s, bandwidth %s%s\n", print_time(b.critical_path, c),
		print_time(b.bandwidth, d),
		b.guessed_rate && isfinite(b.bandwidth) ? " (guessed rate: not counted)" : "");
	fprintf(out, "efficiency %s: %s would allow %s\n", print_share(b.lower, b.makespan, a),
		binding(&b), print_time(b.lower, c));
	fprintf(out, "critical path: %u tasks,", p.n);
	print_shares(t, p.by_kind, p.length, out);
	fprintf(out,
		"realised path: %u tasks, busy %s of it, linked by dependency %u, worker %u, "
		"submission %u:",
		r->n, print_share((double)r->busy, (double)(r->busy + r->gaps), e),
		r->links[TRACE_LINK_DEPENDENCY], r->links[TRACE_LINK_WORKER],
		r->links[TRACE_LINK_SUBMISSION]);
	print_shares(t, r->by_kind, r->busy, out);
	trace_path_free(&p);
	return 0;
}

static void shares(const struct trace *t, const int64_t *by_kind, const int64_t *by_layer,
		   struct trace_json *out)
{
	trace_json_object(out, "kinds_ns");
	for (int k = 0; k < t->n_kinds; k++)
		if (by_kind[k])
			trace_json_integer(out, t->kind[k], by_kind[k]);
	trace_json_end(out, '}');
	trace_json_array(out, "layers_ns");
	for (int l = 0; l <= t->n_layers; l++)
		trace_json_integer(out, NULL, by_layer[l]);
	trace_json_end(out, ']');
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	const struct trace *t = v->trace;
	const struct trace_realised *r = &v->realised;
	struct trace_bounds b;
	struct trace_path p;

	if (trace_bounds(&v->window, &b) || trace_critical_path(&v->window, false, &p))
		return -1;
	trace_json_number(out, "makespan_ns", b.makespan);
	trace_json_number(out, "area_ns", b.area);
	trace_json_integer(out, "area_parts", b.area_parts);
	trace_json_number(out, "critical_path_ns", b.critical_path);
	trace_json_number(out, "bandwidth_ns", b.bandwidth);
	trace_json_bool(out, "bandwidth_guessed", b.guessed_rate);
	trace_json_number(out, "lower_ns", b.lower);
	trace_json_text(out, "binding", binding(&b));
	trace_json_number(out, "efficiency", b.efficiency);
	trace_json_object(out, "critical_path");
	trace_json_integer(out, "tasks", p.n);
	shares(t, p.by_kind, p.by_layer, out);
	trace_json_end(out, '}');
	trace_json_object(out, "realised_path");
	trace_json_integer(out, "tasks", r->n);
	trace_json_integer(out, "busy_ns", r->busy);
	trace_json_integer(out, "gaps_ns", r->gaps);
	for (int i = 0; i < TRACE_LINKS; i++)
		trace_json_integer(out, trace_link_name[i], r->links[i]);
	shares(t, r->by_kind, r->by_layer, out);
	trace_json_end(out, '}');
	trace_path_free(&p);
	return 0;
}

const struct trace_metric trace_metric_bounds = {
	.name = "bounds", .order = 30, .text = text, .json = json
};
