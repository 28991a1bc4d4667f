/* SPDX-License-Identifier: Apache-2.0 */
#include "api/model_pack.h"

#include "api/model_fetch.h"
#include "codelets/kernels/packed/coded.h"

#include <pthread.h>
#include <stdio.h>
#include <time.h>

struct job {
	struct moe_pack_source source; /* this part's share; with `all` the whole matrix */
	bool all;		       /* parts */
	enum moe_dtype dtype;
	size_t tensor;
	int part;
	struct moe_experts *experts; /* NULL: a dense weight */
	enum moe_expert_matrix which;
	int expert;
	const void *matrix;		   /* of the expert, all parts */
	const struct moe_quantised *coded; /* or this: rows n0, n0 + step, ... */
	int64_t n0, step;
	const struct moe_st_tensor *decode; /* coded becomes plain */
	const struct moe_format *as; /* a plain matrix becomes codes, in all parts */
	const struct moe_trained *trained; /* of a dense weight, or NULL */
};

struct tensor {
	const char *name;
	const struct moe_st_tensor *from;
	int64_t non_finite; /* both under the lock while jobs run */
	int left;	    /* jobs */
};

struct moe_pack {
	struct moe_model *m;
	const struct moe_safetensors *st;
	struct moe_fetch own; /* of moe_pack_read */
	int64_t total;	      /* bytes */
	_Atomic int64_t fetched;
	struct job *job; /* sorted by part before they run */
	size_t n_jobs, room;
	struct tensor *tensor;
	size_t n_tensors, tensor_room;
	size_t *first;		      /* [parts + 1] */
	atomic_size_t *next;	      /* [parts] */
	struct moe_quantised **coded; /* of jobs */
	size_t n_coded, coded_room;
	atomic_bool failed;	/* what is left is not worth reading */
	enum moe_status status; /* of jobs: the first failure, under the lock */
	char error[512];
	pthread_mutex_t lock;
	pthread_cond_t done;
};

enum moe_status moe_pack_create(struct moe_model *m, const struct moe_safetensors *st, struct moe_pack **out)
{
	struct moe_pack *p = moe_calloc(1, sizeof *p);
	int parts = moe_engine_parts(m->engine);

	*out = NULL;
	if (!p)
		return moe_fail(MOE_ERR_NOMEM, "no memory to load %s", m->params.dir);
	p->m = m;
	p->st = st;
	p->own = (struct moe_fetch){ .st = st, .done = &p->fetched };
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
	moe_fetch_free(&p->own);
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
	p->tensor[p->n_tensors++] = (struct tensor){ .name = t->name, .from = t };
	p->total += (int64_t)t->bytes;
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

enum moe_status moe_pack_read(struct moe_pack *p, const struct moe_st_tensor *t, const void **values)
{
	enum moe_status st = moe_fetch_bytes(&p->own, t->data, t->bytes, values);

	if (st != MOE_OK)
		return moe_fail_in(st, "%s", t->name);
	if (!p->m->params.skip_value_check)
		p->tensor[p->n_tensors - 1].non_finite += count_non_finite(
			t->dtype, (int64_t)(t->bytes / moe_dtype_size(t->dtype)), *values);
	return MOE_OK;
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

/* An expert's matrix for all parts. */
static enum moe_status add_whole(struct moe_pack *p, struct job *j)
{
	const struct moe_experts *e = j->experts;
	int64_t n = j->which == MOE_DOWN ? e->H : e->I, k = j->which == MOE_DOWN ? e->I : e->H;

	j->all = true;
	j->part = j->expert % e->P;
	j->source = (struct moe_pack_source){ NULL, j->matrix, n, k, k };
	return add(p, j);
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

	/* parts share rows of down; masters are made of whole matrices */
	if ((which == MOE_DOWN && e->P > 1) || e->part[0].base[which].value)
		return add_whole(p, &j);
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

enum moe_status moe_pack_decoded(struct moe_pack *p, int part, struct moe_weight *w, const struct moe_st_tensor *t,
				 const struct moe_quantised *q, int64_t n0, int64_t n)
{
	struct job j = { .source = { w, NULL, n, q->k, q->k },
			 .dtype = MOE_BF16,
			 .tensor = p->n_tensors - 1,
			 .part = part,
			 .n0 = n0,
			 .decode = t };

	MOE_TRY(keep_coded(p, q, &j.coded));
	return add(p, &j);
}

/* Each part's rows are its own, with their scales. */
static bool parts_have_rows(const struct moe_experts *e, enum moe_expert_matrix which, const struct moe_quantised *q,
			    int64_t n0, int64_t step)
{
	bool own = which != MOE_DOWN && moe_fetch_has_rows(q);

	for (int i = 0; own && i < e->P; i++)
		own = (n0 + e->part[i].i0 * step) % q->rows == 0;
	return own && e->P > 1;
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
	if (p->m->expand || e->requantise || !parts_have_rows(e, which, q, n0, step)) /* blocks may lie in several parts */
		return add_whole(p, &j);
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

/* The first and the last part that a job is for. */
static int first_part(const struct job *j)
{
	return j->all ? 0 : j->part;
}

static int last_part(const struct job *j)
{
	return j->all ? j->experts->P - 1 : j->part;
}

/* Masters are what the codes stand for, and the codes are made of them, as after any update. */
static enum moe_status run_masters(const struct job *j, const char *name, int64_t *bad)
{
	const struct moe_quantised *q = j->coded;
	int64_t n = j->source.n, k = j->source.k;
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
	const struct moe_coded_window all = { 0, j->source.n, 0, j->source.k, 1 };

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

	MOE_TRY(moe_check_scales(q, name));
	if (j->trained || (j->experts && j->experts->requantise)) {
		describe_coded(j);
		return run_masters(j, name, bad);
	}
	if (!j->experts)
		*bad = moe_coded_pack(moe_coded_order(moe_kernels()), j->source.w, q, &all);
	for (int i = first_part(j); j->experts && i <= last_part(j); i++)
		*bad += moe_experts_pack_coded(j->experts, j->which, j->expert, i, q, j->n0, j->step);
	return MOE_OK;
}

/* What codes stand for, as bf16 weights. */
static enum moe_status run_expanded(const struct job *j, const struct moe_st_tensor *from, const char *name,
				    int64_t *bad)
{
	const struct moe_quantised *q = j->coded;
	int64_t n = j->source.n, k = j->source.k;
	uint16_t *plain = moe_alloc((size_t)(n * k), sizeof *plain);
	float *row = moe_alloc((size_t)k, sizeof *row);
	enum moe_status st = plain && row ? moe_check_scales(q, name) : moe_fail(MOE_ERR_NOMEM, "no memory to expand codes");

	for (int64_t i = 0; st == MOE_OK && i < n; i++) {
		moe_st_quantised_row(from, q, j->n0 + i * j->step, 0, k, row);
		*bad += count_non_finite(MOE_F32, k, (const char *)row);
		moe_from_f32(plain + i * k, MOE_BF16, row, (size_t)k);
	}
	for (int i = first_part(j); st == MOE_OK && i <= last_part(j); i++)
		moe_experts_pack_part(j->experts, j->which, j->expert, i, plain, MOE_BF16);
	moe_free(plain);
	moe_free(row);
	return st;
}

/* The rows of the source that a job of codes is made from: of a dense weight all. */
static void rows_of(const struct job *j, int64_t *row0, int64_t *rows)
{
	const struct moe_experts *e = j->experts;
	int64_t i0 = e && j->which != MOE_DOWN && !j->all ? e->part[j->part].i0 : 0;

	*row0 = e ? j->n0 + i0 * j->step : 0;
	*rows = !e ? j->source.n : (j->source.n - 1) * j->step + 1;
}

static enum moe_status fetch_coded(struct moe_fetch *f, const struct moe_pack *p, const struct job *j, const char *name, int64_t *bad)
{
	struct moe_quantised q;
	struct job here = *j;
	int64_t row0, rows, first;

	rows_of(j, &row0, &rows);
	MOE_TRY(moe_fetch_coded(f, j->coded, row0, rows, &q, &first));
	here.coded = &q;
	here.n0 -= first;
	return p->m->expand && j->experts ? run_expanded(&here, p->tensor[j->tensor].from, name, bad) : run_coded(&here, name, bad);
}

/* Codes of a weight that is packed plain. */
static enum moe_status fetch_decoded(struct moe_fetch *f, const struct job *j, const char *name)
{
	const struct moe_pack_source *s = &j->source;
	uint16_t *plain = moe_alloc((size_t)(s->n * s->k), sizeof *plain);
	float *row = moe_alloc((size_t)s->k, sizeof *row);
	enum moe_status st = plain && row ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", name);
	struct moe_quantised q;
	int64_t first = 0;

	if (st == MOE_OK)
		st = moe_fetch_coded(f, j->coded, j->n0, s->n, &q, &first);
	if (st == MOE_OK)
		st = moe_check_scales(&q, name);
	for (int64_t i = 0; st == MOE_OK && i < s->n; i++) {
		moe_st_quantised_row(j->decode, &q, j->n0 - first + i, 0, s->k, row);
		moe_from_f32(plain + i * s->k, MOE_BF16, row, (size_t)s->k);
	}
	if (st == MOE_OK)
		moe_kernels()->weight_pack(s->w, plain, MOE_BF16, s->n, s->k, s->k, MOE_USE_GEMM);
	moe_free(plain);
	moe_free(row);
	return st;
}

/* The whole matrix, so that the codes do not depend on how parts cut it. */
static enum moe_status run_as(const struct job *j)
{
	const struct moe_pack_source *s = &j->source;
	struct moe_quantised q;
	void *memory;
	enum moe_status st =
		moe_quantise(j->as, j->matrix, j->dtype, s->n, s->k, s->k, &q, &memory);

	if (st != MOE_OK)
		st = moe_fail_in(st, "expert %d", j->expert);
	for (int i = 0; st == MOE_OK && i < j->experts->P; i++)
		moe_experts_pack_coded(j->experts, j->which, j->expert, i, &q, 0, 1);
	moe_free(memory);
	if (st == MOE_OK && j->experts->requantise) { /* masters keep what codes drop */
		moe_experts_take_master(j->experts, j->which, j->expert, j->matrix, j->dtype);
		moe_experts_requantise(j->experts, j->which, j->expert);
	}
	return st;
}

/* All of a source at once: what is trained, and what becomes codes. */
static enum moe_status fetch_whole(struct moe_fetch *f, const struct moe_pack *p, const struct job *j, int64_t *bad)
{
	const struct moe_pack_source *s = &j->source;
	struct job here = *j;
	const void *src;

	MOE_TRY(moe_fetch_bytes(f, s->src, (size_t)(s->n * s->k) * moe_dtype_size(j->dtype), &src));
	here.matrix = here.source.src = src;
	if (j->as)
		return run_as(&here);
	if (!p->m->params.skip_value_check)
		*bad += count_non_finite(j->dtype, s->n * s->k, src);
	if (j->trained)
		moe_trained_set(j->trained, src, j->dtype);
	for (int i = first_part(j); j->experts && i <= last_part(j); i++)
		moe_experts_pack_part(j->experts, j->which, j->expert, i, src, j->dtype);
	return MOE_OK;
}

/* Rows n0.. of a weight, n of them; n0 is a multiple of 16. */
static void pack_rows(const struct moe_pack_source *to, enum moe_dtype dtype, int64_t n0, int64_t n, const char *src)
{
	struct moe_weight part = *to->w;

	part.data = (char *)to->w->data + moe_kernels()->weight_bytes(dtype, n0, to->k, MOE_USE_GEMM);
	moe_kernels()->weight_pack(&part, src, dtype, n, to->k, to->ld, MOE_USE_GEMM);
}

/* Where rows of a job go in one part, as if its matrix began at src. */
static struct moe_pack_source target(const struct job *j, int part, const void *src)
{
	struct moe_pack_source to = j->source;

	if (!j->all) {
		to.src = src;
		return to;
	}
	return moe_experts_source(j->experts, j->which, j->expert, part, src, j->dtype);
}

/* Plain weights that stay as they are: a piece of rows after the other. */
static enum moe_status fetch_rows(struct moe_fetch *f, const struct moe_pack *p, const struct job *j, int64_t *bad)
{
	const struct moe_pack_source *s = &j->source;
	size_t row = (size_t)s->ld * moe_dtype_size(j->dtype);
	int64_t most = MOE_MAX((int64_t)(MOE_FETCH_BYTES / row) / 16, 1) * 16;

	for (int64_t n0 = 0; n0 < s->n; n0 += most) {
		int64_t n = MOE_MIN(most, s->n - n0);
		const void *src;

		MOE_TRY(moe_fetch_bytes(f, s->src + (size_t)n0 * row, (size_t)n * row, &src));
		if (!p->m->params.skip_value_check)
			*bad += count_non_finite(j->dtype, n * s->k, src);
		for (int i = first_part(j); i <= last_part(j); i++) {
			struct moe_pack_source to = target(j, i, src);

			pack_rows(&to, j->dtype, n0, n, to.src);
		}
	}
	for (int i = first_part(j); i <= last_part(j); i++) {
		struct moe_pack_source to = target(j, i, NULL);

		moe_kernels()->weight_pack(to.w, NULL, j->dtype, to.n, to.k, to.ld, MOE_USE_GEMM);
		if (j->experts && j->experts->transposed)
			moe_expert_transpose(j->experts, j->experts->transposed, i, j->expert, j->which);
	}
	return MOE_OK;
}

static enum moe_status run(struct moe_fetch *f, struct moe_pack *p, const struct job *j, const char *name, int64_t *bad)
{
	bool masters = j->trained || (j->experts && j->experts->part[0].base[j->which].value);

	if (j->decode)
		return fetch_decoded(f, j, name);
	if (j->coded)
		return fetch_coded(f, p, j, name, bad);
	return masters || j->as ? fetch_whole(f, p, j, bad) : fetch_rows(f, p, j, bad);
}

static void run_job(struct moe_fetch *f, struct moe_pack *p, const struct job *j)
{
	struct tensor *t = &p->tensor[j->tensor];
	enum moe_status st = MOE_OK;
	int64_t bad = 0;

	if (!p->failed) {
		st = run(f, p, j, t->name, &bad);
		if (st != MOE_OK && !strstr(moe_last_error(), t->name))
			st = moe_fail_in(st, "%s", t->name);
	}
	pthread_mutex_lock(&p->lock);
	if (st != MOE_OK && p->status == MOE_OK) {
		p->status = st;
		snprintf(p->error, sizeof p->error, "%s", moe_last_error());
		p->failed = true;
	}
	t->non_finite += bad;
	if (--t->left == 0)
		pthread_cond_signal(&p->done);
	pthread_mutex_unlock(&p->lock);
}

/* The part's own jobs, then what is left of others. */
static void work(void *arg, int part)
{
	struct moe_pack *p = arg;
	struct moe_fetch f = { .st = p->st, .done = &p->fetched };
	int parts = moe_engine_parts(p->m->engine);

	for (int i = 0; i < parts; i++) {
		int of = (part + i) % parts;
		size_t at;

		while ((at = p->next[of]++) < p->first[of + 1])
			run_job(&f, p, &p->job[at]);
	}
	moe_fetch_free(&f);
}

static void show(const struct moe_pack *p, const char *name)
{
	const struct moe_model_params *m = &p->m->params;

	if (m->progress)
		m->progress(name, p->fetched, p->total, m->user);
}

/* Until the tensor is done; progress ten times a second meanwhile. */
static void wait_for(struct moe_pack *p, struct tensor *t)
{
	struct timespec until;

	pthread_mutex_lock(&p->lock);
	while (t->left) {
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += 100000000;
		until.tv_sec += until.tv_nsec / 1000000000;
		until.tv_nsec %= 1000000000;
		pthread_cond_timedwait(&p->done, &p->lock, &until);
		pthread_mutex_unlock(&p->lock);
		show(p, t->name);
		pthread_mutex_lock(&p->lock);
	}
	pthread_mutex_unlock(&p->lock);
}

/* Tensors in their order, as soon as they are done. */
static void report(void *arg)
{
	struct moe_pack *p = arg;
	struct moe_model *m = p->m;

	for (size_t i = 0; i < p->n_tensors; i++) {
		struct tensor *t = &p->tensor[i];

		wait_for(p, t);
		m->non_finite += t->non_finite;
		if (t->non_finite)
			moe_log(MOE_LOG_WARNING, "%s has %lld values that are NaN or Inf", t->name,
				(long long)t->non_finite);
		show(p, t->name);
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

enum moe_status moe_pack_run(struct moe_pack *p)
{
	int parts = moe_engine_parts(p->m->engine), threads;
	double start = moe_now(), seconds;
	int64_t before = p->fetched;

	if (!sort_by_part(p))
		for (int i = 1; i <= parts; i++)
			p->first[i] = p->n_jobs;
	threads = moe_engine_parallel(p->m->engine, work, report, p);
	seconds = moe_now() - start;
	before = p->fetched - before;
	moe_log(MOE_LOG_INFO, "read and packed %.2f GB of weights in %.2f s (%.1f GB/s, %d threads)",
		(double)before * 1e-9, seconds, (double)before * 1e-9 / MOE_MAX(seconds, 1e-9), threads);
	return p->status == MOE_OK ? MOE_OK : moe_fail(p->status, "%s", p->error);
}
