/* SPDX-License-Identifier: Apache-2.0 */
#include "model/convert_work.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

#define COPY_BYTES ((size_t)8 << 20)
#define FAULT_AROUND ((size_t)64 << 10)

/* A matrix of a piece, or a tensor that is copied. */
struct job {
	const struct moe_convert_tensor *copy;
	const struct moe_convert_piece *piece;
	int64_t matrix;
	size_t bytes; /* of the output */
};

struct work {
	struct moe_convert_run *run;
	const struct moe_convert_shard *shard;
	struct moe_file_writer *file;
	struct job *job;
	size_t n_jobs;
	atomic_size_t next;
	atomic_bool stop;
	pthread_mutex_t lock;
	pthread_cond_t change;
	/* under the lock: */
	int running;
	int64_t done;
	enum moe_status status;
	char error[512];
};

/* ---- one matrix ---- */

static int64_t source_expert(const struct moe_convert_piece *c, int64_t matrix)
{
	return c->expert < 0 ? matrix : c->expert;
}

/* The rows of a matrix as they are, in f32. */
static void read_rows(const struct moe_convert_source *s, const struct moe_convert_piece *c,
		      int64_t expert, float *x)
{
	struct moe_quantised q;
	size_t size;

	if (s->plain) {
		size = moe_dtype_size(s->plain->dtype);
		moe_to_f32(x,
			   (const char *)s->plain->data +
				   (size_t)((expert * s->n + c->row0) * s->k) * size,
			   s->plain->dtype, (size_t)(c->n * c->k));
		return;
	}
	q = moe_st_quantised_expert(&s->coded, expert);
	for (int64_t i = 0; i < c->n; i++)
		moe_st_quantised_row(s->coded.codes, &q, c->row0 + i, 0, c->k, x + i * c->k);
}

/* The pages of what was read need not stay, nor those before them that the kernel mapped along. */
static void forget(const struct moe_convert_plan *p, const struct moe_convert_source *s,
		   const struct moe_convert_piece *c, int64_t expert)
{
	const struct moe_st_tensor *t = s->plain ? s->plain : s->coded.codes;
	size_t all = t->bytes / (size_t)MOE_MAX(s->experts, 1), bytes, before;
	const char *at =
		(const char *)t->data + (size_t)expert * all + all / (size_t)s->n * (size_t)c->row0;
	const void *file;

	moe_safetensors_file_data(p->st, t->file, &file, &bytes);
	if ((uintptr_t)at - (uintptr_t)file >= bytes)
		return; /* elsewhere */
	before = MOE_MIN(FAULT_AROUND, (size_t)(at - (const char *)file));
	moe_mapping_forget(at - before, before + all / (size_t)s->n * (size_t)c->n);
}

struct made {
	float *x; /* [n, k] */
	void *memory, *out[MOE_CONVERT_TENSORS];
	struct moe_quantised q;
	double wrong, all, largest;
};

static void add_error(struct made *m, int64_t n, const float *want, const float *got)
{
	for (int64_t i = 0; i < n; i++) {
		double d = (double)got[i] - (double)want[i];

		m->wrong += d * d;
		m->largest = MOE_MAX(m->largest, fabs(d));
		m->all += (double)want[i] * (double)want[i];
	}
}

static enum moe_status make_plain(const struct moe_convert_piece *c, struct made *m)
{
	const struct moe_array *a = &c->stored.codes;
	size_t size = moe_dtype_size(a->dtype);
	float *back = moe_alloc((size_t)c->k, sizeof *back);

	m->out[0] = moe_alloc((size_t)(c->n * c->k), size);
	if (!m->out[0] || !back) {
		moe_free(back);
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	}
	moe_from_f32(m->out[0], a->dtype, m->x, (size_t)(c->n * c->k));
	for (int64_t i = 0; i < c->n; i++) {
		moe_to_f32(back, (char *)m->out[0] + (size_t)(i * c->k) * size, a->dtype,
			   (size_t)c->k);
		add_error(m, c->k, m->x + i * c->k, back);
	}
	moe_free(back);
	return MOE_OK;
}

static enum moe_status measure(const struct moe_convert_piece *c, struct made *m)
{
	float *row = moe_alloc((size_t)c->k, sizeof *row);

	if (!row)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (int64_t i = 0; i < c->n; i++) {
		moe_dequantise_row(&m->q, i, 0, c->k, row);
		add_error(m, c->k, m->x + i * c->k, row);
	}
	moe_free(row);
	return MOE_OK;
}

/* Of codes that were taken over but come near only. */
static enum moe_status measure_kept(const struct moe_convert_source *s, const struct moe_quantised *from,
				    const struct moe_convert_piece *c, struct made *m)
{
	float *row = moe_alloc((size_t)c->k * 2, sizeof *row);

	if (!row)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (int64_t i = 0; i < c->n; i++) {
		moe_st_quantised_row(s->coded.codes, from, c->row0 + i, 0, c->k, row);
		moe_dequantise_row(&m->q, i, 0, c->k, row + c->k);
		add_error(m, c->k, row, row + c->k);
	}
	moe_free(row);
	return MOE_OK;
}

static enum moe_status store(const struct moe_convert_piece *c, struct made *m)
{
	struct moe_stored s = c->stored;
	struct moe_array *a[MOE_CONVERT_TENSORS] = { &s.codes, &s.scale, &s.zero, &s.more };

	for (int i = 0; i < MOE_CONVERT_TENSORS; i++) {
		if (!a[i]->ndim)
			continue;
		a[i]->data = m->out[i] = moe_alloc((size_t)moe_shape_count(a[i]->ndim, a[i]->shape),
						   moe_dtype_size(a[i]->dtype));
		if (!m->out[i])
			return moe_fail(MOE_ERR_NOMEM, "out of memory");
	}
	return c->layout->writer->store(&m->q, &s);
}

static enum moe_status make(const struct moe_convert_run *r, const struct moe_convert_piece *c,
			    int64_t expert, struct made *m)
{
	const struct moe_convert_source *s = &r->plan->source[c->source];
	struct moe_quantised from;

	m->q = c->q;
	if (!s->plain) {
		from = moe_st_quantised_expert(&s->coded, expert);
		MOE_TRY(moe_check_scales(&from, s->coded.scale->name));
	}
	if (c->keep) {
		MOE_TRY(moe_quantised_copy(&from, c->row0, 1, &m->q, &m->memory));
		if (s->coded.codes->codes && s->coded.codes->codes->exact)
			MOE_TRY(measure_kept(s, &from, c, m));
		return store(c, m);
	}
	m->x = moe_alloc((size_t)(c->n * c->k), sizeof *m->x);
	if (!m->x)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a [%lld, %lld] weight",
				(long long)c->n, (long long)c->k);
	read_rows(s, c, expert, m->x);
	if (s->change)
		r->plan->change->apply(s->change, expert, c->row0, c->n, c->k, m->x);
	if (!c->layout)
		return make_plain(c, m);
	MOE_TRY(moe_quantise_as(m->x, MOE_F32, c->k, &m->q, &m->memory));
	MOE_TRY(measure(c, m));
	return store(c, m);
}

static void free_made(struct made *m)
{
	moe_free(m->x);
	moe_free(m->memory);
	for (int i = 0; i < MOE_CONVERT_TENSORS; i++)
		moe_free(m->out[i]);
}

/* ---- jobs ---- */

static void count_made(struct moe_convert_run *r, const struct moe_convert_piece *c, int64_t expert,
		       const struct made *m)
{
	const struct moe_convert_source *s = &r->plan->source[c->source];
	double error = m->all > 0 ? sqrt(m->wrong / m->all) : 0;

	r->count.matrices++;
	r->count.kept += c->keep && !m->x && m->wrong == 0;
	r->count.largest = MOE_MAX(r->count.largest, m->largest);
	r->count.wrong += m->wrong;
	r->count.all += m->all;
	if (error <= r->count.worst)
		return;
	r->count.worst = error;
	if (s->experts)
		snprintf(r->count.worst_name, sizeof r->count.worst_name, "%.150s, expert %lld",
			 s->name, (long long)expert);
	else
		snprintf(r->count.worst_name, sizeof r->count.worst_name, "%s", s->name);
}

static enum moe_status write_made(struct work *w, const struct job *j, const struct made *m)
{
	const struct moe_convert_plan *p = w->run->plan;

	for (int i = 0; i < MOE_CONVERT_TENSORS; i++) {
		const struct moe_convert_tensor *t;
		size_t bytes;

		if (!m->out[i])
			continue;
		t = &p->tensor[j->piece->tensor[i]];
		bytes = t->bytes / (size_t)j->piece->matrices;
		MOE_TRY(moe_file_put(
			w->file,
			(int64_t)(w->shard->header_bytes + t->at + (size_t)j->matrix * bytes),
			m->out[i], bytes));
	}
	return MOE_OK;
}

static enum moe_status run_matrix(struct work *w, const struct job *j)
{
	const struct moe_convert_source *s = &w->run->plan->source[j->piece->source];
	int64_t expert = source_expert(j->piece, j->matrix);
	struct made m = { 0 };
	enum moe_status status = make(w->run, j->piece, expert, &m);

	if (status != MOE_OK)
		moe_fail_in(status, s->experts ? "%s, expert %lld" : "%s", s->name,
			    (long long)expert);
	else
		status = write_made(w, j, &m);
	if (status == MOE_OK) {
		forget(w->run->plan, s, j->piece, expert);
		pthread_mutex_lock(&w->lock);
		count_made(w->run, j->piece, expert, &m);
		pthread_mutex_unlock(&w->lock);
	}
	free_made(&m);
	return status;
}

static void add_done(struct work *w, size_t bytes)
{
	pthread_mutex_lock(&w->lock);
	w->done += (int64_t)bytes;
	pthread_cond_signal(&w->change);
	pthread_mutex_unlock(&w->lock);
}

static enum moe_status run_copy(struct work *w, const struct job *j)
{
	const char *from = j->copy->copy->data;
	int64_t at = (int64_t)(w->shard->header_bytes + j->copy->at);

	for (size_t i = 0; i < j->bytes && !w->stop; i += COPY_BYTES) {
		size_t n = MOE_MIN(COPY_BYTES, j->bytes - i);

		MOE_TRY(moe_file_put(w->file, at + (int64_t)i, from + i, n));
		moe_mapping_forget(from + i, n);
		add_done(w, n);
	}
	return MOE_OK;
}

static void *work_thread(void *arg)
{
	struct work *w = arg;
	size_t i;

	while (!w->stop && (i = w->next++) < w->n_jobs) {
		const struct job *j = &w->job[i];
		enum moe_status status = j->copy ? run_copy(w, j) : run_matrix(w, j);

		if (status == MOE_OK) {
			if (!j->copy)
				add_done(w, j->bytes);
			continue;
		}
		pthread_mutex_lock(&w->lock);
		if (w->status == MOE_OK) {
			w->status = status;
			snprintf(w->error, sizeof w->error, "%s", moe_last_error());
		}
		pthread_mutex_unlock(&w->lock);
		w->stop = true;
	}
	pthread_mutex_lock(&w->lock);
	w->running--;
	pthread_cond_signal(&w->change);
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

/* Progress comes from the calling thread. */
static void watch(struct work *w)
{
	struct moe_convert_run *r = w->run;
	int64_t before = r->done;
	bool running = true;

	while (running) {
		struct timespec until;

		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += 100000000;
		until.tv_sec += until.tv_nsec / 1000000000;
		until.tv_nsec %= 1000000000;
		pthread_mutex_lock(&w->lock);
		if (w->running)
			pthread_cond_timedwait(&w->change, &w->lock, &until);
		running = w->running > 0;
		r->done = before + w->done;
		pthread_mutex_unlock(&w->lock);
		if (w->stop || !r->progress ||
		    !r->progress(w->shard->name, r->done, r->total, r->user))
			continue;
		pthread_mutex_lock(&w->lock);
		if (w->status == MOE_OK) {
			w->status = MOE_ERR_INTERRUPTED;
			snprintf(w->error, sizeof w->error,
				 "interrupted: what is complete was kept, the same command goes on "
				 "with it");
		}
		pthread_mutex_unlock(&w->lock);
		w->stop = true;
	}
}

static enum moe_status make_jobs(struct work *w)
{
	const struct moe_convert_plan *p = w->run->plan;
	size_t room = 0;

	for (size_t i = w->shard->first; i < w->shard->first + w->shard->n; i++)
		room += p->tensor[i].copy ? 1 : (size_t)p->piece[p->tensor[i].piece].matrices;
	w->job = moe_alloc(room, sizeof *w->job);
	if (!w->job)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (size_t i = w->shard->first; i < w->shard->first + w->shard->n; i++) {
		const struct moe_convert_tensor *t = &p->tensor[i];
		const struct moe_convert_piece *c = t->copy ? NULL : &p->piece[t->piece];
		size_t bytes = 0;

		if (t->copy) {
			w->job[w->n_jobs++] = (struct job){ .copy = t, .bytes = t->bytes };
			continue;
		}
		if (t->slot)
			continue; /* with its codes */
		for (int s = 0; s < MOE_CONVERT_TENSORS; s++)
			if (c->tensor[s] >= 0)
				bytes += p->tensor[c->tensor[s]].bytes;
		for (int64_t m = 0; m < c->matrices; m++)
			w->job[w->n_jobs++] = (struct job){ .piece = c,
							    .matrix = m,
							    .bytes = bytes / (size_t)c->matrices };
	}
	return MOE_OK;
}

static enum moe_status run_threads(struct work *w)
{
	int n = MOE_MIN(w->run->threads, (int)MOE_MIN(w->n_jobs, (size_t)1024)), started = 0;
	pthread_t *thread = moe_alloc((size_t)MOE_MAX(n, 1), sizeof *thread);

	if (!thread)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	w->running = n;
	while (started < n && pthread_create(&thread[started], NULL, work_thread, w) == 0)
		started++;
	pthread_mutex_lock(&w->lock);
	w->running -= n - started;
	if (n && !started)
		w->status = MOE_ERR_NOMEM,
		snprintf(w->error, sizeof w->error, "no thread can be started");
	pthread_mutex_unlock(&w->lock);
	watch(w);
	for (int i = 0; i < started; i++)
		pthread_join(thread[i], NULL);
	moe_free(thread);
	return w->status == MOE_OK ? MOE_OK : moe_fail(w->status, "%s", w->error);
}

enum moe_status moe_convert_write(struct moe_convert_run *r, int shard, struct moe_file_writer *w)
{
	struct work work = { .run = r, .shard = &r->plan->shard[shard], .file = w };
	enum moe_status status;

	pthread_mutex_init(&work.lock, NULL);
	pthread_cond_init(&work.change, NULL);
	status = moe_file_put(w, 0, work.shard->header, work.shard->header_bytes);
	if (status == MOE_OK)
		status = make_jobs(&work);
	if (status == MOE_OK)
		status = run_threads(&work);
	moe_free(work.job);
	pthread_mutex_destroy(&work.lock);
	pthread_cond_destroy(&work.change);
	return status;
}
