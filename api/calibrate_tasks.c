/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Overhead of a task: what workers and submission take beside the bodies, per task, in a graph
 * whose tasks stream a megabyte each (StarPU's structures are then as cold as in a layer; with
 * empty tasks it would look three times cheaper).
 */
#include "api/machine.h"

#include "codelets/copy.h"
#include "engine/roof.h"

#define TASKS 300
#define CHAINS 48
#define ROUNDS_MAX 48
#define ROWS 128
#define COLUMNS 1024
#define ONE_MS 1200 /* of one engine */
#define SUBMIT_SHARE 0.3

struct bench {
	struct moe_engine *engine;
	struct moe_tensor *read[4], *chain[CHAINS]; /* a task names 5, as in a layer */
	float *from, *to;			    /* [CHAINS][ROWS, COLUMNS] */
};

int moe_calibrate_tasks_ms(void)
{
	return 2 * ONE_MS;
}

static enum moe_status submit_tasks(struct bench *b)
{
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_submit_begin(b->engine));
	for (int i = 0; st == MOE_OK && i < TASKS; i++) {
		size_t at = (size_t)(i % CHAINS) * ROWS * COLUMNS;
		struct moe_copy_args args = {
			.array = { b->from + at, MOE_F32, 2, { ROWS, COLUMNS }, { 0 } },
			.rows = b->to + at,
			.n = COLUMNS,
			.t1 = ROWS,
		};
		struct moe_access access[5];
		struct moe_task_desc d = { .codelet = &moe_cl_load,
					   .args = &args,
					   .args_size = sizeof args,
					   .access = access,
					   .n_access = 5,
					   .tag = { .part = -1 } };

		for (int j = 0; j < 4; j++)
			access[j] = (struct moe_access){ b->read[j], MOE_R };
		access[4] = (struct moe_access){ b->chain[i % CHAINS], MOE_W };
		st = moe_submit(b->engine, &d);
	}
	moe_submit_end(b->engine);
	return st;
}

/* Microseconds of overhead per task. */
static enum moe_status round_overhead(struct bench *b, double *us)
{
	struct moe_engine_info before = { .struct_size = sizeof before }, after = before;
	double start, busy, wall;

	MOE_TRY(moe_engine_get_info(b->engine, &before));
	start = moe_now();
	MOE_TRY(submit_tasks(b));
	MOE_TRY(moe_engine_wait(b->engine));
	wall = moe_now() - start;
	MOE_TRY(moe_engine_get_info(b->engine, &after));
	busy = after.busy_seconds - before.busy_seconds;
	*us = MOE_MAX((wall * before.workers - busy) / TASKS * 1e6, 0.1);
	return MOE_OK;
}

/* Microseconds of a submission while no worker runs. */
static enum moe_status round_submission(struct bench *b, double *us)
{
	enum moe_status st;
	double start;

	MOE_TRY(moe_engine_hold(b->engine));
	start = moe_now();
	st = submit_tasks(b);
	*us = (moe_now() - start) / TASKS * 1e6;
	MOE_TRY(moe_engine_release(b->engine));
	MOE_TRY(st);
	return moe_engine_wait(b->engine);
}

static enum moe_status measure_rounds(struct bench *b, double seconds,
				      enum moe_status (*round)(struct bench *, double *),
				      double *us)
{
	double value[ROUNDS_MAX], end = moe_now() + seconds;
	int n = 0;

	MOE_TRY(round(b, &value[0])); /* first touch */
	while (n < 3 || (n < ROUNDS_MAX && moe_now() < end))
		MOE_TRY(round(b, &value[n++]));
	*us = moe_quartile(value, n, 1); /* other processes only ever add */
	return MOE_OK;
}

static enum moe_status make(struct bench *b)
{
	size_t bytes = (size_t)CHAINS * ROWS * COLUMNS * sizeof(float);

	b->from = moe_memory_alloc(b->engine, bytes, -1, "calibration");
	b->to = moe_memory_alloc(b->engine, bytes, -1, "calibration");
	if (!b->from || !b->to)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a calibration");
	for (int i = 0; i < 4; i++) {
		MOE_TRY(moe_tensor_create(b->engine, "calibration", 0, -1, &b->read[i]));
		moe_tensor_set_initialised(b->read[i]);
	}
	for (int i = 0; i < CHAINS; i++)
		MOE_TRY(moe_tensor_create(b->engine, "calibration", 0, -1, &b->chain[i]));
	return MOE_OK;
}

static void unmake(struct bench *b)
{
	for (int i = 0; i < 4; i++)
		moe_tensor_destroy(b->read[i]);
	for (int i = 0; i < CHAINS; i++)
		moe_tensor_destroy(b->chain[i]);
	moe_memory_free(b->engine, b->from);
	moe_memory_free(b->engine, b->to);
	moe_engine_close(b->engine);
}

/* workers 0: all. submit NULL: not wanted. */
static enum moe_status measure(int workers, double seconds, double *task, double *submit)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = workers, .parts = 1 };
	struct bench b = { .engine = NULL };
	double share = submit ? SUBMIT_SHARE : 0;
	enum moe_status st = moe_engine_open(&p, &b.engine);

	if (st != MOE_OK)
		return moe_fail_in(MOE_ERR_STATE, "calibration needs StarPU for itself");
	st = make(&b);
	if (st == MOE_OK)
		st = measure_rounds(&b, seconds * (1 - share), round_overhead, task);
	if (st == MOE_OK && submit)
		st = measure_rounds(&b, seconds * share, round_submission, submit);
	unmake(&b);
	return st;
}

enum moe_status moe_calibrate_tasks(struct moe_calibration *c)
{
	struct moe_machine *m = &c->file.machine;

	MOE_TRY(measure(1, moe_calibration_step(c, "tasks, one worker", ONE_MS), &m->task_us,
			&m->submit_us));
	return measure(0, moe_calibration_step(c, "tasks, all workers", ONE_MS), &m->task_all_us,
		       NULL);
}
