/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chrome's JSON. It is large (170 bytes a task, as many an arrow), so a window of a trace is what
 * it is for; perfetto takes whole ones.
 */
#include "tools/trace/exporter.h"
#include "tools/trace/metrics.h"
#include "tools/trace/output.h"

#include <stdlib.h>

#define MOST_TASKS 400000 /* 160 MB; what reads this format gives up at 256 */

enum { PID_WORKERS = 1, PID_HOST, PID_STEPS };

struct chrome {
	FILE *out;
	const struct trace *trace;
	const char *between;
};

static void event(struct chrome *c)
{
	fputs(c->between, c->out);
	c->between = ",\n";
}

/* Microseconds, to the nanosecond. */
static void put_time(struct chrome *c, const char *name, int64_t ns)
{
	uint64_t u = ns < 0 ? 0 - (uint64_t)ns : (uint64_t)ns;

	fprintf(c->out, ",\"%s\":%s%llu.%03u", name, ns < 0 ? "-" : "",
		(unsigned long long)(u / 1000), (unsigned)(u % 1000));
}

static void put_name(struct chrome *c, const char *what, int pid, int tid, const char *name)
{
	event(c);
	fprintf(c->out,
		"{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":", what,
		pid, tid);
	trace_json_quote(c->out, name);
	fputs("}}", c->out);
}

static void put_tracks(struct chrome *c, const int *tracks)
{
	int tid = 1;
	char name[80];

	put_name(c, "process_name", PID_WORKERS, 0, "workers");
	for (int w = 0; w < c->trace->n_workers; w++)
		for (int i = 0; i < tracks[w]; i++) {
			snprintf(name, sizeof name, i ? "worker %d, overlapping (%d)" : "worker %d",
				 w, i);
			put_name(c, "thread_name", PID_WORKERS, tid++, name);
		}
}

static void put_number(struct chrome *c, const char *name, int64_t v, int64_t none)
{
	if (v != none && v != MOE_MXT_NA)
		fprintf(c->out, ",\"%s\":%lld", name, (long long)v);
}

static void put_task(struct chrome *c, const struct trace_task *k, int tid)
{
	event(c);
	fputs("{\"ph\":\"X\",\"name\":", c->out);
	trace_json_quote(c->out, c->trace->kind[k->kind]);
	fprintf(c->out, ",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d",
		trace_named(moe_mxt_phase_name(k->phase)), PID_WORKERS, tid);
	put_time(c, "ts", k->start);
	put_time(c, "dur", k->stop - k->start);
	fprintf(c->out, ",\"args\":{\"id\":%lld", (long long)k->id);
	put_number(c, "step", k->step, 0);
	put_number(c, "layer", k->layer, -1);
	put_number(c, "group", k->group, -1);
	put_number(c, "slice", k->slice, -1);
	put_number(c, "part", k->part, -1);
	put_number(c, "micro", k->micro, -1);
	put_number(c, "rows", k->rows, MOE_MXT_NA);
	put_number(c, "flops", k->flops, MOE_MXT_NA);
	put_number(c, "read", k->read, MOE_MXT_NA);
	put_number(c, "written", k->written, MOE_MXT_NA);
	put_number(c, "cpu_ns", k->cpu, MOE_MXT_NA);
	if (k->ready != MOE_MXT_NA)
		put_number(c, "waited_ns", k->start - k->ready, MOE_MXT_NA);
	fputs("}}", c->out);
}

/* An arrow binds to the slices around its ends: it leaves at the last moment of the first one. */
static void put_arrow(struct chrome *c, uint32_t id, const struct trace_task *from, int from_tid,
		      const struct trace_task *to, int to_tid)
{
	event(c);
	fprintf(c->out,
		"{\"ph\":\"s\",\"cat\":\"dependency\",\"name\":\"dependency\",\"id\":%u,\"pid\":%d,"
		"\"tid\":%d",
		id, PID_WORKERS, from_tid);
	put_time(c, "ts", from->stop > from->start ? from->stop - 1 : from->start);
	fputs("},\n", c->out);
	fprintf(c->out,
		"{\"ph\":\"f\",\"bp\":\"e\",\"cat\":\"dependency\",\"name\":\"dependency\",\"id\":%"
		"u,"
		"\"pid\":%d,\"tid\":%d",
		id, PID_WORKERS, to_tid);
	put_time(c, "ts", to->start);
	putc('}', c->out);
}

static void put_counters(struct chrome *c, const struct trace_change *v, uint32_t n, bool memory)
{
	for (uint32_t i = 0; i < n; i++) {
		char name[120];

		snprintf(name, sizeof name, "%s%s", memory ? "memory: " : "ready tasks",
			 memory ? c->trace->purpose[v[i].what] : "");
		event(c);
		fputs("{\"ph\":\"C\",\"name\":", c->out);
		trace_json_quote(c->out, name);
		fprintf(c->out, ",\"pid\":%d", PID_WORKERS);
		put_time(c, "ts", v[i].time);
		fprintf(c->out, ",\"args\":{\"%s\":%lld}}", memory ? "bytes" : "tasks",
			(long long)v[i].value);
	}
}

static int put_host(struct chrome *c)
{
	const struct trace *t = c->trace;
	struct trace_host_tracks h;
	char name[80];

	if (trace_host_tracks(t, &h))
		return -1;
	if (h.n_tracks)
		put_name(c, "process_name", PID_HOST, 0, "submission and waiting");
	for (int i = 0; i < h.n_tracks; i++) {
		snprintf(name, sizeof name, "%s, thread %d",
			 trace_named(moe_mxt_host_name(h.track[i].what)), (int)h.track[i].thread);
		put_name(c, "thread_name", PID_HOST, i + 1, name);
	}
	for (uint32_t i = 0; i < h.n; i++) {
		event(c);
		fputs("{\"ph\":\"X\",\"name\":", c->out);
		trace_json_quote(c->out,
				 trace_named(moe_mxt_host_name(h.track[h.slice[i].track].what)));
		fprintf(c->out, ",\"pid\":%d,\"tid\":%d", PID_HOST, h.slice[i].track + 1);
		put_time(c, "ts", h.slice[i].begin);
		put_time(c, "dur", h.slice[i].end - h.slice[i].begin);
		putc('}', c->out);
	}
	trace_host_tracks_free(&h);
	return 0;
}

static void put_steps(struct chrome *c)
{
	const struct trace *t = c->trace;

	if (t->n_steps) {
		put_name(c, "process_name", PID_STEPS, 0, "steps");
		put_name(c, "thread_name", PID_STEPS, 1, "steps");
	}
	for (int i = 0; i < t->n_steps; i++) {
		int64_t begin, end;

		trace_step_time(t, i, &begin, &end);
		if (begin >= end)
			continue;
		event(c);
		fprintf(c->out, "{\"ph\":\"X\",\"name\":\"step %d\",\"pid\":%d,\"tid\":1",
			(int)t->step[i].step, PID_STEPS);
		put_time(c, "ts", begin);
		put_time(c, "dur", end - begin);
		putc('}', c->out);
	}
}

/* Tids of workers' tracks count up from 1, in order of worker and track. */
static int put_all(struct chrome *c, const struct trace_export *x)
{
	const struct trace *t = x->trace;
	int *tracks = NULL, *first = calloc((size_t)t->n_workers + 1, sizeof *first);
	uint8_t *track = trace_tracks(t, &tracks);
	uint32_t n_ready = 0, n_memory = 0;
	struct trace_change *ready = trace_ready_changes(t, &n_ready);
	struct trace_change *memory = trace_memory_changes(t, &n_memory);
	bool complete = first && track && ready && memory;

	for (int w = 0, tid = 1; complete && w < t->n_workers; tid += tracks[w++])
		first[w] = tid;
	if (complete) {
		put_tracks(c, tracks);
		put_steps(c);
		for (uint32_t i = 0; i < t->n_tasks; i++)
			put_task(c, t->task + i, first[t->task[i].worker] + track[i]);
		for (uint32_t i = 0; i < t->n_tasks; i++)
			for (uint32_t e = t->task[i].first_pred;
			     e < t->task[i].first_pred + t->task[i].n_pred; e++) {
				uint32_t p = t->pred[e];

				if (x->arrow[e])
					put_arrow(c, e + 1, t->task + p,
						  first[t->task[p].worker] + track[p], t->task + i,
						  first[t->task[i].worker] + track[i]);
			}
		put_counters(c, ready, n_ready, false);
		put_counters(c, memory, n_memory, true);
		complete = put_host(c) == 0;
	}
	free(first);
	free(track);
	free(tracks);
	free(ready);
	free(memory);
	return complete ? 0 : -1;
}

static int write_chrome(const struct trace_export *x, const char *path, char *error, size_t size)
{
	struct chrome c = { .trace = x->trace, .between = "" };
	struct trace_output o;
	int rc;

	if (x->trace->n_tasks > MOST_TASKS) {
		snprintf(error, size,
			 "%u tasks are more than viewers of this format open (%d): choose a window "
			 "with "
			 "--step or --time, or --to perfetto",
			 x->trace->n_tasks, MOST_TASKS);
		return -1;
	}
	if (trace_output_open(&o, path, error, size))
		return -1;
	c.out = o.file;
	fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n", c.out);
	rc = put_all(&c, x);
	fputs("\n]}\n", c.out);
	if (rc)
		snprintf(error, size, "out of memory");
	if (trace_output_close(&o, rc == 0, error, size))
		rc = -1;
	return rc;
}

const struct trace_exporter trace_exporter_chrome = {
	.name = "chrome",
	.summary = "JSON for chrome://tracing and others; large: for a window",
	.suffix = ".json",
	.arrows = TRACE_ARROWS_NONE,
	.write = write_chrome,
};
