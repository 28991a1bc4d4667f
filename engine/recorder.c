/* SPDX-License-Identifier: Apache-2.0 */
/* What threads do to be recorded, and the beginning and end of a trace. */
#include "engine/recorder.h"

#include "engine/cost.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WORKER_RING ((size_t)512 << 10)
#define SUBMISSION_RING ((size_t)4 << 20) /* a step's graph comes at once */
#define HOST_RING ((size_t)64 << 10)
#define STRAIGHT_ON_NS 20000 /* a shorter gap is the runtime's own work; most that `cpu` can be off */

/* ---- workers ---- */

/*
 * Reading a thread's CPU time is a system call and the dearest part of recording (0.3 to 0.5 us): a worker that has
 * gone from one task straight to the next has run all the time between them.
 */
static int64_t cpu_at_begin(const struct moe_recorder_worker *me)
{
	int64_t gap = moe_now_ns() - me->cpu_at;

	return me->cpu_at && gap < STRAIGHT_ON_NS ? me->cpu + gap : moe_thread_cpu_ns();
}

int64_t moe_recorder_begin(struct moe_recorder *rec, int worker)
{
	struct moe_recorder_worker *me = &rec->worker[worker];
	struct moe_hardware *h = &me->hardware;

	if (rec->hardware) {
		if (!h->tried) /* counters count the thread that opens them */
			moe_hardware_open(h, false);
		moe_hardware_read(h, h->begin);
	}
	return cpu_at_begin(me);
}

/* Flops and bytes by the kind's own cost model, with the rows that it really had. */
static void fill_work(struct moe_traced_task *t, const struct moe_record *r)
{
	struct moe_work work = { 0 };

	t->modelled = r->codelet->cost_us != NULL;
	if (t->modelled) {
		moe_work_begin(&work);
		r->codelet->cost_us(r->args);
		moe_work_end();
	}
	t->home = r->codelet->home;
	t->flops = work.flops;
	t->weights = work.weights;
	t->read = work.read;
	t->written = work.written;
}

static void record_routing(struct moe_recorder *rec, const struct moe_record *r,
			   const struct moe_worker *w, int64_t now)
{
	struct moe_ring *ring = &rec->worker[w->index].ring;
	struct moe_traced_routing *t =
		moe_ring_reserve(ring, sizeof *t + (size_t)w->experts * sizeof *t->load);

	if (!t)
		return;
	*t = (struct moe_traced_routing){ .what = MOE_TRACED_ROUTING,
					  .n = w->experts,
					  .id = r->id,
					  .tag = r->tag,
					  .time = now,
					  .slots = w->slots };
	for (int i = 0; i < w->experts; i++)
		t->load[i] = w->offset[i + 1] - w->offset[i];
	moe_ring_commit(ring);
}

void moe_recorder_executed(struct moe_recorder *rec, const struct moe_record *r,
			   const struct moe_worker *w, const struct moe_interval *ran)
{
	struct moe_recorder_worker *me = &rec->worker[w->index];
	struct moe_traced_task *t = moe_ring_reserve(&me->ring, sizeof *t);
	long long n = atomic_load_explicit(&me->executed, memory_order_relaxed);

	me->cpu = ran->cpu_stop;
	me->cpu_at = ran->stop;
	atomic_store_explicit(&me->executed, n + 1, memory_order_relaxed);
	if (t) {
		*t = (struct moe_traced_task){ .what = MOE_TRACED_TASK,
					       .worker = w->index,
					       .id = r->id,
					       .tag = r->tag,
					       .submit = r->submit,
					       .ready = r->ready,
					       .pop = r->pop,
					       .start = ran->start,
					       .stop = ran->stop,
					       .cpu = MOE_MAX(ran->cpu_stop - ran->cpu_start, 0),
					       .core = sched_getcpu() };
		if (rec->hardware)
			moe_hardware_since(&me->hardware, t->hardware);
		fill_work(t, r);
		moe_ring_commit(&me->ring);
	}
	if (w->offset)
		record_routing(rec, r, w, ran->stop);
}

/* ---- the submitting thread ---- */

void moe_recorder_submitted(struct moe_engine *e, const struct moe_tag *tag, int64_t submit)
{
	const struct moe_dep_buffer *deps = &e->deps;
	struct moe_ring *ring = &e->recorder->submission;
	struct moe_traced_deps *t =
		moe_ring_reserve(ring, sizeof *t + (size_t)deps->n * sizeof *t->back);

	if (!t)
		return;
	*t = (struct moe_traced_deps){ .what = MOE_TRACED_DEPS,
				       .n = deps->n,
				       .id = e->next_task,
				       .tag = *tag,
				       .submit = submit };
	for (int i = 0; i < deps->n; i++)
		t->back[i] = (uint32_t)(e->next_task - deps->id[i]);
	moe_ring_commit(ring);
}

/* ---- other threads ---- */

static int32_t thread_id(void)
{
	static _Thread_local int32_t id;

	if (!id)
		id = (int32_t)syscall(SYS_gettid);
	return id;
}

static void put_host(struct moe_engine *e, const void *record, size_t bytes)
{
	void *to;

	if (!atomic_load_explicit(&e->recording, memory_order_relaxed))
		return;
	pthread_mutex_lock(&e->host_lock);
	to = e->recorder ? moe_ring_reserve(&e->recorder->host, bytes) : NULL;
	if (to) {
		memcpy(to, record, bytes);
		moe_ring_commit(&e->recorder->host);
	}
	pthread_mutex_unlock(&e->host_lock);
}

void moe_recorder_host(struct moe_engine *e, int kind, int64_t begin, int64_t end)
{
	struct moe_traced_host t = { .what = MOE_TRACED_HOST,
				     .kind = kind,
				     .thread = thread_id(),
				     .begin = begin,
				     .end = end };

	put_host(e, &t, sizeof t);
}

void moe_recorder_mark(struct moe_engine *e, enum moe_trace_mark mark, int64_t step, int64_t tokens,
		       int64_t trained)
{
	struct moe_traced_mark t = { .what = MOE_TRACED_MARK,
				     .mark = (int32_t)mark,
				     .time = moe_now_ns(),
				     .step = step,
				     .tokens = tokens,
				     .trained = trained };

	if (!e->dry)
		put_host(e, &t, sizeof t);
}

/* ---- beginning and end ---- */

static void destroy(struct moe_recorder *rec)
{
	for (int w = 0; rec->worker && w < rec->n_workers; w++) {
		moe_ring_destroy(&rec->worker[w].ring);
		moe_hardware_close(&rec->worker[w].hardware);
	}
	moe_ring_destroy(&rec->submission);
	moe_ring_destroy(&rec->host);
	for (int i = 0; i < MOE_MXT_CHUNK_TYPES; i++)
		moe_mxt_table_free(&rec->table[i]);
	pthread_mutex_destroy(&rec->lock);
	pthread_cond_destroy(&rec->wake);
	moe_free(rec->worker);
	moe_free(rec);
}

static enum moe_status make_rings(struct moe_recorder *rec, size_t bytes)
{
	rec->worker = moe_calloc((size_t)rec->n_workers, sizeof *rec->worker);
	if (!rec->worker)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a trace");
	for (int w = 0; w < rec->n_workers; w++) {
		rec->worker[w].node = moe_engine_worker_node(rec->engine, w);
		MOE_TRY(moe_ring_create(&rec->worker[w].ring, bytes ? bytes : WORKER_RING));
	}
	MOE_TRY(moe_ring_create(&rec->submission, bytes ? bytes : SUBMISSION_RING));
	return moe_ring_create(&rec->host, HOST_RING);
}

/* Whether this thread may count. What is missing is missing for the workers too. */
static void probe_hardware(struct moe_recorder *rec, bool wanted)
{
	struct moe_hardware h = { .tried = false };
	const char *error = wanted ? moe_hardware_open(&h, false) : "not asked for";
	size_t at = 0;

	rec->hardware = !error;
	snprintf(rec->hardware_text, sizeof rec->hardware_text, "n/a: %s", error ? error : "");
	for (int i = 0; !error && i < MOE_HARDWARE_COUNTERS; i++)
		if (h.fd[i] >= 0)
			at += (size_t)snprintf(rec->hardware_text + at,
					       sizeof rec->hardware_text - at, "%s%s",
					       at ? "," : "", moe_hardware_name(i));
	moe_hardware_close(&h);
}

static enum moe_status open_file(struct moe_recorder *rec, const struct moe_recorder_params *p)
{
	struct moe_mxt_text text = { 0 };
	enum moe_status st = MOE_OK;

	if (!moe_mxt_create(&rec->writer, p->file))
		return moe_fail(MOE_ERR_IO, "trace %s: %s", p->file, rec->writer.error);
	moe_recorder_header(rec, &text);
	for (int i = 0; i < p->n_header; i++)
		moe_mxt_put_line(&text, p->header[i]);
	if (text.failed)
		st = moe_fail(MOE_ERR_NOMEM, "no memory for a trace");
	else if (!moe_mxt_write_header(&rec->writer, text.text))
		st = moe_fail(MOE_ERR_IO, "trace %s: %s", p->file, rec->writer.error);
	free(text.text);
	if (st != MOE_OK)
		moe_mxt_finish(&rec->writer);
	return st;
}

static enum moe_status create(struct moe_engine *e, const struct moe_recorder_params *p,
			      struct moe_recorder **out)
{
	struct moe_recorder *rec = moe_calloc(1, sizeof *rec);
	enum moe_status st;
	int rc;

	if (!rec)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a trace");
	rec->engine = e;
	rec->n_workers = e->n_workers;
	rec->origin = moe_now_ns();
	rec->remote_before = atomic_load(&e->remote_tasks);
	pthread_mutex_init(&rec->lock, NULL);
	pthread_cond_init(&rec->wake, NULL);
	for (int i = 0; i < MOE_MXT_CHUNK_TYPES; i++)
		moe_mxt_table_init(&rec->table[i], (enum moe_mxt_chunk)i);
	probe_hardware(rec, !p->no_hardware);
	MOE_TRY_GOTO(make_rings(rec, p->ring_bytes), st, fail);
	MOE_TRY_GOTO(open_file(rec, p), st, fail);
	rc = pthread_create(&rec->thread, NULL, moe_recorder_main, rec);
	if (rc) {
		moe_mxt_finish(&rec->writer);
		st = moe_fail(MOE_ERR_RUNTIME, "cannot create a thread: %s", strerror(rc));
		goto fail;
	}
	*out = rec;
	return MOE_OK;
fail:
	destroy(rec);
	return st;
}

/* Under e->lock, nothing outstanding. */
static void install(struct moe_engine *e, struct moe_recorder *rec)
{
	pthread_mutex_lock(&e->host_lock);
	e->recorder = rec;
	atomic_store(&e->recording, rec != NULL);
	pthread_mutex_unlock(&e->host_lock);
}

enum moe_status moe_recorder_start(struct moe_engine *e, const struct moe_recorder_params *p)
{
	struct moe_recorder *rec = NULL;
	enum moe_status st;

	MOE_TRY(moe_engine_check(e));
	MOE_TRY(moe_engine_check_not_task("starting a trace"));
	if (e->dry || !p->file)
		return moe_fail(MOE_ERR_ARG, "a trace needs a file and an engine that runs");
	MOE_TRY(moe_engine_lock(e));
	if (e->recorder)
		st = moe_fail(MOE_ERR_STATE, "a trace is being written already");
	else if (atomic_load(&e->outstanding))
		st = moe_fail(MOE_ERR_BUSY, "tasks are outstanding; wait before starting a trace");
	else
		st = create(e, p, &rec);
	if (st == MOE_OK) {
		if (!e->observer.submitted)
			e->observed++; /* what tensors remember is of an earlier time */
		install(e, rec);
	}
	pthread_mutex_unlock(&e->lock);
	return st;
}

static void fill_info(const struct moe_recorder *rec, struct moe_trace_info *out)
{
	const struct moe_ring *rings[] = { &rec->submission, &rec->host };

	*out = (struct moe_trace_info){ .struct_size = sizeof *out,
					.bytes = rec->writer.bytes,
					.tasks = rec->tasks,
					.writer_seconds = 1e-9 * (double)rec->cpu };
	for (int w = 0; w < rec->n_workers; w++)
		out->lost += atomic_load(&((struct moe_recorder *)rec)->worker[w].ring.lost);
	for (size_t i = 0; i < MOE_COUNT(rings); i++)
		out->lost += atomic_load(&((struct moe_ring *)rings[i])->lost);
	snprintf(out->error, sizeof out->error, "%s", rec->writer.error);
}

/* With e->lock held and nothing outstanding. */
static enum moe_status lock_quiet(struct moe_engine *e)
{
	for (;;) {
		MOE_TRY(moe_engine_lock(e));
		if (!atomic_load(&e->outstanding))
			return MOE_OK;
		pthread_mutex_unlock(&e->lock);
		moe_idle_drain(e, &e->outstanding);
	}
}

enum moe_status moe_recorder_stop(struct moe_engine *e, struct moe_trace_info *out)
{
	struct moe_trace_info info = { 0 };
	struct moe_recorder *rec;

	MOE_TRY(moe_engine_check(e));
	MOE_TRY(moe_engine_check_not_task("stopping a trace"));
	MOE_TRY(lock_quiet(e));
	rec = e->recorder;
	install(e, NULL);
	pthread_mutex_unlock(&e->lock);
	if (!rec)
		return moe_fail(MOE_ERR_STATE, "no trace is being written");
	pthread_mutex_lock(&rec->lock);
	rec->stop = true;
	pthread_cond_signal(&rec->wake);
	pthread_mutex_unlock(&rec->lock);
	pthread_join(rec->thread, NULL);
	fill_info(rec, &info);
	destroy(rec);
	if (out)
		*out = info;
	return info.error[0] ? moe_fail(MOE_ERR_IO, "the trace ends early: %s", info.error)
			     : MOE_OK;
}
