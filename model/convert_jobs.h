/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that do the pieces of a conversion. Private to model/convert*.c. */
#ifndef MOE_MODEL_CONVERT_JOBS_H
#define MOE_MODEL_CONVERT_JOBS_H

#include "model/convert_work.h"

#include <pthread.h>
#include <stdatomic.h>

struct moe_convert_jobs {
	struct moe_convert_run *run;
	const char *what; /* for progress */
	size_t n;
	enum moe_status (*job)(struct moe_convert_jobs *j, size_t i);
	void *user;
	/* The rest is private, but for stop, which long jobs look at, and the lock, which may guard
	 * what is the user's. */
	atomic_size_t next;
	atomic_bool stop;
	pthread_mutex_t lock;
	pthread_cond_t change;
	int running;
	int64_t done;
	enum moe_status status;
	char error[512];
};

/*
 * Every job once, in run->threads threads, in any order; the first failure ends all. Progress comes
 * from the calling thread. MOE_ERR_INTERRUPTED: it said so.
 */
enum moe_status moe_convert_jobs_run(struct moe_convert_jobs *j);
/* A job's bytes of the output are there. */
void moe_convert_jobs_done(struct moe_convert_jobs *j, int64_t bytes);

#endif
