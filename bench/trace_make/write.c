/* SPDX-License-Identifier: Apache-2.0 */
/* The run as an .mxt file. */
#include "bench/trace_make/make.h"

#include "engine/trace_write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 8192

static void header(const struct run *r, struct moe_mxt_writer *w)
{
	const struct shape *s = &r->shape;
	int nodes = s->parts < s->workers ? s->parts : s->workers, kinds = 0;
	struct moe_mxt_text t = { 0 };
	char key[40];

	moe_mxt_put_text(&t, "moesaic.version", "0.1.0");
	moe_mxt_put_text(&t, "moesaic.revision", "made by bench_trace_make");
	moe_mxt_put_format(&t, "origin.monotonic_ns", "%d", 0);
	moe_mxt_put_format(&t, "origin.realtime_ns", "%lld", 1700000000000000000ll);
	moe_mxt_put_text(&t, "host.cpu", "none: a made-up run");
	moe_mxt_put_format(&t, "host.cpus", "%d", s->workers);
	moe_mxt_put_text(&t, "host.load", "0.00");
	moe_mxt_put_format(&t, "topology.nodes", "%d", nodes);
	moe_mxt_put_format(&t, "topology.cores", "%d", s->workers);
	moe_mxt_put_format(&t, "topology.fake", "%d", 1);
	moe_mxt_put_format(&t, "workers", "%d", s->workers);
	for (int i = 0; i < s->workers; i++) {
		snprintf(key, sizeof key, "worker.%d.node", i);
		moe_mxt_put_format(&t, key, "%d", i % nodes);
		snprintf(key, sizeof key, "worker.%d.cpu", i);
		moe_mxt_put_format(&t, key, "%d", i);
	}
	moe_mxt_put_format(&t, "parts", "%d", s->parts);
	for (int p = 0; p < s->parts; p++) {
		char list[4000] = "";
		size_t n = 0;

		for (int i = p % nodes; i < s->workers && n < sizeof list - 16; i += nodes)
			n += (size_t)snprintf(list + n, sizeof list - n, "%s%d", n ? "," : "", i);
		snprintf(key, sizeof key, "part.%d.node", p);
		moe_mxt_put_format(&t, key, "%d", p % nodes);
		snprintf(key, sizeof key, "part.%d.workers", p);
		moe_mxt_put_text(&t, key, list);
	}
	moe_mxt_put_text(&t, "policy", "fifo");
	moe_mxt_put_text(&t, "placement", "soft");
	moe_mxt_put_format(&t, "rates.measured", "%d", 0);
	moe_mxt_put_format(&t, "rates.read_gbps", "%d", 20);
	moe_mxt_put_format(&t, "rates.read_all_gbps", "%d", 20 * s->workers);
	moe_mxt_put_format(&t, "rates.peak_gflops", "%d", 100);
	for (; make_kind[kinds]; kinds++) {
		snprintf(key, sizeof key, "kind.%d", kinds);
		moe_mxt_put_text(&t, key, make_kind[kinds]);
	}
	moe_mxt_put_format(&t, "kinds", "%d", kinds);
	moe_mxt_put_text(&t, "hardware", "n/a: a made-up run");
	moe_mxt_put_format(&t, "config.seed", "%llu", (unsigned long long)s->seed);
	moe_mxt_write_header(w, t.text);
	free(t.text);
}

static void add_task(const struct run *r, struct moe_mxt_table *t, uint32_t i)
{
	const struct job *j = &r->job[i];
	int nodes = r->shape.parts < r->shape.workers ? r->shape.parts : r->shape.workers;
	int64_t bytes = (int64_t)j->bytes;
	bool placed = j->part >= 0, here = placed && j->part % nodes == j->worker % nodes;

	moe_mxt_add(t, MOE_MXT_TASK_ID, (int64_t)i + 1);
	moe_mxt_add(t, MOE_MXT_TASK_KIND, j->kind);
	moe_mxt_add(t, MOE_MXT_TASK_PHASE, j->phase);
	moe_mxt_add(t, MOE_MXT_TASK_LAYER, j->layer);
	moe_mxt_add(t, MOE_MXT_TASK_GROUP, j->group);
	moe_mxt_add(t, MOE_MXT_TASK_SLICE, -1);
	moe_mxt_add(t, MOE_MXT_TASK_PART, j->part);
	moe_mxt_add(t, MOE_MXT_TASK_MICRO, j->micro);
	moe_mxt_add(t, MOE_MXT_TASK_STEP, j->step);
	moe_mxt_add(t, MOE_MXT_TASK_WORKER, j->worker);
	moe_mxt_add(t, MOE_MXT_TASK_SUBMIT, j->submit);
	moe_mxt_add(t, MOE_MXT_TASK_READY, j->ready);
	moe_mxt_add(t, MOE_MXT_TASK_POP, j->pop);
	moe_mxt_add(t, MOE_MXT_TASK_START, j->start);
	moe_mxt_add(t, MOE_MXT_TASK_STOP, j->stop);
	moe_mxt_add(t, MOE_MXT_TASK_CPU, j->stop - j->start);
	moe_mxt_add(t, MOE_MXT_TASK_CORE, j->worker);
	moe_mxt_add(t, MOE_MXT_TASK_ROWS, j->rows);
	moe_mxt_add(t, MOE_MXT_TASK_FLOPS, (int64_t)j->flops);
	moe_mxt_add(t, MOE_MXT_TASK_READ, bytes);
	moe_mxt_add(t, MOE_MXT_TASK_WRITTEN, bytes / 4);
	moe_mxt_add(t, MOE_MXT_TASK_LOCAL, here ? bytes : 0);
	moe_mxt_add(t, MOE_MXT_TASK_REMOTE, placed && !here ? bytes : 0);
	moe_mxt_row(t, j->start, j->stop, (int64_t)i + 1, j->step, j->layer);
}

static void add_deps(const struct run *r, struct moe_mxt_table *t, uint32_t i)
{
	const struct job *j = &r->job[i];

	moe_mxt_add(t, MOE_MXT_DEP_ID, (int64_t)i + 1);
	moe_mxt_add(t, MOE_MXT_DEP_KIND, j->kind);
	moe_mxt_add(t, MOE_MXT_DEP_LAYER, j->layer);
	moe_mxt_add(t, MOE_MXT_DEP_MICRO, j->micro);
	moe_mxt_add(t, MOE_MXT_DEP_STEP, j->step);
	moe_mxt_add(t, MOE_MXT_DEP_SUBMIT, j->submit);
	moe_mxt_add(t, MOE_MXT_DEP_COUNT, j->n_deps);
	for (uint32_t d = 0; d < j->n_deps; d++)
		moe_mxt_add(t, MOE_MXT_DEP_BACK, (int64_t)i - r->dep[j->first_dep + d]);
	moe_mxt_row(t, j->submit, j->submit, (int64_t)i + 1, j->step, j->layer);
}

static void tasks(const struct run *r, struct moe_mxt_writer *w)
{
	struct moe_mxt_table t, d;

	moe_mxt_table_init(&t, MOE_MXT_TASKS);
	moe_mxt_table_init(&d, MOE_MXT_DEPS);
	for (uint32_t i = 0; i < r->n; i++) {
		add_task(r, &t, i);
		add_deps(r, &d, i);
		if ((i + 1) % CHUNK && i + 1 < r->n)
			continue;
		moe_mxt_write(w, &d);
		moe_mxt_write(w, &t);
	}
	moe_mxt_table_free(&t);
	moe_mxt_table_free(&d);
}

static void routing(const struct run *r, struct moe_mxt_writer *w)
{
	const struct shape *s = &r->shape;
	struct moe_mxt_table t;

	moe_mxt_table_init(&t, MOE_MXT_ROUTING);
	for (uint32_t i = 0; i < r->n; i++) {
		const struct job *j = &r->job[i];
		const int32_t *load = make_loads(r, j->step - 1, j->layer, j->micro);

		if (strcmp(make_kind[j->kind], "plan"))
			continue;
		moe_mxt_add(&t, MOE_MXT_ROUTING_TASK, (int64_t)i + 1);
		moe_mxt_add(&t, MOE_MXT_ROUTING_STEP, j->step);
		moe_mxt_add(&t, MOE_MXT_ROUTING_LAYER, j->layer);
		moe_mxt_add(&t, MOE_MXT_ROUTING_MICRO, j->micro);
		moe_mxt_add(&t, MOE_MXT_ROUTING_TIME, j->stop);
		moe_mxt_add(&t, MOE_MXT_ROUTING_TOKENS, s->tokens);
		moe_mxt_add(&t, MOE_MXT_ROUTING_SLOTS, (int64_t)s->tokens * TOP_K);
		moe_mxt_add(&t, MOE_MXT_ROUTING_EXPERTS, s->experts);
		for (int e = 0; e < s->experts; e++)
			moe_mxt_add(&t, MOE_MXT_ROUTING_LOADS, load[e]);
		moe_mxt_row(&t, j->stop, j->stop, (int64_t)i + 1, j->step, j->layer);
		if (t.head.rows == CHUNK)
			moe_mxt_write(w, &t);
	}
	moe_mxt_write(w, &t);
	moe_mxt_table_free(&t);
}

static void mark(struct moe_mxt_table *t, int64_t time, int what, int step, int64_t tokens)
{
	moe_mxt_add(t, MOE_MXT_MARK_TIME, time);
	moe_mxt_add(t, MOE_MXT_MARK_WHAT, what);
	moe_mxt_add(t, MOE_MXT_MARK_STEP, step);
	moe_mxt_add(t, MOE_MXT_MARK_TOKENS, tokens);
	moe_mxt_add(t, MOE_MXT_MARK_TRAINED, tokens / 2);
	moe_mxt_row(t, time, time, MOE_MXT_NA, step, -1);
}

static void host(struct moe_mxt_table *t, int what, int64_t from, int64_t to)
{
	moe_mxt_add(t, MOE_MXT_HOST_WHAT, what);
	moe_mxt_add(t, MOE_MXT_HOST_THREAD, 1);
	moe_mxt_add(t, MOE_MXT_HOST_BEGIN, from);
	moe_mxt_add(t, MOE_MXT_HOST_END, to);
	moe_mxt_row(t, from, to, MOE_MXT_NA, MOE_MXT_NA, -1);
}

static void steps(const struct run *r, struct moe_mxt_writer *w)
{
	int64_t tokens = (int64_t)r->shape.tokens * r->shape.micros;
	struct moe_mxt_table m, h;

	moe_mxt_table_init(&m, MOE_MXT_MARKS);
	moe_mxt_table_init(&h, MOE_MXT_HOST);
	for (int s = 0; s < r->shape.steps; s++) {
		mark(&m, r->step_begin[s], MOE_MXT_STEP_BEGIN, s + 1, tokens);
		mark(&m, r->step_submitted[s], MOE_MXT_STEP_SUBMITTED, s + 1, tokens);
		mark(&m, r->step_end[s], MOE_MXT_STEP_END, s + 1, tokens);
		host(&h, MOE_MXT_HOST_SUBMIT, r->step_begin[s], r->step_submitted[s]);
		if (s >= 2 && r->step_begin[s] > r->wait_begin[s])
			host(&h, MOE_MXT_HOST_WAIT, r->wait_begin[s], r->step_begin[s]);
	}
	moe_mxt_write(w, &m);
	moe_mxt_write(w, &h);
	moe_mxt_table_free(&m);
	moe_mxt_table_free(&h);
}

static void memory(const struct run *r, struct moe_mxt_writer *w)
{
	static const char *const purpose[] = { "weights", "activations", "rss" };
	int64_t last = r->step_end[r->shape.steps - 1];
	struct moe_mxt_table t;

	moe_mxt_table_init(&t, MOE_MXT_MEMORY);
	for (int p = 0; p < 3; p++)
		moe_mxt_add_text(&t, MOE_MXT_MEMORY_NAMES, purpose[p]);
	for (int i = 0; i < 100; i++)
		for (int p = 0; p < 3; p++) {
			int64_t wave = (int64_t)(i % 20) * 50000000;

			moe_mxt_add(&t, MOE_MXT_MEMORY_TIME, last / 100 * i);
			moe_mxt_add(&t, MOE_MXT_MEMORY_PURPOSE, p);
			moe_mxt_add(&t, MOE_MXT_MEMORY_PART, p == 2 ? -1 : 0);
			moe_mxt_add(&t, MOE_MXT_MEMORY_BYTES,
				    p == 0   ? 4000000000
				    : p == 1 ? 100000000 + wave
					     : 4200000000 + wave);
			moe_mxt_row(&t, last / 100 * i, last / 100 * i, MOE_MXT_NA, MOE_MXT_NA, -1);
		}
	moe_mxt_write(w, &t);
	moe_mxt_table_free(&t);
}

static void counters(const struct run *r, struct moe_mxt_writer *w)
{
	static const char *const name[] = { "submitted",      "executed",  "lost_executed",
					    "lost_submitted", "lost_host", "remote" };
	int64_t last = r->step_end[r->shape.steps - 1];
	struct moe_mxt_table t;

	moe_mxt_table_init(&t, MOE_MXT_END);
	for (int i = 0; i < 6; i++)
		moe_mxt_add_text(&t, MOE_MXT_COUNTER_NAMES, name[i]);
	for (int i = 0; i < 6; i++) {
		moe_mxt_add(&t, MOE_MXT_COUNTER_TIME, last);
		moe_mxt_add(&t, MOE_MXT_COUNTER_NAME, i);
		moe_mxt_add(&t, MOE_MXT_COUNTER_VALUE, i < 2 ? (int64_t)r->n : 0);
		moe_mxt_row(&t, last, last, MOE_MXT_NA, MOE_MXT_NA, -1);
	}
	moe_mxt_write(w, &t);
	moe_mxt_table_free(&t);
}

bool make_write(const struct run *r, const char *path)
{
	struct moe_mxt_writer w;

	if (moe_mxt_create(&w, path)) {
		header(r, &w);
		tasks(r, &w);
		routing(r, &w);
		steps(r, &w);
		memory(r, &w);
		counters(r, &w);
	}
	if (moe_mxt_finish(&w))
		return true;
	fprintf(stderr, "bench_trace_make: %s: %s\n", path, w.error);
	return false;
}
