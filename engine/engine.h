/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The runtime under everything. Knows nothing of MoE.
 *
 * Lifetime: one engine per process. Threads: any thread may submit; a graph is submitted between
 * moe_submit_begin and moe_submit_end, which hold the engine's lock, so the tracker and StarPU see
 * one order. Nothing waits while that lock is held. Tensors are created and destroyed under the
 * same lock, taken by the functions themselves.
 */
#ifndef MOE_ENGINE_ENGINE_H
#define MOE_ENGINE_ENGINE_H

#include "engine/base.h"

struct moe_codelet; /* engine/codelet.h */

/* ---- tensors: a StarPU handle that carries order, not an address ---- */

struct moe_tensor;

enum moe_mode { MOE_R = 1, MOE_W = 2, MOE_RW = 3 };

struct moe_access {
	struct moe_tensor *tensor;
	enum moe_mode mode;
};

/* name is copied; shown in error texts. bytes and part are for the plan and traces only. */
enum moe_status moe_tensor_create(struct moe_engine *e, const char *name, size_t bytes, int part,
				  struct moe_tensor **out);
/* Waits for the tasks that use it (StarPU unregisters synchronously), also while the engine is
 * held: the workers run meanwhile. Never from a task. NULL accepted. */
void moe_tensor_destroy(struct moe_tensor *t);
/* As if a task had written it: for data that the caller fills before any task runs. */
void moe_tensor_set_initialised(struct moe_tensor *t);

/* ---- submission ---- */

#define MOE_MAX_TASK_HANDLES 64

/* Counts the unfinished tasks of one call or step; wait on it with moe_ticket_wait. */
struct moe_ticket;
enum moe_status moe_ticket_create(struct moe_engine *e, struct moe_ticket **out);
void moe_ticket_destroy(struct moe_ticket *t);
/* Until its tasks have run. MOE_ERR_STATE while the engine is held, or in a task. */
enum moe_status moe_ticket_wait(struct moe_ticket *t);
bool moe_ticket_done(struct moe_ticket *t);
/* For what cannot fail (destroying, undoing): waits even while the engine is held, the workers run
 * meanwhile. */
void moe_ticket_drain(struct moe_ticket *t);

struct moe_task_desc {
	struct moe_codelet *codelet;
	const void *args; /* copied */
	size_t args_size;
	const struct moe_access *access;
	int n_access;
	int priority; /* clamped to the policy's range */
	struct moe_tag tag;
	struct moe_ticket *ticket; /* may be NULL */
	bool streams; /* it moves memory and computes little: runs beside few others like it (engine/lanes.c) */
};

/* The lock: see the head of this file. begin fails after fork, in a task and where this thread has
 * begun already. */
enum moe_status moe_submit_begin(struct moe_engine *e);
void moe_submit_end(struct moe_engine *e);
/* Only between begin and end, never from a task. Errors leave nothing submitted. */
enum moe_status moe_submit(struct moe_engine *e, const struct moe_task_desc *d);

/* ---- the worker that runs a codelet ---- */

struct moe_worker {
	struct moe_engine *engine;
	int index;
	void *scratch; /* at least moe_engine_reserve_scratch bytes */
	int64_t rows;  /* set by the codelet: becomes tag.rows */
	/* set by the codelet that routes, for traces: rows of expert i are offset[i + 1] -
	 * offset[i]; the slots that could have been routed */
	const int32_t *offset; /* [experts + 1], valid until the codelet returns */
	int experts;
	int64_t slots;
};

/* Grows every worker's scratch for the tasks submitted from now on. */
enum moe_status moe_engine_reserve_scratch(struct moe_engine *e, size_t bytes);

/*
 * An engine that computes nothing: tensors and tasks are counted, memory is address space only. For
 * estimates; not the process's engine, needs no StarPU, any number of parts. Used by the thread that opened it
 * only; of several the last one, which is closed first. Close with moe_engine_close, after the objects on it.
 */
struct moe_dry_counts {
	int64_t handles, tasks, kinds[128]; /* kinds: tasks by tag.kind */
	int max_task_handles;
	size_t scratch_bytes; /* per worker */
};
enum moe_status moe_engine_open_dry(int parts, int workers, struct moe_engine **out);
void moe_engine_dry_counts(const struct moe_engine *e, struct moe_dry_counts *out);
bool moe_engine_is_dry(const struct moe_engine *e);

/* MOE_ERR_STATE in a task, which must not wait for tasks. */
enum moe_status moe_engine_check_not_task(const char *what);
/* MOE_ERR_STATE while held: what waits for its tasks would not return. */
enum moe_status moe_engine_check_running(struct moe_engine *e);
int moe_engine_parts(const struct moe_engine *e);
int moe_engine_workers(const struct moe_engine *e);
int64_t moe_engine_outstanding(const struct moe_engine *e);
enum moe_status moe_engine_check(const struct moe_engine *e); /* open and not a forked child */
const char *moe_engine_isa(const struct moe_engine *e);	      /* as asked for, or NULL */
/* Whether the part's tasks run on this worker, and its NUMA node; for tests and reports. */
bool moe_engine_part_has_worker(const struct moe_engine *e, int part, int worker);
int moe_engine_part_node(const struct moe_engine *e, int part);

/* What hwloc and this StarPU say about the machine; nothing is started. */
struct moe_host {
	int cores, sockets, nodes;
	bool fake;
	int starpu_version[3], starpu_max_workers, starpu_max_nodes, starpu_max_buffers;
};
enum moe_status moe_host_describe(struct moe_host *out);

/*
 * Not defined here but in codelets/kernels.c: what must be asked of the operating system while the
 * process has no workers yet. Called by moe_engine_open, its error is that of open.
 */
enum moe_status moe_engine_prepare(const char *isa);

/*
 * run(arg, part) on one thread per worker, each on its part's NUMA node, while the caller runs
 * meanwhile(arg); returns when all have returned: how many there were. Nothing may be outstanding.
 * Without threads the caller does it, then meanwhile.
 */
int moe_engine_parallel(struct moe_engine *e, void (*run)(void *arg, int part),
			void (*meanwhile)(void *arg), void *arg);

/* ---- traces (engine/recorder.h); moe_trace_* in api/ is their public face ---- */

/* header: more lines "key=value" or NULL. MOE_ERR_STATE: one is running; MOE_ERR_BUSY: tasks are
 * outstanding. */
struct moe_recorder_params {
	const char *file;
	char *const *header; /* [n_header] lines "key=value" */
	int n_header;
	size_t ring_bytes; /* of each worker; 0: 512 KiB */
	bool no_hardware;
};
enum moe_status moe_recorder_start(struct moe_engine *e, const struct moe_recorder_params *p);
/* Waits for outstanding tasks, also while held. Fills out also where the file is not whole
 * (MOE_ERR_IO). */
enum moe_status moe_recorder_stop(struct moe_engine *e, struct moe_trace_info *out);
/* Steps of a training; nothing without a trace. Tokens -1: not known. */
void moe_recorder_mark(struct moe_engine *e, enum moe_trace_mark mark, int64_t step, int64_t tokens,
		       int64_t trained);

/* Where idle time went so far, workers together; seconds. See enum moe_idle_cause. */
struct moe_idle {
	double busy, cause[MOE_IDLE_CAUSES];
};
void moe_engine_idle(const struct moe_engine *e, struct moe_idle *out);

/* ---- memory with a home ---- */

/*
 * Zeroed pages on the part's NUMA node (part -1: anywhere), 2 MiB aligned and huge where large.
 * On a fake topology the wanted node is recorded and the pages are plain. purpose groups bytes for
 * reports and is a string constant. Counts against the engine until freed.
 */
void *moe_memory_alloc(struct moe_engine *e, size_t bytes, int part, const char *purpose);
/* The same; *st keeps the first failure (NULL from then on), so that callers can take several in a row. */
void *moe_memory_take(struct moe_engine *e, size_t bytes, int part, const char *purpose, enum moe_status *st);
void moe_memory_free(struct moe_engine *e, void *p);
/* Node that the page range was asked for, -1: none or not ours. */
int moe_memory_node(struct moe_engine *e, const void *p);
/* The largest allocation there is now. */
size_t moe_memory_largest(struct moe_engine *e);
/*
 * Maps the pages of all large allocations of a purpose by the threads of their parts, so that no task pays for
 * it. Bytes touched. Nothing may be outstanding.
 */
size_t moe_memory_touch(struct moe_engine *e, const char *purpose);
/* The same of single allocations, data [n] (small ones and NULL are passed over); no task may write these meanwhile. */
size_t moe_memory_touch_these(struct moe_engine *e, const void *const *data, int n);
/* Bytes allocated now for a purpose (NULL: all) on a part (-1: all parts). */
size_t moe_memory_bytes(struct moe_engine *e, const char *purpose, int part);

#endif
