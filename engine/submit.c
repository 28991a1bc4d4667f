/* SPDX-License-Identifier: Apache-2.0 */
/* One task from description to execution: guards, tracker, worker mask, body, bookkeeping. */
#include "engine/internal.h"
#include "engine/trace_format.h"

#include <stdlib.h>

#define UNKNOWN_US 10.0 /* of kinds without a cost model: they do little beside being a task */

enum moe_status moe_submit_begin(struct moe_engine *e)
{
	MOE_TRY(moe_engine_check(e));
	if (e->dry) {
		e->submitting = true;
		return MOE_OK;
	}
	/* a later reader could be ordered before what a task submits */
	MOE_TRY(moe_engine_check_not_task("submitting"));
	MOE_TRY(moe_engine_lock(e));
	e->submitter = pthread_self();
	pthread_mutex_lock(&e->idle_lock);
	e->submitting = true; /* from here on the idle thread keeps its hands off */
	pthread_mutex_unlock(&e->idle_lock);
	moe_engine_resume(e);
	moe_start_begin(e);
	e->submit_begin = e->recorder ? moe_now_ns() : 0;
	return MOE_OK;
}

void moe_submit_end(struct moe_engine *e)
{
	if (e->dry) {
		e->submitting = false;
		return;
	}
	if (e->submit_begin)
		moe_recorder_host(e, MOE_MXT_HOST_SUBMIT, e->submit_begin, moe_now_ns());
	/* the graph may have been empty, or over before the idle thread looked */
	pthread_mutex_lock(&e->idle_lock);
	e->submitting = false;
	pthread_cond_broadcast(&e->idle_changed);
	pthread_mutex_unlock(&e->idle_lock);
	pthread_mutex_unlock(&e->lock);
}

static void tell_observer(struct moe_record *r, const struct moe_worker *worker, const struct moe_interval *ran)
{
	struct moe_engine *e = r->engine;
	struct moe_task_event event = { .id = r->id,
					.tag = r->tag,
					.worker = worker->index,
					.start = (double)ran->start * 1e-9,
					.end = (double)ran->stop * 1e-9,
					.cpu = (double)(ran->cpu_stop - ran->cpu_start) * 1e-9 };

	if (e->observer.executed)
		e->observer.executed(&event, e->observer.user);
}

void moe_codelet_body(void *buffers[], void *arg)
{
	struct moe_record *r = arg;
	struct moe_engine *e = r->engine;
	struct moe_recorder *rec = e->recorder;
	int w = starpu_worker_get_id();
	/* a copy: scratch may grow meanwhile */
	struct moe_worker worker = { .engine = e, .index = w };
	bool told = rec || e->observer.executed;
	struct moe_interval ran = { 0 };

	(void)buffers;
	if (r->tag.part >= 0 && !(e->parts[r->tag.part].mask[w / 32] >> (w % 32) & 1))
		atomic_fetch_add_explicit(&e->remote_tasks, 1, memory_order_relaxed);
	worker.scratch = __atomic_load_n(&e->workers[w].scratch, __ATOMIC_ACQUIRE);
	if (told)
		ran.cpu_start = rec ? moe_recorder_begin(rec, w) : moe_thread_cpu_ns();
	ran.start = moe_now_ns();
	moe_clock_start(&e->clock[w], r, ran.start);
	r->codelet->run(r->args, &worker);
	ran.stop = moe_now_ns();
	moe_clock_end(&e->clock[w], ran.start, ran.stop);
	r->tag.rows = worker.rows;
	if (!told)
		return;
	ran.cpu_stop = moe_thread_cpu_ns();
	if (rec)
		moe_recorder_executed(rec, r, &worker, &ran);
	tell_observer(r, &worker, &ran);
}

/* StarPU calls it when the task's last dependency has ended, before it is scheduled. */
static void task_ready(void *arg)
{
	struct moe_record *r = arg;

	r->ready = moe_now_ns();
}

static void task_popped(void *arg)
{
	struct moe_record *r = arg;

	r->pop = moe_now_ns();
}

/* After StarPU has released the task's data. */
static void task_finished(void *arg)
{
	struct moe_record *r = arg;

	moe_engine_task_done(r->engine, r->ticket);
}

double moe_codelet_predict(struct starpu_task *task, struct starpu_perfmodel_arch *arch, unsigned n)
{
	const struct moe_record *r = task->cl_arg;

	(void)arch, (void)n;
	if (!r || !r->codelet->cost_us)
		return UNKNOWN_US;
	return r->codelet->cost_us(r->args);
}

/* Every misuse that would make StarPU abort or read garbage. */
static enum moe_status check_access(struct moe_engine *e, const struct moe_task_desc *d)
{
	const char *name = d->codelet ? d->codelet->cl.name : "(none)";

	if (!d->codelet || (!d->args && d->args_size) || (!d->access && d->n_access))
		return moe_fail(MOE_ERR_ARG, "task %s: codelet, args or access is NULL", name);
	if (d->tag.part >= e->n_parts)
		return moe_fail(MOE_ERR_ARG, "task %s: part %d of %d", name, d->tag.part,
				e->n_parts);
	if (d->ticket && d->ticket->engine != e)
		return moe_fail(MOE_ERR_ARG, "task %s: ticket of another engine", name);
	if (d->n_access < 0 || d->n_access > MOE_MAX_TASK_HANDLES)
		return moe_fail(MOE_ERR_ARG, "task %s names %d tensors; at most %d are allowed",
				name, d->n_access, MOE_MAX_TASK_HANDLES);
	for (int i = 0; i < d->n_access; i++) {
		const struct moe_access *a = &d->access[i];

		if (!a->tensor)
			return moe_fail(MOE_ERR_ARG, "task %s: tensor %d is NULL", name, i);
		if (a->tensor->engine != e)
			return moe_fail(MOE_ERR_ARG, "task %s: tensor %s is of another engine",
					name, a->tensor->name);
		if (a->mode < MOE_R || a->mode > MOE_RW)
			return moe_fail(MOE_ERR_ARG, "task %s: mode %d of tensor %s", name, a->mode,
					a->tensor->name);
		if (a->mode != MOE_W && !a->tensor->initialised)
			return moe_fail(MOE_ERR_STATE,
					"task %s reads tensor %s, which nothing has written", name,
					a->tensor->name);
		for (int j = 0; j < i; j++)
			if (d->access[j].tensor == a->tensor)
				return moe_fail(MOE_ERR_ARG, "task %s names tensor %s twice", name,
						a->tensor->name);
	}
	return MOE_OK;
}

static enum moe_status set_handles(struct moe_engine *e, struct starpu_task *t,
				   const struct moe_task_desc *d)
{
	starpu_data_handle_t *handles = t->handles;
	enum starpu_data_access_mode *modes = t->modes;

	t->nbuffers = d->n_access + d->streams;
	if (t->nbuffers > STARPU_NMAXBUFS) {
		/* StarPU releases these with free() */
		t->dyn_handles = malloc((size_t)t->nbuffers * sizeof *t->dyn_handles);
		t->dyn_modes = malloc((size_t)t->nbuffers * sizeof *t->dyn_modes);
		if (!t->dyn_handles || !t->dyn_modes)
			return moe_fail(MOE_ERR_NOMEM, "no memory for a task");
		handles = t->dyn_handles;
		modes = t->dyn_modes;
	}
	for (int i = 0; i < d->n_access; i++) {
		handles[i] = d->access[i].tensor->handle;
		modes[i] = d->access[i].mode == MOE_R	? STARPU_R
			   : d->access[i].mode == MOE_W ? STARPU_W
							: STARPU_RW;
	}
	if (d->streams) {
		handles[d->n_access] = moe_lane_next(e, d->tag.part);
		modes[d->n_access] = STARPU_W | STARPU_COMMUTE;
	}
	return MOE_OK;
}

/* Dependencies into e->deps, for the observer and the trace. */
static enum moe_status track(struct moe_engine *e, const struct moe_task_desc *d, uint64_t id)
{
	struct moe_task_event event = { .id = id, .tag = d->tag };

	MOE_TRY(moe_tracker_deps(d->access, d->n_access, &e->deps));
	moe_tracker_commit(d->access, d->n_access, id);
	event.deps = e->deps.id;
	event.n_deps = e->deps.n;
	if (e->observer.submitted)
		e->observer.submitted(&event, e->observer.user);
	return MOE_OK;
}

static struct moe_record *make_record(struct moe_engine *e, const struct moe_task_desc *d)
{
	/* malloc: StarPU frees it with the task (cl_arg_free) */
	struct moe_record *r = moe_alloc(1, sizeof *r + d->args_size);

	if (!r)
		return NULL;
	memset(r, 0, sizeof *r);
	r->engine = e;
	r->codelet = d->codelet;
	r->ticket = d->ticket;
	r->tag = d->tag;
	r->id = e->next_task + 1;
	if (d->args_size)
		memcpy(r->args, d->args, d->args_size);
	return r;
}

static void set_mask(struct moe_engine *e, struct starpu_task *t, int part)
{
	/* strict parts only; with one part or all workers a mask would say nothing */
	bool bound = part >= 0 && e->n_parts > 1 && e->params.placement == MOE_PLACEMENT_STRICT &&
		     e->parts[part].n_workers < e->n_workers;

	t->workerids = moe_start_mask(e, bound ? part : -1);
	if (!t->workerids && bound)
		t->workerids = e->parts[part].mask;
	t->workerids_len = t->workerids ? MOE_MASK_WORDS : 0;
}

static void mark_written(const struct moe_task_desc *d)
{
	for (int i = 0; i < d->n_access; i++)
		if (d->access[i].mode != MOE_R)
			d->access[i].tensor->initialised = true;
}

/* A dry engine's submission. */
static enum moe_status count_task(struct moe_engine *e, const struct moe_task_desc *d)
{
	struct moe_dry_counts *c = &e->counts;

	MOE_TRY(check_access(e, d));
	c->tasks++;
	c->max_task_handles = MOE_MAX(c->max_task_handles, d->n_access);
	if (d->tag.kind >= 0 && d->tag.kind < (int)MOE_COUNT(c->kinds))
		c->kinds[d->tag.kind]++;
	mark_written(d);
	return MOE_OK;
}

enum moe_status moe_submit(struct moe_engine *e, const struct moe_task_desc *d)
{
	struct starpu_task *t = NULL;
	struct moe_record *r = NULL;
	enum moe_status st;
	int64_t submit;
	int rc;

	if (e->dry)
		return count_task(e, d);
	if (!e->submitting || !pthread_equal(e->submitter, pthread_self()))
		return moe_fail(MOE_ERR_STATE,
				"a task is submitted outside moe_submit_begin and _end");
	MOE_TRY(check_access(e, d));
	r = make_record(e, d);
	t = starpu_task_create();
	if (!r || !t) {
		st = moe_fail(MOE_ERR_NOMEM, "no memory for a task");
		goto fail;
	}
	t->cl = &d->codelet->cl;
	t->cl_arg = r;
	t->cl_arg_size = sizeof *r + d->args_size;
	t->cl_arg_free = 1;
	t->callback_func = task_finished;
	t->callback_arg = r;
	t->prologue_callback_func = task_ready;
	t->prologue_callback_arg = r;
	if (e->recorder) {
		t->prologue_callback_pop_func = task_popped;
		t->prologue_callback_pop_arg = r;
	}
	t->priority = MOE_MIN(MOE_MAX(d->priority, e->min_priority), e->max_priority);
	MOE_TRY_GOTO(set_handles(e, t, d), st, fail);
	set_mask(e, t, d->tag.part);
	if (e->observer.submitted || e->recorder)
		MOE_TRY_GOTO(track(e, d, r->id), st, fail);
	atomic_fetch_add(&e->outstanding, 1);
	if (d->ticket)
		atomic_fetch_add(&d->ticket->outstanding, 1);
	submit = r->submit = moe_now_ns();
	rc = starpu_task_submit(t);
	if (rc) {
		moe_engine_task_done(e, d->ticket);
		st = moe_fail(MOE_ERR_RUNTIME, "StarPU refuses task %s: %s", d->codelet->cl.name,
			      strerror(-rc));
		goto fail;
	}
	if (e->handed_over)
		e->handed_over(e->next_task + 1, t, e->handed_over_user);
	e->next_task++;
	if (e->recorder)
		moe_recorder_submitted(e, &d->tag, submit);
	mark_written(d);
	return MOE_OK;
fail:
	if (t) {
		t->cl_arg_free = 0;
		t->destroy = 0;
		starpu_task_destroy(t);
	}
	moe_free(r);
	return st;
}
