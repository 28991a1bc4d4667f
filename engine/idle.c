/* SPDX-License-Identifier: Apache-2.0 */
/* When the workers run: the pause rule (one count, one pauser), holding, waiting, tickets. */
#include "engine/deadline.h"
#include "engine/internal.h"
#include "engine/trace_format.h"

#include <errno.h>

/* Brings StarPU's pause in line with what is wanted. Under idle_lock. */
void moe_idle_apply_pause(struct moe_engine *e)
{
	bool stop = e->asleep || (e->held && !e->draining);

	if (stop == e->stopped)
		return;
	e->stopped = stop;
	if (stop) {
		e->stop_begin = atomic_load_explicit(&e->recording, memory_order_relaxed) ? moe_now_ns() : 0;
		e->stop_asleep = e->asleep;
	} else if (e->stop_begin) {
		moe_recorder_host(e, e->stop_asleep ? MOE_MXT_HOST_SLEEP : MOE_MXT_HOST_HOLD,
				  e->stop_begin, moe_now_ns());
	}
	if (stop)
		starpu_pause();
	else
		starpu_resume();
}

/* Nothing to put to sleep: asleep already, held, or with work there or coming. Under idle_lock. */
static bool must_run(const struct moe_engine *e)
{
	return e->asleep || e->held || e->draining || e->submitting ||
	       atomic_load(&e->outstanding) > 0;
}

/* Waits for a count of tasks, whether held or not. */
void moe_idle_drain(struct moe_engine *e, atomic_llong *count)
{
	moe_engine_drain_begin(e);
	pthread_mutex_lock(&e->idle_lock);
	while (atomic_load(count) > 0)
		pthread_cond_wait(&e->idle_changed, &e->idle_lock);
	pthread_mutex_unlock(&e->idle_lock);
	moe_engine_drain_end(e);
}

/* Sleeps the workers once nothing has been outstanding for idle_spin_us. */
void *moe_idle_main(void *arg)
{
	struct moe_engine *e = arg;

	pthread_mutex_lock(&e->idle_lock);
	while (!e->closing) {
		if (must_run(e)) {
			pthread_cond_wait(&e->idle_changed, &e->idle_lock);
			continue;
		}
		if (e->params.idle_spin_us > 0) {
			struct timespec until = moe_deadline((int64_t)e->params.idle_spin_us * 1000);
			int rc = pthread_cond_timedwait(&e->idle_changed, &e->idle_lock, &until);

			if (rc != ETIMEDOUT || e->closing || must_run(e))
				continue;
		}
		e->asleep = true;
		e->pauses++;
		moe_idle_apply_pause(e);
	}
	pthread_mutex_unlock(&e->idle_lock);
	return NULL;
}

void moe_engine_resume(struct moe_engine *e)
{
	pthread_mutex_lock(&e->idle_lock);
	if (e->asleep) {
		e->asleep = false;
		moe_idle_apply_pause(e);
		pthread_cond_broadcast(&e->idle_changed);
	}
	pthread_mutex_unlock(&e->idle_lock);
}

void moe_engine_drain_begin(struct moe_engine *e)
{
	pthread_mutex_lock(&e->idle_lock);
	e->draining++;
	e->asleep = false;
	moe_idle_apply_pause(e);
	pthread_mutex_unlock(&e->idle_lock);
}

void moe_engine_drain_end(struct moe_engine *e)
{
	pthread_mutex_lock(&e->idle_lock);
	e->draining--;
	moe_idle_apply_pause(e);
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
}

void moe_engine_task_done(struct moe_engine *e, struct moe_ticket *ticket)
{
	bool wake = false;

	if (ticket)
		wake = atomic_fetch_sub(&ticket->outstanding, 1) == 1;
	wake |= atomic_fetch_sub(&e->outstanding, 1) == 1;
	if (!wake)
		return;
	pthread_mutex_lock(&e->idle_lock);
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
}

enum moe_status moe_engine_hold(struct moe_engine *e)
{
	MOE_TRY(moe_engine_check(e));
	pthread_mutex_lock(&e->idle_lock);
	e->held++;
	e->asleep = false; /* the idle pause becomes the held one */
	moe_idle_apply_pause(e);
	pthread_mutex_unlock(&e->idle_lock);
	return MOE_OK;
}

enum moe_status moe_engine_release(struct moe_engine *e)
{
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_engine_check(e));
	pthread_mutex_lock(&e->idle_lock);
	if (!e->held)
		st = moe_fail(MOE_ERR_STATE, "release without hold");
	else
		e->held--;
	moe_idle_apply_pause(e);
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
	return st;
}

static enum moe_status wait_here(struct moe_engine *e, atomic_llong *count)
{
	if (e->dry)
		return MOE_OK;
	MOE_TRY(moe_engine_check_not_task("waiting"));
	pthread_mutex_lock(&e->idle_lock);
	while (atomic_load(count) > 0) {
		if (e->held && !e->draining) {
			pthread_mutex_unlock(&e->idle_lock);
			return moe_fail(MOE_ERR_STATE,
					"waiting would never end: the engine is held");
		}
		pthread_cond_wait(&e->idle_changed, &e->idle_lock);
	}
	pthread_mutex_unlock(&e->idle_lock);
	return MOE_OK;
}

static enum moe_status wait_count(struct moe_engine *e, atomic_llong *count)
{
	int64_t begin = atomic_load_explicit(&e->recording, memory_order_relaxed) ? moe_now_ns() : 0;
	enum moe_status st = wait_here(e, count);

	if (begin)
		moe_recorder_host(e, MOE_MXT_HOST_WAIT, begin, moe_now_ns());
	return st;
}

enum moe_status moe_engine_wait(struct moe_engine *e)
{
	MOE_TRY(moe_engine_check(e));
	return wait_count(e, &e->outstanding);
}

enum moe_status moe_engine_check_running(struct moe_engine *e)
{
	bool held;

	MOE_TRY(moe_engine_check(e));
	pthread_mutex_lock(&e->idle_lock);
	held = e->held && !e->draining;
	pthread_mutex_unlock(&e->idle_lock);
	return held ? moe_fail(MOE_ERR_STATE, "waiting would never end: the engine is held")
		    : MOE_OK;
}

enum moe_status moe_ticket_wait(struct moe_ticket *t)
{
	MOE_TRY(moe_engine_check(t->engine));
	return wait_count(t->engine, &t->outstanding);
}

void moe_ticket_drain(struct moe_ticket *t)
{
	if (moe_engine_check(t->engine) == MOE_OK && moe_engine_check_not_task("waiting") == MOE_OK)
		moe_idle_drain(t->engine, &t->outstanding);
}

bool moe_ticket_done(struct moe_ticket *t)
{
	return atomic_load(&t->outstanding) == 0;
}

enum moe_status moe_ticket_create(struct moe_engine *e, struct moe_ticket **out)
{
	struct moe_ticket *t = moe_calloc(1, sizeof *t);

	if (!t)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a ticket");
	t->engine = e;
	*out = t;
	return MOE_OK;
}

void moe_ticket_destroy(struct moe_ticket *t)
{
	MOE_ASSERT(!t || !atomic_load(&t->outstanding));
	moe_free(t);
}

int64_t moe_engine_outstanding(const struct moe_engine *e)
{
	return atomic_load(&((struct moe_engine *)e)->outstanding);
}
