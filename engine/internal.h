/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of engine/ only. */
#ifndef MOE_ENGINE_INTERNAL_H
#define MOE_ENGINE_INTERNAL_H

#include "engine/codelet.h"
#include "engine/engine.h"
#include "engine/starpu_compat.h"

#include <hwloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#define MOE_MAX_PARTS 32
#define MOE_MASK_WORDS ((STARPU_NMAXWORKERS + 31) / 32)
#define MOE_LANES 16 /* of a part, at most */

struct moe_part {
	int node; /* NUMA node, logical */
	int n_workers;
	uint32_t mask[MOE_MASK_WORDS]; /* worker ids */
};

struct moe_topology {
	hwloc_topology_t hwloc;
	bool fake;
	int nodes, cpus; /* NUMA nodes; cores that this process may use */
};

/* One piece of memory with a home (memory.c); list and tree are under memory_lock. */
struct moe_block_header {
	struct moe_block_header *next, **link;
	void *base;    /* what to give back */
	size_t mapped; /* bytes of the mapping, 0: heap */
	size_t bytes;
	void *data;
	int part, node;
	const char *purpose;
};

/* Written by one worker, read by anyone; ns. */
struct moe_worker_clock {
	atomic_llong busy, idle[MOE_IDLE_CAUSES];
	int64_t last_end; /* of its last task; 0: none yet */
	char apart[64];	  /* from the next worker's */
};

/* join, a few blocks of tokens, plan: what the others wait for. Larger starts have tasks for every worker. */
#define MOE_FIRST_TASKS 8

/* start.c: a graph's first tasks keep away from the worker whose core the submitting thread has. Under lock. */
struct moe_start {
	struct moe_start_worker {
		int cpu, part;			/* cpu -1: not bound */
		uint32_t any[MOE_MASK_WORDS];	/* all workers but it */
		uint32_t same[MOE_MASK_WORDS]; /* its part's but it */
	} *worker;				/* NULL: nobody keeps away */
	struct moe_start_worker *here;
	int left; /* tasks */
};

/* Predecessors of the task that is being submitted. */
struct moe_dep_buffer {
	uint64_t *id;
	int n, cap;
};

struct moe_engine {
	bool dry; /* counts instead of running */
	struct moe_engine *outer; /* the thread's dry engine before this one */
	struct moe_dry_counts counts;
	int references;
	pid_t pid;
	struct moe_engine_params params; /* as asked for; strings owned */
	char *policy, *isa;
	bool policy_masks; /* it is known, or says, that it obeys masks */
	struct moe_topology topology;
	int n_workers, n_parts, dry_workers;
	struct moe_part parts[MOE_MAX_PARTS];
	struct moe_lanes { /* of a part; engine/lanes.c */
		starpu_data_handle_t handle[MOE_LANES];
		unsigned next;
	} lanes[MOE_MAX_PARTS];
	int min_priority, max_priority;
	struct moe_start start;

	pthread_mutex_t lock; /* submission, tensors; error-checking: see moe_engine_lock */
	bool submitting;
	pthread_t submitter; /* while submitting */
	int64_t n_tensors, next_tensor;
	uint64_t next_task;

	/* outstanding tasks and the pause rule */
	atomic_llong outstanding;
	atomic_llong remote_tasks;
	pthread_mutex_t idle_lock;
	pthread_cond_t idle_changed; /* outstanding reached 0, or the engine resumed or closes */
	pthread_t idle_thread;
	bool asleep, closing;
	int held, draining, pauses;
	bool stopped;		     /* StarPU is paused: asleep, or held and nobody drains */

	struct moe_recorder *recorder; /* NULL: no trace; see engine/recorder.h */
	pthread_mutex_t host_lock;     /* of recorder for threads that run no task */
	atomic_bool recording;	       /* recorder is not NULL: worth taking host_lock */
	int64_t submit_begin, stop_begin; /* ns, while recording */
	bool stop_asleep;		  /* why the workers were stopped then */
	struct moe_worker_clock clock[STARPU_NMAXWORKERS];
	struct moe_dep_buffer deps; /* under lock */

	struct moe_observer observer;
	int observed; /* times the observer was set: shadows of older ones are void */
	/* tests: after submission, before the task can have run if held */
	void (*handed_over)(uint64_t id, struct starpu_task *task, void *user);
	void *handed_over_user;
	struct moe_worker workers[STARPU_NMAXWORKERS];
	size_t scratch_bytes;
	void **retired; /* scratch that running tasks may still use */
	int n_retired;

	pthread_mutex_t memory_lock;
	struct moe_block_header *memory;
	void *memory_tree; /* the same blocks by address (tsearch) */
	size_t memory_total;
	atomic_ullong memory_changes; /* allocations and releases so far */
};

struct moe_tensor {
	struct moe_engine *engine;
	starpu_data_handle_t handle;
	char *name;
	int64_t id;
	size_t bytes;
	int part;
	bool initialised;
	/* shadow of StarPU's implicit dependencies, kept while an observer is set */
	int observed; /* the observer it was kept for */
	uint64_t last_writer;
	uint64_t *readers; /* since last_writer */
	int n_readers, cap_readers;
};

struct moe_ticket {
	struct moe_engine *engine;
	atomic_llong outstanding;
};

/* A submitted task; cl_arg of the StarPU task, freed with it. */
struct moe_record {
	struct moe_engine *engine;
	struct moe_codelet *codelet;
	struct moe_ticket *ticket;
	struct moe_tag tag;
	uint64_t id;
	int64_t submit, ready, pop; /* ns; pop 0: not known */
	_Alignas(16) unsigned char args[];
};

enum moe_status moe_topology_load(struct moe_topology *t);
void moe_topology_unload(struct moe_topology *t);
/* NUMA node of a CPU (hwloc logical PU index), 0 if unknown. */
int moe_topology_node_of_pu(const struct moe_topology *t, int pu);

/* Ids that a task with these accesses waits for, ascending, each once. Makes room for
 * moe_tracker_commit, so that a failure leaves no trace of the task. */
enum moe_status moe_tracker_deps(const struct moe_access *access, int n,
				 struct moe_dep_buffer *deps);
void moe_tracker_commit(const struct moe_access *access, int n, uint64_t task);
void moe_memory_free_all(struct moe_engine *e);

/* e->lock; MOE_ERR_STATE where this thread has it already and would wait for itself. */
enum moe_status moe_engine_lock(struct moe_engine *e);
/* Makes StarPU's workers run (undoes the idle pause); call before submitting or blocking. */
void moe_engine_resume(struct moe_engine *e);
/* Between the two the workers run even while the engine is held. */
void moe_engine_drain_begin(struct moe_engine *e);
void moe_engine_drain_end(struct moe_engine *e);
/* One task less; called by the worker that ran it. */
void moe_engine_task_done(struct moe_engine *e, struct moe_ticket *ticket);
bool moe_engine_policy_obeys_masks(const char *policy);
/* policy_file.c: whether a policy's name is a path; the struct in that file, and whether it says that it obeys masks (NULL: not asked) */
bool moe_policy_is_file(const char *policy);
enum moe_status moe_policy_file(const char *policy, struct starpu_sched_policy **out, bool *masks);

/* parts.c: into parts [n_parts] from the caller's list; into e->parts by params and topology */
enum moe_status moe_parts_from_specs(const struct moe_engine *e, const struct moe_part_spec *specs,
				     struct moe_part *parts);
enum moe_status moe_parts_make(struct moe_engine *e, const struct moe_engine_params *params);
int moe_engine_part_of_worker(const struct moe_engine *e, int worker); /* the first */
/* start.c */
enum moe_status moe_start_make(struct moe_engine *e);
void moe_start_free(struct moe_engine *e);
void moe_start_begin(struct moe_engine *e);
/* The mask of the next task, which is bound to `part` (-1: to none); NULL: no more than its part's. The engine's. */
uint32_t *moe_start_mask(struct moe_engine *e, int part);
/* starpu_start.c: *workers 0 becomes the number to start */
enum moe_status moe_starpu_check_policy(const char *policy);
enum moe_status moe_starpu_check_workers(int workers);
int moe_starpu_workers(const struct moe_engine *e, int workers); /* 0: one per core, as far as StarPU goes */
enum moe_status moe_starpu_start(struct moe_engine *e, int workers);
/* When a task ran, ns; cpu: of its thread. */
struct moe_interval {
	int64_t start, stop, cpu_start, cpu_stop;
};
/* ---- recorder.c; e->recorder is not NULL for the first two ---- */
/* The task e->next_task with its dependencies in e->deps; under e->lock. */
void moe_recorder_submitted(struct moe_engine *e, const struct moe_tag *tag, int64_t submit);
void moe_recorder_executed(struct moe_recorder *rec, const struct moe_record *r, const struct moe_worker *w,
			   const struct moe_interval *ran);
/* At a task's start: the thread's CPU time, ns. The worker keeps the hardware's counters until _executed. */
int64_t moe_recorder_begin(struct moe_recorder *rec, int worker);
/* An interval of a thread that runs no task; kind: enum moe_mxt_host. Nothing without a trace. */
void moe_recorder_host(struct moe_engine *e, int kind, int64_t begin, int64_t end);
/* ---- clock.c ---- */
int64_t moe_now_ns(void);
int64_t moe_thread_cpu_ns(void);
/* A worker begins a task: what it waited for since its last one. Its end. */
void moe_clock_start(struct moe_worker_clock *c, const struct moe_record *r, int64_t now);
void moe_clock_end(struct moe_worker_clock *c, int64_t start, int64_t end);
/* parts.c */
int moe_engine_worker_node(const struct moe_engine *e, int worker);
int moe_engine_worker_cpu(const struct moe_engine *e, int worker); /* -1: not bound */
/* memory.c: calls fn for every allocation, under memory_lock; purposes are string constants */
void moe_memory_visit(struct moe_engine *e, void (*fn)(const char *purpose, int part, size_t bytes, void *user),
		      void *user);
/* idle.c */
void *moe_idle_main(void *engine);
void moe_idle_apply_pause(struct moe_engine *e); /* under idle_lock */
void moe_idle_drain(struct moe_engine *e, atomic_llong *count);

/* lanes.c; between StarPU's start and its end, nothing outstanding */
void moe_lanes_start(struct moe_engine *e);
void moe_lanes_stop(struct moe_engine *e);
/* For the next task of a part (-1: any) that moves memory. Under the lock. */
starpu_data_handle_t moe_lane_next(struct moe_engine *e, int part);

#endif
