/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a recorded graph again: an event-driven simulation with recorded, or changed, durations.
 * What a machine is and which task a worker takes are interfaces: here are a machine of equal
 * workers and a list scheduler that keeps to the recorded order; others come as other structs.
 *
 * Tasks of a replay are numbered 0..n in order of their ids. Times are ns from the replay's start.
 */
#ifndef MOE_TOOLS_TRACE_REPLAY_H
#define MOE_TOOLS_TRACE_REPLAY_H

#include "tools/trace/metrics.h"

/* One thread submits in order: a task comes `after` ns behind the one before it. Where the thread
 * waited for tasks in between, not before `wait_for` has ended, and then wait_after ns. */
struct replay_submission {
	int64_t after, wait_after;
	uint32_t wait_for; /* TRACE_NO_TASK: did not wait */
};

struct replay {
	const struct trace *trace;
	uint32_t n;
	uint32_t *task;	   /* index into trace.task */
	uint32_t *rank;	   /* place in the recorded order of starting */
	int64_t *duration; /* yours to change; the recorded ones at first */
	int64_t *release;  /* from the end of the last predecessor, or submission, to ready */
	int64_t *
		overhead; /* to its start, from ready or the end of the task before on its worker */
	uint32_t *first_succ, *succ; /* within the replay */
	uint32_t *n_pred;
	struct replay_submission *submission;
	int64_t recorded; /* ns from the first submission or start to the last stop */
};

struct replay_machine {
	int workers;
	/* NULL: yes. */
	bool (*may_run)(const struct replay *r, uint32_t task, int worker, const void *user);
	/* How long it occupies the worker, NULL: overhead + duration. */
	int64_t (*time)(const struct replay *r, uint32_t task, int worker, int64_t now,
			const void *user);
	const void *user;
};

struct replay_scheduler {
	const char *name;
	/* NULL: no memory. */
	void *(*open)(const struct replay *r, const struct replay_machine *m);
	void (*push)(void *state, uint32_t task, int64_t now); /* it is ready */
	/* For an idle worker; TRACE_NO_TASK: nothing for it. */
	uint32_t (*pop)(void *state, int worker, int64_t now);
	void (*close)(void *state);
};
/* Ready tasks in recorded order; a worker takes the first that it may run. */
extern const struct replay_scheduler replay_list;

struct replay_result {
	int64_t makespan, busy;
	uint32_t done;	/* tasks; fewer than n: some may run nowhere */
	int64_t *start; /* [n]; NULL unless wanted */
	int32_t *worker;
};

/* Tasks that start in the window. */
int replay_open(const struct trace_window *w, struct replay *r);
void replay_close(struct replay *r);
/* 0, or -1 without memory. */
int replay_run(const struct replay *r, const struct replay_machine *m,
	       const struct replay_scheduler *s, bool places, struct replay_result *out);
void replay_result_free(struct replay_result *out);

/* The recorded machine with so many workers (0: as recorded); parts are dealt to them anew. */
struct replay_machine replay_machine_of(const struct replay *r, int workers);

/* ---- changes ---- */

void replay_reset(struct replay *r); /* recorded durations */
void replay_scale(struct replay *r, int kind, double factor);
/* Tasks of one (step, layer, micro-batch, phase, kind) of expert groups all take their mean. */
int replay_equalise_experts(struct replay *r);

int replay_gains(const struct trace_window *w, struct replay_gains *g);

#endif
