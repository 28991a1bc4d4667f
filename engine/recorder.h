/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The trace recorder. Producers put records into rings and never wait: each worker into its own,
 * whoever submits (under the engine's lock) into one, other threads into one behind a mutex, off
 * the tasks' path. One background thread packs and writes (engine/recorder_drain.c). Times are
 * CLOCK_MONOTONIC ns.
 *
 * e->recorder changes only under e->lock while no task is outstanding, so a task may use what it
 * finds.
 */
#ifndef MOE_ENGINE_RECORDER_H
#define MOE_ENGINE_RECORDER_H

#include "engine/hardware.h"
#include "engine/internal.h"
#include "engine/ring.h"
#include "engine/trace_write.h"

enum moe_traced {
	MOE_TRACED_TASK = 1,
	MOE_TRACED_ROUTING,
	MOE_TRACED_DEPS,
	MOE_TRACED_HOST,
	MOE_TRACED_MARK
};

/* Ring records; the first field says which. */
struct moe_traced_task {
	int32_t what, worker;
	uint64_t id;
	struct moe_tag tag;
	int64_t submit, ready, pop, start, stop, cpu;
	int32_t core;
	bool modelled; /* flops, read and written are known */
	enum moe_home home;
	double flops, weights, read, written;
	int64_t hardware[MOE_HARDWARE_COUNTERS];
};

struct moe_traced_routing {
	int32_t what, n;
	uint64_t id;
	struct moe_tag tag;
	int64_t time, slots;
	int32_t load[]; /* [n] */
};

struct moe_traced_deps {
	int32_t what, n;
	uint64_t id;
	struct moe_tag tag;
	int64_t submit;
	uint32_t back[]; /* [n] id - predecessor, descending */
};

struct moe_traced_host {
	int32_t what, kind, thread;
	int64_t begin, end;
};

struct moe_traced_mark {
	int32_t what, mark;
	int64_t time, step, tokens, trained;
};

struct moe_recorder_worker {
	struct moe_ring ring;
	atomic_llong executed; /* tasks, recorded or lost */
	int node;
	int64_t cpu, cpu_at; /* the thread's CPU time at the end of its latest task, and when; 0: none */
	struct moe_hardware hardware;
};

struct moe_recorder {
	struct moe_engine *engine;
	int64_t origin;		 /* ns */
	bool hardware;		 /* counters are there */
	char hardware_text[128]; /* which, or why not */
	int n_workers;
	struct moe_recorder_worker *worker; /* [n_workers] */
	struct moe_ring submission, host;

	/* the background thread's */
	pthread_t thread;
	pthread_mutex_t lock; /* of stop */
	pthread_cond_t wake;
	bool stop;
	struct moe_mxt_writer writer;
	struct moe_mxt_table table[MOE_MXT_CHUNK_TYPES];
	int64_t oldest[MOE_MXT_CHUNK_TYPES]; /* ns when the table's first row came */
	int64_t counted, sampled;	     /* ns of the last counters, memory */
	uint64_t memory_changes;	     /* e->memory_changes then */
	int64_t remote_before;		     /* e->remote_tasks at the start */
	int64_t cpu;			     /* ns of the thread, at its end */
	int64_t tasks;			     /* recorded so far */
	bool warned;
};

/* recorder_drain.c */
void *moe_recorder_main(void *recorder);
/* recorder_header.c: complete but for what the caller adds */
void moe_recorder_header(const struct moe_recorder *r, struct moe_mxt_text *text);

#endif
