/* SPDX-License-Identifier: Apache-2.0 */
#include "model/convert_jobs.h"

#include "engine/deadline.h"

#include <stdio.h>

void moe_convert_jobs_done(struct moe_convert_jobs *j, int64_t bytes)
{
	pthread_mutex_lock(&j->lock);
	j->done += bytes;
	pthread_cond_signal(&j->change);
	pthread_mutex_unlock(&j->lock);
}

static void fail(struct moe_convert_jobs *j, enum moe_status status, const char *text)
{
	pthread_mutex_lock(&j->lock);
	if (j->status == MOE_OK) {
		j->status = status;
		snprintf(j->error, sizeof j->error, "%s", text);
	}
	pthread_mutex_unlock(&j->lock);
	j->stop = true;
}

static void *work_thread(void *arg)
{
	struct moe_convert_jobs *j = arg;
	size_t i;

	while (!j->stop && (i = j->next++) < j->n) {
		enum moe_status status = j->job(j, i);

		if (status != MOE_OK)
			fail(j, status, moe_last_error());
	}
	pthread_mutex_lock(&j->lock);
	j->running--;
	pthread_cond_signal(&j->change);
	pthread_mutex_unlock(&j->lock);
	return NULL;
}

/* Until all have ended; progress meanwhile. */
static void watch(struct moe_convert_jobs *j)
{
	struct moe_convert_run *r = j->run;
	int64_t before = r->done;
	bool running = true;

	while (running) {
		struct timespec until = moe_deadline(MOE_PROGRESS_NS);

		pthread_mutex_lock(&j->lock);
		if (j->running)
			pthread_cond_timedwait(&j->change, &j->lock, &until);
		running = j->running > 0;
		r->done = before + j->done;
		pthread_mutex_unlock(&j->lock);
		if (!j->stop && r->progress && r->progress(j->what, r->done, r->total, r->user))
			fail(j, MOE_ERR_INTERRUPTED,
			     "interrupted: what is complete was kept, the same command goes on "
			     "with it");
	}
}

static enum moe_status run_threads(struct moe_convert_jobs *j)
{
	int n = MOE_MIN(j->run->threads, (int)MOE_MIN(j->n, (size_t)1024)), started = 0;
	pthread_t *thread = moe_alloc((size_t)MOE_MAX(n, 1), sizeof *thread);

	if (!thread)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	j->running = n;
	while (started < n && pthread_create(&thread[started], NULL, work_thread, j) == 0)
		started++;
	pthread_mutex_lock(&j->lock);
	j->running -= n - started;
	pthread_mutex_unlock(&j->lock);
	if (n && !started)
		fail(j, MOE_ERR_NOMEM, "no thread can be started");
	watch(j);
	for (int i = 0; i < started; i++)
		pthread_join(thread[i], NULL);
	moe_free(thread);
	return j->status == MOE_OK ? MOE_OK : moe_fail(j->status, "%s", j->error);
}

enum moe_status moe_convert_jobs_run(struct moe_convert_jobs *j)
{
	enum moe_status status;

	pthread_mutex_init(&j->lock, NULL);
	pthread_cond_init(&j->change, NULL);
	status = run_threads(j);
	pthread_mutex_destroy(&j->lock);
	pthread_cond_destroy(&j->change);
	return status;
}
