/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trace in memory: what every subcommand of moesaic-trace works on. Read from an .mxt file
 * (docs/trace-format.md) or, by an importer or a test, made by hand and completed by
 * trace_finish(). Depends on libc and engine/trace_read.h alone; no StarPU, no libmoesaic. Times
 * are nanoseconds since the trace's origin; "absent" columns are MOE_MXT_NA in every row, never 0.
 */
#ifndef MOE_TOOLS_TRACE_H
#define MOE_TOOLS_TRACE_H

#include "engine/trace_read.h"

/* What a trace may have, of whatever it is made. */
#define TRACE_MAX_WORKERS 65536
#define TRACE_MAX_KINDS 512
#define TRACE_MAX_TIME ((int64_t)1 << 52) /* ns: 52 days */

#define TRACE_NO_TASK UINT32_MAX

/* One task that has run. Where a column says what it means: engine/trace_format.h. */
struct trace_task {
	int64_t id;
	int64_t submit, ready, pop, start, stop, cpu; /* ns */
	int64_t rows, flops, read, written, local, remote;
	int64_t cycles, instructions, llc_misses;
	int32_t kind, layer, group, slice, part, micro, worker, core;
	int32_t step;
	uint8_t phase; /* enum moe_mxt_phase */
	/* predecessors: trace.pred[first_pred .. + n_pred), those that have run, each once, as indices */
	uint32_t first_pred, n_pred;
	/* successors, likewise in trace.succ; made by trace_finish() */
	uint32_t first_succ, n_succ;
	uint32_t
		prev; /* the task before it on its worker, TRACE_NO_TASK: none; by trace_finish() */
};

struct trace_worker {
	int32_t node, cpu; /* cpu: the operating system's number, -1: not bound */
};

/* A plan's routing: loads[first_load .. + experts). */
struct trace_routing {
	int64_t task, time, tokens, slots; /* task: id */
	int32_t step, layer, micro, experts;
	uint32_t first_load;
};

struct trace_memory {
	int64_t time, bytes;
	int32_t purpose, part; /* purpose: index into trace.purpose */
};

struct trace_counter {
	int64_t time, value;
	int32_t name; /* index into trace.counter_name */
};

struct trace_mark {
	int64_t time, tokens, trained;
	int32_t what, step; /* what: enum moe_mxt_mark */
};

struct trace_host {
	int64_t begin, end;
	int32_t what, thread; /* what: enum moe_mxt_host */
};

/* A step as the metrics see it: tasks [first, first + n) of trace.by_step. */
struct trace_step {
	int32_t step;
	int64_t begin, submitted, end; /* ns; first and last submission (or their marks, where
					  those are wider), last stop */
	int64_t from;		       /* where its own time begins: trace_step_time() */
	int64_t tokens, trained;       /* MOE_MXT_NA: not known */
	uint32_t first, n;
};

struct trace {
	char *header; /* text, "key=value" lines */
	bool ended;   /* stopped in order */
	int64_t lost_bytes;
	int64_t not_run;  /* rows of DEPS without a row in TASKS, inside the slice that was read */
	int64_t bad_rows; /* left out because they say what cannot be, e.g. a task that stops before
			     it starts */
	char bad_row[160]; /* the first of them, "": none */

	struct trace_task *task; /* by ascending id */
	uint32_t n_tasks;
	uint32_t *pred, *succ; /* indices into task */
	uint32_t n_preds;

	char **kind;
	int n_kinds;
	struct trace_worker *worker;
	int n_workers, n_nodes, n_parts;
	int32_t *part_node; /* [n_parts] */
	/* workers of part p: part_worker[part_first[p] .. part_first[p + 1]); NULL: not known */
	int32_t *part_worker;
	uint32_t *part_first; /* [n_parts + 1] */
	bool strict;	      /* a part's tasks run on its workers only (header: placement) */
	bool data_wait;	      /* pop to start is acquiring data; else handles carry none, and it is
				 the runtime's own time (header: data.wait=1) */

	struct trace_routing *routing; /* by time */
	int64_t *load;
	uint32_t n_routing, n_loads;
	struct trace_memory *memory;
	uint32_t n_memory;
	char **purpose;
	int n_purposes;
	struct trace_counter *counter;
	uint32_t n_counters;
	char **counter_name;
	int n_counter_names;
	struct trace_mark *mark;
	uint32_t n_marks;
	struct trace_host *host;
	uint32_t n_hosts;

	struct trace_step *step; /* ascending; step 0 (tasks of no step) is not in it */
	int n_steps;
	uint32_t *by_step;	/* task indices ordered by (step, id) */
	uint32_t *by_worker;	/* task indices ordered by (worker, start) */
	int64_t *stop_before;	/* beside by_worker: the latest stop so far on that worker */
	uint32_t *worker_first; /* [n_workers + 1] into by_worker */
	int n_layers;		/* highest layer + 1 */
	int64_t first, last;	/* first submission, start or mark of a step, last stop; 0, 0
				   without tasks */
};

/* What of a file is read: inclusive; 0-initialise, then set what is wanted. */
struct trace_slice {
	bool steps, layers, times;
	int64_t step[2], layer[2], time[2]; /* time: ns; tasks that overlap it */
};

/* A sort key and what it belongs to. */
struct trace_key {
	int64_t key;
	uint32_t value;
};
/* Ascending by key, stable, linear. false: no memory. */
bool trace_sort(struct trace_key *a, size_t n);

/*
 * Reads a file, or the slice of it (NULL: all). Damage costs the chunks it hits and is counted in
 * lost_bytes. 0, or -1 with one line of text in error: not readable, not a trace, no memory. The
 * trace is freed with trace_free() (of a failed one there is nothing to free).
 */
int trace_read(struct trace *t, const char *path, const struct trace_slice *slice, char *error,
	       size_t size);
/*
 * Completes a trace whose task, pred, kind, worker, ... arrays are set: sorts, makes successors,
 * steps and orders. Checks what the rest relies on (indices in range, start <= stop, workers and
 * kinds known). 0, or -1 with a text.
 */
int trace_finish(struct trace *t, char *error, size_t size);
void trace_free(struct trace *t);

/*
 * Times that every task has, also where a trace does not say: an absent submission counts as before
 * the trace, an absent ready time as the last end of a predecessor, an absent pop as the start.
 */
int64_t trace_submit(const struct trace *t, uint32_t task);
int64_t trace_ready(const struct trace *t, uint32_t task);
static inline int64_t trace_pop(const struct trace *t, uint32_t task)
{
	return t->task[task].pop == MOE_MXT_NA ? t->task[task].start : t->task[task].pop;
}
static inline int64_t trace_duration(const struct trace *t, uint32_t task)
{
	return t->task[task].stop - t->task[task].start;
}
/* Whether a worker may run it: always where placement is soft. */
bool trace_may_run(const struct trace *t, uint32_t task, int worker);
/* Node of a task's remote bytes, -1: not known which. Its part's, or its layer's part's. */
int trace_home(const struct trace *t, uint32_t task);
/* Index of a kind by its name, -1: not in this trace. */
int trace_kind(const struct trace *t, const char *name);

/* The index of the task with that id, TRACE_NO_TASK without. */
uint32_t trace_find(const struct trace *t, int64_t id);

/* A header value, or NULL. Copied into buf. */
const char *trace_value(const struct trace *t, const char *key, char *buf, size_t size);
double trace_number(const struct trace *t, const char *key, double otherwise);

#endif
