/* SPDX-License-Identifier: Apache-2.0 */
#include "api/model_pack.h"

#include "codelets/kernels/packed/coded.h"
#include "model/file.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

struct job {
	struct moe_pack_source source; /* this part's share */
	enum moe_dtype dtype;
	size_t tensor;
	int part;
	struct moe_experts *experts; /* NULL: a dense weight */
	enum moe_expert_matrix which;
	int expert;
	const void *matrix;		   /* of the expert, all parts */
	const struct moe_quantised *coded; /* or this: rows n0, n0 + step, ... */
	int64_t n0, step;
	const struct moe_format *as; /* a plain matrix becomes codes, in all parts */
	const struct moe_trained *trained; /* of a dense weight, or NULL */
};

struct tensor {
	const char *name;
	const void *data;
	size_t bytes;
	int64_t non_finite; /* both under the lock while jobs run */
	int left;	    /* jobs */
};

struct moe_pack {
	struct moe_model *m;
	int64_t total;
	struct job *job; /* sorted by part before they run */
	size_t n_jobs, room;
	struct tensor *tensor;
	size_t n_tensors, tensor_room;
	size_t *first;		      /* [parts + 1] */
	atomic_size_t *next;	      /* [parts] */
	struct moe_quantised **coded; /* of jobs */
	size_t n_coded, coded_room;
	enum moe_status status; /* of jobs: the first failure, under the lock */
	char error[512];
	pthread_mutex_t lock;
	pthread_cond_t done;
};

enum moe_status moe_pack_create(struct moe_model *m, int64_t total_tensors, struct moe_pack **out)
{
	struct moe_pack *p = moe_calloc(1, sizeof *p);
	int parts = moe_engine_parts(m->engine);

	*out = NULL;
	if (!p)
		return moe_fail(MOE_ERR_NOMEM, "no memory to load %s", m->params.dir);
	p->m = m;
	p->total = total_tensors;
	p->first = moe_calloc((size_t)parts + 1, sizeof *p->first);
	p->next = moe_calloc((size_t)parts, sizeof *p->next);
	pthread_mutex_init(&p->lock, NULL);
	pthread_cond_init(&p->done, NULL);
	if (!p->first || !p->next) {
		moe_pack_destroy(p);
		return moe_fail(MOE_ERR_NOMEM, "no memory to load %s", m->params.dir);
	}
	*out = p;
	return MOE_OK;
}

void moe_pack_destroy(struct moe_pack *p)
{
	if (!p)
		return;
	pthread_mutex_destroy(&p->lock);
	pthread_cond_destroy(&p->done);
	for (size_t i = 0; i < p->n_coded; i++)
		moe_free(p->coded[i]);
	moe_free(p->coded);
	moe_free(p->job);
	moe_free(p->tensor);
	moe_free(p->first);
	moe_free(p->next);
	moe_free(p);
}

/* Room for one more in an array that doubles. */
static enum moe_status grow(struct moe_pack *p, void **array, size_t n, size_t *room, size_t size)
{
	size_t more = *room ? 2 * *room : 256;
	void *grown;

	if (n < *room)
		return MOE_OK;
	grown = moe_realloc(*array, more, size);
	if (!grown)
		return moe_fail(MOE_ERR_NOMEM, "no memory to load %s", p->m->params.dir);
	*array = grown;
	*room = more;
	return MOE_OK;
}

enum moe_status moe_pack_tensor(struct moe_pack *p, const struct moe_st_tensor *t)
{
	MOE_TRY(grow(p, (void **)&p->tensor, p->n_tensors, &p->tensor_room, sizeof *p->tensor));
	p->tensor[p->n_tensors++] = (struct tensor){ .name = t->name, .data = t->data, .bytes = t->bytes };
	return MOE_OK;
}

/* Elements whose exponent is all ones; n of 2 bytes */
static int64_t count_halves(int64_t n, const char *src, uint16_t mask)
{
	int64_t count = 0;

	for (int64_t i = 0; i < n;) {
		int64_t end = MOE_MIN(n, i + 4096);
		uint16_t here = 0; /* as wide as what is compared, so that all lanes are used */

		for (; i < end; i++) {
			uint16_t v;

			memcpy(&v, src + 2 * i, sizeof v);
			here = (uint16_t)(here + ((v & mask) == mask));
		}
		count += here;
	}
	return count;
}

static int64_t count_non_finite(enum moe_dtype dtype, int64_t n, const char *src)
{
	size_t size = moe_dtype_size(dtype);
	uint16_t mask = dtype == MOE_F16 ? 0x7c00 : dtype == MOE_F64 ? 0x7ff0 : 0x7f80;
	int64_t count = 0;

	if (size == sizeof(uint16_t))
		return count_halves(n, src, mask);
	for (int64_t i = 0; i < n; i++) {
		uint16_t top;

		memcpy(&top, src + (size_t)i * size + size - 2, sizeof top);
		count += (top & mask) == mask;
	}
	return count;
}

void moe_pack_read(struct moe_pack *p, const struct moe_st_tensor *t)
{
	if (!p->m->params.skip_value_check)
		p->tensor[p->n_tensors - 1].non_finite += count_non_finite(
			t->dtype, (int64_t)(t->bytes / moe_dtype_size(t->dtype)), t->data);
}

static enum moe_status add(struct moe_pack *p, const struct job *j)
{
	MOE_TRY(grow(p, (void **)&p->job, p->n_jobs, &p->room, sizeof *p->job));
	p->job[p->n_jobs++] = *j;
	p->tensor[j->tensor].left++;
	return MOE_OK;
}

enum moe_status moe_pack_weight(struct moe_pack *p, int part, struct moe_weight *w,
				const struct moe_trained *trained, const void *src,
				enum moe_dtype dtype, int64_t n, int64_t k)
{
	return add(p, &(struct job){ .source = { w, src, n, k, k },
				     .trained = trained,
				     .dtype = dtype,
				     .tensor = p->n_tensors - 1,
				     .part = part });
}

enum moe_status moe_pack_expert(struct moe_pack *p, int back, struct moe_experts *e,
				enum moe_expert_matrix which, int expert, const void *src,
				enum moe_dtype dtype)
{
	struct job j = { .dtype = dtype,
			 .tensor = p->n_tensors - 1 - (size_t)back,
			 .experts = e,
			 .which = which,
			 .expert = expert,
			 .matrix = src };

	for (j.part = 0; j.part < e->P; j.part++) {
		j.source = moe_experts_source(e, which, expert, j.part, src, dtype);
		MOE_TRY(add(p, &j));
	}
	return MOE_OK;
}

/* A copy that lives as long as the jobs. */
static enum moe_status keep_coded(struct moe_pack *p, const struct moe_quantised *q,
				  const struct moe_quantised **out)
{
	struct moe_quantised *copy;

	MOE_TRY(grow(p, (void **)&p->coded, p->n_coded, &p->coded_room, sizeof *p->coded));
	copy = moe_alloc(1, sizeof *copy);
	if (!copy)
		return moe_fail(MOE_ERR_NOMEM, "no memory to load %s", p->m->params.dir);
	*copy = *q;
	*out = p->coded[p->n_coded++] = copy;
	return MOE_OK;
}

enum moe_status moe_pack_coded(struct moe_pack *p, int part, struct moe_weight *w, const struct moe_trained *trained,
			       const struct moe_quantised *q)
{
	struct job j = { .source = { w, NULL, q->n, q->k, q->k },
			 .trained = trained,
			 .dtype = MOE_U8,
			 .tensor = p->n_tensors - 1,
			 .part = part,
			 .step = 1 };

	MOE_TRY(keep_coded(p, q, &j.coded));
	return add(p, &j);
}

enum moe_status moe_pack_expert_coded(struct moe_pack *p, int back, struct moe_experts *e,
				      enum moe_expert_matrix which, int expert,
				      const struct moe_quantised *q, int64_t n0, int64_t step)
{
	struct job j = { .dtype = MOE_U8,
			 .tensor = p->n_tensors - 1 - (size_t)back,
			 .experts = e,
			 .which = which,
			 .expert = expert,
			 .n0 = n0,
			 .step = step };

	MOE_TRY(keep_coded(p, q, &j.coded));
	if (e->requantise) { /* whole matrices: blocks may lie in several parts */
		j.part = expert % e->P;
		j.source = moe_experts_source(e, which, expert, j.part, NULL, MOE_U8);
		return add(p, &j);
	}
	for (j.part = 0; j.part < e->P; j.part++) {
		j.source = moe_experts_source(e, which, expert, j.part, NULL, MOE_U8);
		MOE_TRY(add(p, &j));
	}
	return MOE_OK;
}

enum moe_status moe_pack_expert_as(struct moe_pack *p, int back, struct moe_experts *e,
				   enum moe_expert_matrix which, int expert, const void *src,
				   enum moe_dtype dtype, const struct moe_format *format)
{
	int64_t n = which == MOE_DOWN ? e->H : e->I, k = which == MOE_DOWN ? e->I : e->H;

	return add(p, &(struct job){ .source = { NULL, src, n, k, k },
				     .dtype = dtype,
				     .tensor = p->n_tensors - 1 - (size_t)back,
				     .part = expert % e->P,
				     .experts = e,
				     .which = which,
				     .expert = expert,
				     .matrix = src,
				     .step = 1,
				     .as = format });
}

/* Lets the file be read ahead while the first rows are looked at. */
static void announce(const struct moe_pack_source *s, size_t row)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)s->src & ~(page - 1);

	if (s->ld == s->k)
		madvise((void *)at, (uintptr_t)s->src - at + (size_t)s->n * row, MADV_WILLNEED);
}

/* Masters are what the codes stand for, and the codes are made of them, as after any update. */
static enum moe_status run_masters(const struct job *j, const char *name, int64_t *bad)
{
	const struct moe_quantised *q = j->coded;
	int64_t n = !j->experts ? q->n : j->which == MOE_DOWN ? j->experts->H : j->experts->I, k = q->k;
	float *x = moe_alloc((size_t)(n * k), sizeof *x);

	if (!x)
		return moe_fail(MOE_ERR_NOMEM, "no memory for masters of %s", name);
	for (int64_t i = 0; i < n; i++) {
		moe_dequantise_row(q, j->n0 + i * j->step, 0, k, x + i * k);
		*bad += count_non_finite(MOE_F32, k, (const char *)(x + i * k));
	}
	if (j->experts) {
		moe_experts_take_master(j->experts, j->which, j->expert, x, MOE_F32);
		moe_experts_requantise(j->experts, j->which, j->expert);
	} else {
		moe_trained_set(j->trained, x, MOE_F32);
	}
	moe_free(x);
	return MOE_OK;
}

/* The description of packed codes, without any. */
static void describe_coded(const struct job *j)
{
	struct moe_quantised q = *j->coded;
	const struct moe_coded_window all = { 0, q.n, 0, q.k, 1 };

	q.codes.data = NULL;
	for (int i = 0; j->experts && i < j->experts->P; i++)
		moe_experts_pack_coded(j->experts, j->which, j->expert, i, &q, j->n0, j->step);
	if (!j->experts)
		moe_coded_pack(moe_coded_order(moe_kernels()), j->source.w, &q, &all);
}

/* Codes as they are stored; *bad: those that are NaN. */
static enum moe_status run_coded(const struct job *j, const char *name, int64_t *bad)
{
	const struct moe_quantised *q = j->coded;
	const struct moe_coded_window all = { 0, q->n, 0, q->k, 1 };

	if (!j->experts || j->part == 0 || j->experts->requantise)
		MOE_TRY(moe_check_scales(q, name));
	if (j->trained || (j->experts && j->experts->requantise)) {
		describe_coded(j);
		return run_masters(j, name, bad);
	}
	*bad = j->experts ? moe_experts_pack_coded(j->experts, j->which, j->expert, j->part, q,
						   j->n0, j->step)
			  : moe_coded_pack(moe_coded_order(moe_kernels()), j->source.w, q, &all);
	return MOE_OK;
}

/* The whole matrix, so that the codes do not depend on how parts cut it. */
static enum moe_status run_as(const struct job *j, const char *name)
{
	const struct moe_pack_source *s = &j->source;
	struct moe_quantised q;
	void *memory;
	enum moe_status st =
		moe_quantise(j->as, j->matrix, j->dtype, s->n, s->k, s->k, &q, &memory);

	if (st != MOE_OK)
		st = moe_fail_in(st, "%s, expert %d", name, j->expert);
	for (int i = 0; st == MOE_OK && i < j->experts->P; i++)
		moe_experts_pack_coded(j->experts, j->which, j->expert, i, &q, 0, 1);
	moe_free(memory);
	if (st == MOE_OK && j->experts->requantise) { /* masters keep what codes drop */
		moe_experts_take_master(j->experts, j->which, j->expert, j->matrix, j->dtype);
		moe_experts_requantise(j->experts, j->which, j->expert);
	}
	moe_mapping_forget(j->matrix, (size_t)(s->n * s->k) * moe_dtype_size(j->dtype));
	return st;
}

static void run_plain(struct moe_pack *p, const struct job *j, int64_t *bad)
{
	const struct moe_pack_source *s = &j->source;
	size_t row = (size_t)s->ld * moe_dtype_size(j->dtype);

	announce(s, row);
	for (int64_t i = 0; !p->m->params.skip_value_check && i < s->n; i++)
		*bad += count_non_finite(j->dtype, s->k, s->src + (size_t)i * row);
	if (j->experts)
		moe_experts_pack_part(j->experts, j->which, j->expert, j->part, j->matrix,
				      j->dtype);
	else if (j->trained)
		moe_trained_set(j->trained, s->src, j->dtype);
	else
		moe_kernels()->weight_pack(s->w, s->src, j->dtype, s->n, s->k, s->ld, MOE_USE_GEMM);
	/* or they count as the process's memory until the file is closed */
	if (s->ld == s->k)
		moe_mapping_forget(s->src, (size_t)s->n * row);
	else /* other parts read columns of the same rows */
		moe_mapping_forget(j->matrix, (size_t)s->n * row);
}

static void run_job(struct moe_pack *p, const struct job *j)
{
	struct tensor *t = &p->tensor[j->tensor];
	enum moe_status st = MOE_OK;
	int64_t bad = 0;
	bool last;

	if (j->coded)
		st = run_coded(j, t->name, &bad);
	else if (j->as)
		st = run_as(j, t->name);
	else
		run_plain(p, j, &bad);
	pthread_mutex_lock(&p->lock);
	if (st != MOE_OK && p->status == MOE_OK) {
		p->status = st;
		snprintf(p->error, sizeof p->error, "%s", moe_last_error());
	}
	t->non_finite += bad;
	last = --t->left == 0;
	if (last)
		pthread_cond_signal(&p->done);
	pthread_mutex_unlock(&p->lock);
	if (last)
		moe_mapping_forget(t->data, t->bytes);
}

/* The part's own jobs, then what is left of others. */
static void work(void *arg, int part)
{
	struct moe_pack *p = arg;
	int parts = moe_engine_parts(p->m->engine);

	for (int i = 0; i < parts; i++) {
		int of = (part + i) % parts;
		size_t at;

		while ((at = p->next[of]++) < p->first[of + 1])
			run_job(p, &p->job[at]);
	}
}

/* Tensors in their order, as soon as they are done. */
static void report(void *arg)
{
	struct moe_pack *p = arg;
	struct moe_model *m = p->m;

	for (size_t i = 0; i < p->n_tensors; i++) {
		struct tensor *t = &p->tensor[i];
		pthread_mutex_lock(&p->lock);
		while (t->left)
			pthread_cond_wait(&p->done, &p->lock);
		pthread_mutex_unlock(&p->lock);
		m->non_finite += t->non_finite;
		if (t->non_finite)
			moe_log(MOE_LOG_WARNING, "%s has %lld values that are NaN or Inf", t->name,
				(long long)t->non_finite);
		if (m->params.progress)
			m->params.progress(t->name, (int64_t)i + 1, p->total, m->params.user);
	}
}

/* Stable: within a part in the order of the file. False: no memory, all stays with part 0. */
static bool sort_by_part(struct moe_pack *p)
{
	int parts = moe_engine_parts(p->m->engine);
	struct job *sorted = moe_calloc(MOE_MAX(p->n_jobs, (size_t)1), sizeof *sorted);

	if (!sorted)
		return false;
	for (size_t i = 0; i < p->n_jobs; i++)
		p->first[p->job[i].part + 1]++;
	for (int i = 0; i < parts; i++) {
		p->first[i + 1] += p->first[i];
		p->next[i] = p->first[i];
	}
	for (size_t i = 0; i < p->n_jobs; i++)
		sorted[p->next[p->job[i].part]++] = p->job[i];
	for (int i = 0; i < parts; i++)
		p->next[i] = p->first[i];
	moe_free(p->job);
	p->job = sorted;
	return true;
}

static double job_bytes(const struct job *j)
{
	double n = (double)(j->source.n * j->source.k);

	return j->coded ? n * j->coded->coding.format->bits / 8
			: n * (double)moe_dtype_size(j->dtype);
}

enum moe_status moe_pack_run(struct moe_pack *p)
{
	int parts = moe_engine_parts(p->m->engine), threads;
	double start = moe_now(), bytes = 0, seconds;

	for (size_t i = 0; i < p->n_jobs; i++)
		bytes += job_bytes(&p->job[i]);
	if (!sort_by_part(p))
		for (int i = 1; i <= parts; i++)
			p->first[i] = p->n_jobs;
	threads = moe_engine_parallel(p->m->engine, work, report, p);
	seconds = moe_now() - start;
	moe_log(MOE_LOG_INFO, "packed %.2f GB of weights in %.2f s (%.1f GB/s, %d threads)",
		bytes * 1e-9, seconds, bytes * 1e-9 / MOE_MAX(seconds, 1e-9), threads);
	return p->status == MOE_OK ? MOE_OK : moe_fail(p->status, "%s", p->error);
}
