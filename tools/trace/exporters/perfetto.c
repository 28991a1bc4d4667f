/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Perfetto's protobuf (a Trace is TracePackets), written by hand: no library, no .proto. Names are
 * interned, so a task takes about 60 bytes and an arrow 18.
 */
#include "tools/trace/metrics.h"
#include "tools/trace/exporter.h"
#include "tools/trace/output.h"

#include <stdlib.h>
#include <string.h>

/* Field numbers: of messages in perfetto's trace packet. */
enum {
	TRACE_PACKET = 1,
	PACKET_TIMESTAMP = 8,
	PACKET_SEQUENCE = 10,
	PACKET_EVENT = 11,
	PACKET_INTERNED = 12,
	PACKET_FLAGS = 13, /* 1: state cleared; 2: needs it */
	PACKET_TRACK = 60,
	TRACK_UUID = 1,
	TRACK_NAME = 2,
	TRACK_PROCESS = 3,
	TRACK_THREAD = 4,
	TRACK_PARENT = 5,
	TRACK_COUNTER = 8,
	PROCESS_PID = 1,
	PROCESS_NAME = 6,
	THREAD_PID = 1,
	THREAD_TID = 2,
	THREAD_NAME = 5,
	COUNTER_UNIT = 3, /* 2: a count; 3: bytes */
	EVENT_ANNOTATION = 4,
	EVENT_TYPE = 9, /* 1: begin; 2: end; 4: counter */
	EVENT_NAME_IID = 10,
	EVENT_TRACK = 11,
	EVENT_NAME = 23,
	EVENT_COUNTER = 30,
	EVENT_FLOW = 47,
	EVENT_FLOW_END = 48,
	ANNOTATION_NAME_IID = 1,
	ANNOTATION_INT = 4,
	ANNOTATION_TEXT = 6,
	INTERNED_EVENT = 2,
	INTERNED_ANNOTATION = 3,
	NAME_IID = 1,
	NAME_TEXT = 2,
};
enum { EVENT_BEGIN = 1, EVENT_END = 2, EVENT_COUNT = 4 };
enum { UUID_WORKERS = 1, UUID_HOST, UUID_STEPS, UUID_READY, UUID_FREE = 16 };
#define SEQUENCE 1

static const char *const annotation[] = { "id",	   "phase",   "step",	"layer",    "group",
					  "slice", "part",    "micro",	"rows",	    "flops",
					  "read",  "written", "cpu_ns", "waited_ns" };
#define ANNOTATIONS (sizeof annotation / sizeof *annotation)

/* A message under construction. Those of one packet are small, but for a task with many arrows. */
struct message {
	uint8_t *data;
	size_t n, cap;
	bool failed;
};

static bool room(struct message *m, size_t n)
{
	size_t cap = m->cap ? m->cap : 256;
	uint8_t *data;

	if (m->n + n <= m->cap)
		return true;
	while (cap < m->n + n)
		cap *= 2;
	data = realloc(m->data, cap);
	if (!data) {
		m->failed = true;
		return false;
	}
	m->data = data;
	m->cap = cap;
	return true;
}

static void put_raw(struct message *m, uint64_t v)
{
	if (room(m, MOE_MXT_VARINT_BYTES))
		m->n += moe_mxt_put(m->data + m->n, v);
}

static void put_varint(struct message *m, int field, uint64_t v)
{
	put_raw(m, (uint64_t)field << 3);
	put_raw(m, v);
}

static void put_bytes(struct message *m, int field, const void *data, size_t n)
{
	put_raw(m, (uint64_t)field << 3 | 2);
	put_raw(m, n);
	if (!n || !room(m, n))
		return;
	memcpy(m->data + m->n, data, n);
	m->n += n;
}

static void put_text(struct message *m, int field, const char *text)
{
	put_bytes(m, field, text, strlen(text));
}

static void put_fixed(struct message *m, int field, uint64_t v)
{
	put_raw(m, (uint64_t)field << 3 | 1);
	for (int i = 0; i < 8 && room(m, 1); i++)
		m->data[m->n++] = (uint8_t)(v >> 8 * i);
}

/* A message inside another, which is emptied. */
static void put_message(struct message *m, int field, struct message *inner)
{
	put_bytes(m, field, inner->data, inner->n);
	m->failed |= inner->failed;
	inner->n = 0;
}

struct perfetto {
	FILE *out;
	const struct trace *trace;
	struct message packet, event, inner, frame;
};

/* Writes the packet as it is and begins another. */
static void end_packet(struct perfetto *p)
{
	put_message(&p->frame, TRACE_PACKET, &p->packet);
	fwrite(p->frame.data, 1, p->frame.n, p->out);
	p->frame.n = 0;
}

static void end_event(struct perfetto *p, int64_t time)
{
	put_varint(&p->packet, PACKET_TIMESTAMP, (uint64_t)(time < 0 ? 0 : time));
	put_varint(&p->packet, PACKET_SEQUENCE, SEQUENCE);
	put_varint(&p->packet, PACKET_FLAGS, 2);
	put_message(&p->packet, PACKET_EVENT, &p->event);
	end_packet(p);
}

static void end_track(struct perfetto *p)
{
	put_message(&p->packet, PACKET_TRACK, &p->event);
	end_packet(p);
}

/* Kinds' names have the numbers 1, 2, ..., so have annotations'. */
static void put_names(struct perfetto *p)
{
	struct message *names = &p->event;

	put_varint(&p->packet, PACKET_SEQUENCE, SEQUENCE);
	put_varint(&p->packet, PACKET_FLAGS, 1);
	for (int i = 0; i < p->trace->n_kinds; i++) {
		put_varint(&p->inner, NAME_IID, (uint64_t)i + 1);
		put_text(&p->inner, NAME_TEXT, p->trace->kind[i]);
		put_message(names, INTERNED_EVENT, &p->inner);
	}
	for (size_t i = 0; i < ANNOTATIONS; i++) {
		put_varint(&p->inner, NAME_IID, i + 1);
		put_text(&p->inner, NAME_TEXT, annotation[i]);
		put_message(names, INTERNED_ANNOTATION, &p->inner);
	}
	put_message(&p->packet, PACKET_INTERNED, names);
	end_packet(p);
}

static void put_process(struct perfetto *p, uint64_t uuid, const char *name)
{
	put_varint(&p->event, TRACK_UUID, uuid);
	put_varint(&p->inner, PROCESS_PID, uuid);
	put_text(&p->inner, PROCESS_NAME, name);
	put_message(&p->event, TRACK_PROCESS, &p->inner);
	end_track(p);
}

static void put_thread(struct perfetto *p, uint64_t uuid, uint64_t parent, const char *name)
{
	put_varint(&p->event, TRACK_UUID, uuid);
	put_varint(&p->event, TRACK_PARENT, parent);
	put_varint(&p->inner, THREAD_PID, parent);
	put_varint(&p->inner, THREAD_TID, uuid);
	put_text(&p->inner, THREAD_NAME, name);
	put_message(&p->event, TRACK_THREAD, &p->inner);
	end_track(p);
}

static void put_counter(struct perfetto *p, uint64_t uuid, const char *name, int unit)
{
	put_varint(&p->event, TRACK_UUID, uuid);
	put_varint(&p->event, TRACK_PARENT, UUID_WORKERS);
	put_text(&p->event, TRACK_NAME, name);
	put_varint(&p->inner, COUNTER_UNIT, (uint64_t)unit);
	put_message(&p->event, TRACK_COUNTER, &p->inner);
	end_track(p);
}

static void annotate(struct perfetto *p, int which, int64_t v, int64_t none)
{
	if (v == none || v == MOE_MXT_NA)
		return;
	put_varint(&p->inner, ANNOTATION_NAME_IID, (uint64_t)which + 1);
	put_varint(&p->inner, ANNOTATION_INT, (uint64_t)v);
	put_message(&p->event, EVENT_ANNOTATION, &p->inner);
}

static void annotate_task(struct perfetto *p, const struct trace_task *k)
{
	annotate(p, 0, k->id, MOE_MXT_NA);
	put_varint(&p->inner, ANNOTATION_NAME_IID, 2);
	put_text(&p->inner, ANNOTATION_TEXT, trace_named(moe_mxt_phase_name(k->phase)));
	put_message(&p->event, EVENT_ANNOTATION, &p->inner);
	annotate(p, 2, k->step, 0);
	annotate(p, 3, k->layer, -1);
	annotate(p, 4, k->group, -1);
	annotate(p, 5, k->slice, -1);
	annotate(p, 6, k->part, -1);
	annotate(p, 7, k->micro, -1);
	annotate(p, 8, k->rows, MOE_MXT_NA);
	annotate(p, 9, k->flops, MOE_MXT_NA);
	annotate(p, 10, k->read, MOE_MXT_NA);
	annotate(p, 11, k->written, MOE_MXT_NA);
	annotate(p, 12, k->cpu, MOE_MXT_NA);
	if (k->ready != MOE_MXT_NA)
		annotate(p, 13, k->start - k->ready, MOE_MXT_NA);
}

/* Arrows are numbered by their dependency. */
static void put_task(struct perfetto *p, const struct trace_export *x, uint32_t task,
		     const uint32_t *succ_edge, uint64_t uuid)
{
	const struct trace *t = x->trace;
	const struct trace_task *k = t->task + task;

	put_varint(&p->event, EVENT_TYPE, EVENT_BEGIN);
	put_varint(&p->event, EVENT_TRACK, uuid);
	put_varint(&p->event, EVENT_NAME_IID, (uint64_t)k->kind + 1);
	annotate_task(p, k);
	for (uint32_t i = 0; i < k->n_succ; i++)
		if (x->arrow[succ_edge[k->first_succ + i]])
			put_fixed(&p->event, EVENT_FLOW, succ_edge[k->first_succ + i] + 1ull);
	for (uint32_t e = k->first_pred; e < k->first_pred + k->n_pred; e++)
		if (x->arrow[e])
			put_fixed(&p->event, EVENT_FLOW_END, e + 1ull);
	end_event(p, k->start);
	put_varint(&p->event, EVENT_TYPE, EVENT_END);
	put_varint(&p->event, EVENT_TRACK, uuid);
	end_event(p, k->stop);
}

/* Beside trace.succ: which dependency it is. NULL: no memory. */
static uint32_t *successor_edges(const struct trace *t)
{
	uint32_t *at = calloc((size_t)t->n_tasks + 1, sizeof *at);
	uint32_t *edge = calloc((size_t)t->n_preds + 1, sizeof *edge);

	for (uint32_t i = 0; at && edge && i < t->n_tasks; i++) {
		const struct trace_task *k = t->task + i;

		for (uint32_t e = k->first_pred; e < k->first_pred + k->n_pred; e++) {
			uint32_t p = t->pred[e];

			edge[t->task[p].first_succ + at[p]++] = e;
		}
	}
	if (!at) {
		free(edge);
		edge = NULL;
	}
	free(at);
	return edge;
}

static int put_tasks(struct perfetto *p, const struct trace_export *x, uint64_t *uuid)
{
	const struct trace *t = x->trace;
	int *tracks = NULL;
	uint8_t *track = trace_tracks(t, &tracks);
	uint32_t *succ_edge = successor_edges(t);
	bool complete = track && succ_edge;
	char name[80];

	for (int w = 0; complete && w < t->n_workers; w++) {
		for (int i = 0; i < tracks[w]; i++) {
			snprintf(name, sizeof name, i ? "worker %d, overlapping (%d)" : "worker %d",
				 w, i);
			put_thread(p, *uuid + (uint64_t)i, UUID_WORKERS, name);
		}
		for (uint32_t i = t->worker_first[w]; i < t->worker_first[w + 1]; i++)
			put_task(p, x, t->by_worker[i], succ_edge, *uuid + track[t->by_worker[i]]);
		*uuid += (uint64_t)tracks[w];
	}
	free(track);
	free(tracks);
	free(succ_edge);
	return complete ? 0 : -1;
}

static void put_change(struct perfetto *p, uint64_t uuid, const struct trace_change *c)
{
	put_varint(&p->event, EVENT_TYPE, EVENT_COUNT);
	put_varint(&p->event, EVENT_TRACK, uuid);
	put_varint(&p->event, EVENT_COUNTER, (uint64_t)c->value);
	end_event(p, c->time);
}

static int put_counters(struct perfetto *p, uint64_t *uuid)
{
	const struct trace *t = p->trace;
	uint32_t n_ready = 0, n_memory = 0;
	struct trace_change *ready = trace_ready_changes(t, &n_ready);
	struct trace_change *memory = trace_memory_changes(t, &n_memory);
	bool complete = ready && memory;
	char name[120];

	if (complete) {
		put_counter(p, UUID_READY, "ready tasks", 2);
		for (uint32_t i = 0; i < n_ready; i++)
			put_change(p, UUID_READY, ready + i);
		for (int i = 0; i < t->n_purposes; i++) {
			snprintf(name, sizeof name, "memory: %s", t->purpose[i]);
			put_counter(p, *uuid + (uint64_t)i, name, 3);
		}
		for (uint32_t i = 0; i < n_memory; i++)
			put_change(p, *uuid + (uint64_t)memory[i].what, memory + i);
		*uuid += (uint64_t)t->n_purposes;
	}
	free(ready);
	free(memory);
	return complete ? 0 : -1;
}

static void put_slice(struct perfetto *p, uint64_t uuid, const char *name, int64_t begin,
		      int64_t end)
{
	put_varint(&p->event, EVENT_TYPE, EVENT_BEGIN);
	put_varint(&p->event, EVENT_TRACK, uuid);
	put_text(&p->event, EVENT_NAME, name);
	end_event(p, begin);
	put_varint(&p->event, EVENT_TYPE, EVENT_END);
	put_varint(&p->event, EVENT_TRACK, uuid);
	end_event(p, end);
}

static int put_host(struct perfetto *p, uint64_t *uuid)
{
	struct trace_host_tracks h;
	char name[80];

	if (trace_host_tracks(p->trace, &h))
		return -1;
	if (h.n_tracks)
		put_process(p, UUID_HOST, "submission and waiting");
	for (int i = 0; i < h.n_tracks; i++) {
		snprintf(name, sizeof name, "%s, thread %d",
			 trace_named(moe_mxt_host_name(h.track[i].what)), (int)h.track[i].thread);
		put_thread(p, *uuid + (uint64_t)i, UUID_HOST, name);
	}
	for (uint32_t i = 0; i < h.n; i++)
		put_slice(p, *uuid + (uint64_t)h.slice[i].track,
			  trace_named(moe_mxt_host_name(h.track[h.slice[i].track].what)),
			  h.slice[i].begin, h.slice[i].end);
	*uuid += (uint64_t)h.n_tracks;
	trace_host_tracks_free(&h);
	return 0;
}

static void put_steps(struct perfetto *p, uint64_t *uuid)
{
	const struct trace *t = p->trace;
	char name[40];

	if (!t->n_steps)
		return;
	put_process(p, UUID_STEPS, "steps");
	put_thread(p, *uuid, UUID_STEPS, "steps");
	for (int i = 0; i < t->n_steps; i++) {
		int64_t begin, end;

		trace_step_time(t, i, &begin, &end);
		snprintf(name, sizeof name, "step %d", (int)t->step[i].step);
		if (begin < end)
			put_slice(p, *uuid, name, begin, end);
	}
	++*uuid;
}

static int write_perfetto(const struct trace_export *x, const char *path, char *error, size_t size)
{
	struct perfetto p = { .trace = x->trace };
	uint64_t uuid = UUID_FREE;
	struct trace_output o;
	int rc;

	if (trace_output_open(&o, path, error, size))
		return -1;
	p.out = o.file;
	put_names(&p);
	put_process(&p, UUID_WORKERS, "workers");
	rc = put_tasks(&p, x, &uuid);
	if (rc == 0)
		rc = put_counters(&p, &uuid);
	if (rc == 0)
		rc = put_host(&p, &uuid);
	put_steps(&p, &uuid);
	if (p.packet.failed || p.event.failed || p.inner.failed || p.frame.failed)
		rc = -1;
	if (rc)
		snprintf(error, size, "out of memory");
	free(p.packet.data);
	free(p.event.data);
	free(p.inner.data);
	free(p.frame.data);
	if (trace_output_close(&o, rc == 0, error, size))
		rc = -1;
	return rc;
}

const struct trace_exporter trace_exporter_perfetto = {
	.name = "perfetto",
	.summary = "for Perfetto and its trace_processor; whole traces",
	.suffix = ".pftrace",
	.arrows = TRACE_ARROWS_ALL,
	.write = write_perfetto,
};
