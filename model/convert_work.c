/* SPDX-License-Identifier: Apache-2.0 */
#include "model/convert_jobs.h"

#include <math.h>
#include <stdio.h>

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
	struct moe_convert_jobs pool;
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

enum moe_status moe_convert_read(const struct moe_convert_plan *p, const struct moe_convert_piece *c, int64_t expert,
				 float *x)
{
	const struct moe_convert_source *s = &p->source[c->source];
	struct moe_quantised q;

	if (!s->plain) {
		q = moe_st_quantised_expert(&s->coded, expert);
		MOE_TRY(moe_check_scales(&q, s->coded.scale->name));
	}
	read_rows(s, c, expert, x);
	return MOE_OK;
}

/* The pages of what was read need not stay, nor those before them that the kernel mapped along. */
void moe_convert_forget(const struct moe_convert_plan *p, const struct moe_convert_piece *c, int64_t expert)
{
	const struct moe_convert_source *s = &p->source[c->source];
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
	int64_t beyond = moe_first_beyond(a->dtype, m->x, (size_t)(c->n * c->k));
	float *back;

	if (beyond >= 0)
		return moe_fail(MOE_ERR_UNSUPPORTED, "row %lld, column %lld is %g, beyond %s",
				(long long)(c->row0 + beyond / c->k), (long long)(beyond % c->k), (double)m->x[beyond],
				moe_dtype_name(a->dtype));
	back = moe_alloc((size_t)c->k, sizeof *back);
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
	return c->writer->store(&m->q, &s);
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
		if ((s->coded.codes->codes && s->coded.codes->codes->exact) ||
		    m->q.coding.scale != from.coding.scale) /* F32 and BF16 scales become F16 ones for GPTQ */
			MOE_TRY(measure_kept(s, &from, c, m));
		return store(c, m);
	}
	m->x = moe_alloc((size_t)(c->n * c->k), sizeof *m->x);
	if (!m->x)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a [%lld, %lld] weight",
				(long long)c->n, (long long)c->k);
	read_rows(s, c, expert, m->x);
	if (s->change)
		MOE_TRY(r->plan->change->apply(s->change, expert, c->row0, c->n, c->k, m->x));
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

void moe_convert_counted(struct moe_convert_run *r, const struct moe_convert_piece *c, int64_t expert, double wrong,
			 double all, double largest, bool kept)
{
	const struct moe_convert_source *s = &r->plan->source[c->source];
	double error = all > 0 ? sqrt(wrong / all) : 0;

	r->count.matrices++;
	r->count.kept += kept && wrong == 0;
	r->count.largest = MOE_MAX(r->count.largest, largest);
	r->count.wrong += wrong;
	r->count.all += all;
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
		moe_convert_forget(w->run->plan, j->piece, expert);
		pthread_mutex_lock(&w->pool.lock);
		moe_convert_counted(w->run, j->piece, expert, m.wrong, m.all, m.largest, j->piece->keep && !m.x);
		pthread_mutex_unlock(&w->pool.lock);
	}
	free_made(&m);
	return status;
}

static enum moe_status run_copy(struct work *w, const struct job *j)
{
	const char *from = j->copy->copy->data;
	int64_t at = (int64_t)(w->shard->header_bytes + j->copy->at);

	for (size_t i = 0; i < j->bytes && !w->pool.stop; i += COPY_BYTES) {
		size_t n = MOE_MIN(COPY_BYTES, j->bytes - i);

		MOE_TRY(moe_file_put(w->file, at + (int64_t)i, from + i, n));
		moe_mapping_forget(from + i, n);
		moe_convert_jobs_done(&w->pool, (int64_t)n);
	}
	return MOE_OK;
}

static enum moe_status run_job(struct moe_convert_jobs *jobs, size_t i)
{
	struct work *w = jobs->user;
	const struct job *j = &w->job[i];

	if (j->copy)
		return run_copy(w, j);
	MOE_TRY(run_matrix(w, j));
	moe_convert_jobs_done(jobs, (int64_t)j->bytes);
	return MOE_OK;
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

enum moe_status moe_convert_write(struct moe_convert_run *r, int shard, struct moe_file_writer *w)
{
	struct work work = { .run = r, .shard = &r->plan->shard[shard], .file = w };
	enum moe_status status = moe_file_put(w, 0, work.shard->header, work.shard->header_bytes);

	if (status == MOE_OK)
		status = make_jobs(&work);
	work.pool = (struct moe_convert_jobs){
		.run = r, .what = work.shard->name, .n = work.n_jobs, .job = run_job, .user = &work
	};
	if (status == MOE_OK)
		status = moe_convert_jobs_run(&work.pool);
	moe_free(work.job);
	return status;
}
