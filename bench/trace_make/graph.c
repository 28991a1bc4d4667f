/* SPDX-License-Identifier: Apache-2.0 */
/* The graph of the run: docs/graph.md in small. */
#include "bench/trace_make/make.h"

#include "engine/trace_format.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
	QKV,
	ATTENTION,
	ROUTE,
	PLAN,
	GATE_UP,
	DOWN,
	JOIN,
	COMBINE,
	REPACK_BWD,
	DOWN_BWD,
	GATE_UP_BWD,
	COMBINE_BWD,
	ATTENTION_BWD,
	QKV_BWD,
	LORA_GRAD,
	UPDATE,
};
const char *const make_kind[] = {
	"qkv",	       "attention",   "route",		 "plan",       "gate_up",
	"down",	       "join",	      "combine",	 "repack_bwd", "down_bwd",
	"gate_up_bwd", "combine_bwd", "attention_bwd_q", "qkv_bwd",    "lora_grad",
	"update",      NULL
};

/* Cost of a task: us at least, us and bytes per row. */
static const struct {
	double base, row, weights, per_row;
} cost[] = {
	[QKV] = { 20, .8, 2e6, 8e3 },
	[ATTENTION] = { 20, 1.2, 1e5, 8e3 },
	[ROUTE] = { 8, .1, 5e5, 8e3 },
	[PLAN] = { 10, .01, 1e4, 100 },
	[GATE_UP] = { 30, 1, 6e6, 4e3 },
	[DOWN] = { 20, .6, 3e6, 4e3 },
	[JOIN] = { 1, 0, 0, 0 },
	[COMBINE] = { 10, .2, 0, 3e4 },
	[REPACK_BWD] = { 40, 0, 6e6, 0 },
	[DOWN_BWD] = { 40, 1.5, 6e6, 8e3 },
	[GATE_UP_BWD] = { 40, 1.4, 6e6, 8e3 },
	[COMBINE_BWD] = { 12, .25, 0, 3e4 },
	[ATTENTION_BWD] = { 30, 2.4, 1e5, 1e4 },
	[QKV_BWD] = { 25, 1, 2e6, 8e3 },
	[LORA_GRAD] = { 10, .3, 1e5, 8e3 },
	[UPDATE] = { 25, 0, 2e6, 0 },
};

static void *need(void *p)
{
	if (!p) {
		fprintf(stderr, "bench_trace_make: no memory\n");
		exit(1);
	}
	return p;
}

uint64_t make_random(struct run *r)
{
	uint64_t x = r->random += 0x9e3779b97f4a7c15ull;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

/* ---- tensors: the last writer, and readers since ---- */

struct tensor {
	uint32_t writer; /* index + 1, 0: none */
	uint32_t *reader;
	uint32_t n, cap;
};

struct build {
	struct run *r;
	struct tensor *x, *route, *plan, *h, *y, *rows, *copy, *weights, *grad;
	struct job job;
	struct tensor *write[8];
	int n_writes;
};

static struct tensor *tensors(int n)
{
	return need(calloc((size_t)n, sizeof(struct tensor)));
}

static void add_dep(struct run *r, uint32_t dep)
{
	if (r->n_deps == r->dep_cap) {
		r->dep_cap = r->dep_cap ? 2 * r->dep_cap : 1 << 16;
		r->dep = need(realloc(r->dep, (size_t)r->dep_cap * sizeof *r->dep));
	}
	r->dep[r->n_deps++] = dep;
}

static void begin(struct build *b, int kind, int phase, int layer, int group, int part, int rows)
{
	struct job *j = &b->job;

	j->kind = kind;
	j->phase = (uint8_t)phase;
	j->layer = layer;
	j->group = group;
	j->part = part;
	j->rows = rows;
	j->first_dep = b->r->n_deps;
	b->n_writes = 0;
}

static void reads(struct build *b, struct tensor *t)
{
	if (t->writer)
		add_dep(b->r, t->writer - 1);
	if (t->n == t->cap) {
		t->cap = t->cap ? 2 * t->cap : 4;
		t->reader = need(realloc(t->reader, t->cap * sizeof *t->reader));
	}
	t->reader[t->n++] = b->r->n;
}

static void writes(struct build *b, struct tensor *t)
{
	for (uint32_t i = 0; i < t->n; i++)
		if (t->reader[i] != b->r->n)
			add_dep(b->r, t->reader[i]);
	if (!t->n && t->writer)
		add_dep(b->r, t->writer - 1);
	b->write[b->n_writes++] = t;
}

static int ascending(const void *a, const void *b)
{
	uint32_t p = *(const uint32_t *)a, q = *(const uint32_t *)b;

	return p < q ? -1 : p > q;
}

static void end(struct build *b)
{
	struct run *r = b->r;
	struct job *j = &b->job;
	uint32_t n = r->n_deps - j->first_dep, kept = 0, *list = r->dep + j->first_dep;
	double us = cost[j->kind].base + cost[j->kind].row * j->rows;

	if (n)
		qsort(list, n, sizeof *list, ascending);
	for (uint32_t i = 0; i < n; i++)
		if (!kept || list[kept - 1] != list[i])
			list[kept++] = list[i];
	j->n_deps = kept;
	r->n_deps = j->first_dep + kept;
	us *= .9 + .2 * (double)(make_random(r) % 1000) / 1000;
	us *= make_random(r) % 2000 ? 1 : 4; /* something took the core */
	j->start = 0;
	j->stop = (int64_t)(1000 * us);
	j->bytes = cost[j->kind].weights + cost[j->kind].per_row * j->rows;
	j->flops = 4e4 * cost[j->kind].row * j->rows;
	if (r->n == r->cap) {
		r->cap = r->cap ? 2 * r->cap : 1 << 14;
		r->job = need(realloc(r->job, (size_t)r->cap * sizeof *r->job));
	}
	r->job[r->n++] = *j;
	for (int i = 0; i < b->n_writes; i++) {
		b->write[i]->writer = r->n;
		b->write[i]->n = 0;
	}
}

/* ---- routing ---- */

static void route(struct run *r, int step, int layer, int micro)
{
	const struct shape *s = &r->shape;
	int32_t *load = make_loads(r, step, layer, micro);
	int slots = s->tokens * TOP_K, dealt = 0;
	double sum = 0;

	for (int e = 0; e < s->experts; e++)
		sum += pow(e + 1, -s->skew);
	for (int e = 0; e < s->experts; e++) {
		int who = (e * 7 + layer * 13 + step) % s->experts; /* another order per layer */

		load[who] = (int32_t)(slots * pow(e + 1, -s->skew) / sum);
		dealt += load[who];
	}
	for (; dealt < slots; dealt++)
		load[make_random(r) % (uint64_t)s->experts]++;
}

static int rows_of(const struct run *r, int step, int layer, int micro, int group)
{
	const struct shape *s = &r->shape;
	const int32_t *load = make_loads(r, step, layer, micro);
	int rows = 0;

	for (int e = group; e < s->experts; e += s->groups)
		rows += load[e];
	return rows;
}

/* ---- layers ---- */

static void blocks(struct build *b, int kind, int phase, int layer, struct tensor *in,
		   struct tensor *out)
{
	for (int i = 0; i < BLOCKS; i++) {
		begin(b, kind, phase, layer, i, -1, b->r->shape.tokens / BLOCKS);
		if (in)
			for (int k = 0;
			     k < (kind == ATTENTION || kind == ATTENTION_BWD ? i + 1 : 1); k++)
				reads(b, in + (k ? i - k : i));
		writes(b, out + i);
		end(b);
	}
}

/* A group's task: reads the plan, its weights and `in`, writes `out`. */
static void group_task(struct build *b, int kind, int phase, int layer, int g, int p,
		       struct tensor *in, struct tensor *out)
{
	const struct shape *s = &b->r->shape;
	int at = p * s->groups + g;
	int rows = rows_of(b->r, b->job.step - 1, layer, b->job.micro, g);

	begin(b, kind, phase, layer, g, p, rows);
	reads(b, b->plan + layer);
	reads(b, b->weights + (int64_t)layer * s->parts * s->groups + at);
	if (in)
		reads(b, in + at);
	if (b->r->shape.repack && (kind == DOWN_BWD || kind == GATE_UP_BWD))
		reads(b, b->copy + (layer % 2) * s->parts * s->groups + at);
	if (kind == LORA_GRAD)
		writes(b, b->grad + (int64_t)layer * s->parts * s->groups + at);
	else
		writes(b, out + at);
	end(b);
}

static void groups(struct build *b, int kind, int phase, int layer, struct tensor *in,
		   struct tensor *out)
{
	for (int p = 0; p < b->r->shape.parts; p++)
		for (int g = 0; g < b->r->shape.groups; g++)
			group_task(b, kind, phase, layer, g, p, in, out);
}

static void join_rows(struct build *b, int phase, int layer)
{
	const struct shape *s = &b->r->shape;

	begin(b, JOIN, phase, layer, -1, -1, 0);
	for (int i = 0; i < s->parts * s->groups; i++)
		reads(b, b->y + i);
	writes(b, b->rows);
	end(b);
}

static void combine(struct build *b, int kind, int phase, int layer)
{
	for (int i = 0; i < BLOCKS; i++) {
		begin(b, kind, phase, layer, i, -1, b->r->shape.tokens / BLOCKS);
		reads(b, b->rows);
		writes(b, b->x + i);
		end(b);
	}
}

static void forward(struct build *b, int layer)
{
	blocks(b, QKV, MOE_MXT_PHASE_FORWARD, layer, NULL, b->x);
	blocks(b, ATTENTION, MOE_MXT_PHASE_FORWARD, layer, b->x, b->x);
	blocks(b, ROUTE, MOE_MXT_PHASE_FORWARD, layer, b->x, b->route);
	route(b->r, b->job.step - 1, layer, b->job.micro);
	begin(b, PLAN, MOE_MXT_PHASE_FORWARD, layer, -1, -1, b->r->shape.tokens);
	for (int i = 0; i < BLOCKS; i++)
		reads(b, b->route + i);
	writes(b, b->plan + layer);
	end(b);
	groups(b, GATE_UP, MOE_MXT_PHASE_FORWARD, layer, NULL, b->h);
	groups(b, DOWN, MOE_MXT_PHASE_FORWARD, layer, b->h, b->y);
	join_rows(b, MOE_MXT_PHASE_FORWARD, layer);
	combine(b, COMBINE, MOE_MXT_PHASE_FORWARD, layer);
}

static void repack(struct build *b, int layer)
{
	const struct shape *s = &b->r->shape;

	for (int i = 0; i < s->parts * s->groups; i++) {
		begin(b, REPACK_BWD, MOE_MXT_PHASE_BACKWARD, layer, i % s->groups, i / s->groups,
		      0);
		writes(b, b->copy + (layer % 2) * s->parts * s->groups + i);
		end(b);
	}
}

static void backward(struct build *b, int layer)
{
	if (b->r->shape.repack)
		repack(b, layer);
	groups(b, DOWN_BWD, MOE_MXT_PHASE_BACKWARD, layer, b->y, b->h);
	groups(b, GATE_UP_BWD, MOE_MXT_PHASE_BACKWARD, layer, b->h, b->y);
	groups(b, LORA_GRAD, MOE_MXT_PHASE_BACKWARD, layer, b->h, NULL);
	join_rows(b, MOE_MXT_PHASE_BACKWARD, layer);
	combine(b, COMBINE_BWD, MOE_MXT_PHASE_BACKWARD, layer);
	blocks(b, ATTENTION_BWD, MOE_MXT_PHASE_BACKWARD, layer, b->x, b->x);
	blocks(b, QKV_BWD, MOE_MXT_PHASE_BACKWARD, layer, NULL, b->x);
}

static void update(struct build *b)
{
	const struct shape *s = &b->r->shape;

	for (int i = 0; i < s->layers * s->parts * s->groups; i++) {
		begin(b, UPDATE, MOE_MXT_PHASE_UPDATE, i / (s->parts * s->groups), i % s->groups,
		      i / s->groups % s->parts, 0);
		reads(b, b->grad + i);
		writes(b, b->weights + i);
		end(b);
	}
}

static void free_tensors(struct tensor *t, int n)
{
	for (int i = 0; i < n; i++)
		free(t[i].reader);
	free(t);
}

void make_graph(struct run *r)
{
	const struct shape *s = &r->shape;
	int pg = s->parts * s->groups, all = s->layers * pg;
	struct build b = { .r = r,
			   .x = tensors(BLOCKS),
			   .route = tensors(BLOCKS),
			   .plan = tensors(s->layers),
			   .h = tensors(pg),
			   .y = tensors(pg),
			   .rows = tensors(1),
			   .copy = tensors(2 * pg),
			   .weights = tensors(all),
			   .grad = tensors(all) };

	r->random = s->seed;
	r->load = need(calloc((size_t)s->steps * (size_t)s->layers * (size_t)s->micros,
			      (size_t)s->experts * sizeof *r->load));
	for (int step = 1; step <= s->steps; step++) {
		b.job.step = step;
		for (b.job.micro = 0; b.job.micro < s->micros; b.job.micro++) {
			for (int l = 0; l < s->layers; l++)
				forward(&b, l);
			for (int l = s->layers - 1; l >= 0; l--)
				backward(&b, l);
		}
		b.job.micro = 0;
		update(&b);
	}
	free_tensors(b.x, BLOCKS), free_tensors(b.route, BLOCKS), free_tensors(b.plan, s->layers);
	free_tensors(b.h, pg), free_tensors(b.y, pg), free_tensors(b.rows, 1);
	free_tensors(b.copy, 2 * pg), free_tensors(b.weights, all), free_tensors(b.grad, all);
}

void make_free(struct run *r)
{
	free(r->job), free(r->dep), free(r->load), free(r->step_begin);
	free(r->step_submitted), free(r->step_end), free(r->wait_begin);
	memset(r, 0, sizeof *r);
}
