/* SPDX-License-Identifier: Apache-2.0 */
/* Collects what is to be packed: each job has one way (model_pack_ways.c) to make its weights. */
#include "api/model_pack_jobs.h"

enum moe_status moe_pack_create(struct moe_model *m, const struct moe_safetensors *st,
				struct moe_pack **out)
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
	p->tensor[p->n_tensors++] = (struct moe_pack_tensor){ .name = t->name, .from = t };
	p->total += (int64_t)t->bytes;
	return MOE_OK;
}

enum moe_status moe_pack_read(struct moe_pack *p, const struct moe_st_tensor *t,
			      const void **values)
{
	enum moe_status st = moe_fetch_bytes(&p->own, t->data, t->bytes, values);

	if (st != MOE_OK)
		return moe_fail_in(st, "%s", t->name);
	if (!p->m->params.skip_value_check)
		p->tensor[p->n_tensors - 1].non_finite += moe_pack_count_non_finite(
			t->dtype, (int64_t)(t->bytes / moe_dtype_size(t->dtype)), *values);
	return MOE_OK;
}

static enum moe_status add(struct moe_pack *p, const struct moe_pack_job *j)
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
	return add(p,
		   &(struct moe_pack_job){ .way = trained ? moe_pack_whole_way : moe_pack_rows_way,
					   .source = { w, src, n, k, k },
					   .trained = trained,
					   .dtype = dtype,
					   .tensor = p->n_tensors - 1,
					   .part = part });
}

/* An expert's matrix for all parts. */
static enum moe_status add_whole(struct moe_pack *p, struct moe_pack_job *j)
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
	struct moe_pack_job j = { .dtype = dtype,
				  .tensor = p->n_tensors - 1 - (size_t)back,
				  .experts = e,
				  .which = which,
				  .expert = expert,
				  .matrix = src };

	if (p->m->convert) { /* of the whole matrix, so that the codes do not depend on how parts
				cut it */
		j.way = moe_pack_quantise_way;
		return add_whole(p, &j);
	}
	/* parts share rows of down; masters are made of whole matrices */
	j.way = e->part[0].base[which].value ? moe_pack_whole_way : moe_pack_rows_way;
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

enum moe_status moe_pack_coded(struct moe_pack *p, int part, struct moe_weight *w,
			       const struct moe_trained *trained, const struct moe_quantised *q)
{
	struct moe_pack_job j = { .way = trained ? moe_pack_masters_way : moe_pack_coded_way,
				  .source = { w, NULL, q->n, q->k, q->k },
				  .trained = trained,
				  .dtype = MOE_U8,
				  .tensor = p->n_tensors - 1,
				  .part = part,
				  .step = 1 };

	MOE_TRY(keep_coded(p, q, &j.coded));
	return add(p, &j);
}

enum moe_status moe_pack_decoded(struct moe_pack *p, int part, struct moe_weight *w,
				 const struct moe_quantised *q, int64_t n0, int64_t n)
{
	struct moe_pack_job j = { .way = moe_pack_expand_way,
				  .source = { w, NULL, n, q->k, q->k },
				  .dtype = MOE_BF16,
				  .tensor = p->n_tensors - 1,
				  .part = part,
				  .n0 = n0,
				  .step = 1 };

	MOE_TRY(keep_coded(p, q, &j.coded));
	return add(p, &j);
}

/* Each part's rows are its own, with their scales. */
static bool parts_have_rows(const struct moe_experts *e, enum moe_expert_matrix which,
			    const struct moe_quantised *q, int64_t n0, int64_t step)
{
	bool own = which != MOE_DOWN && moe_fetch_has_rows(q);

	for (int i = 0; own && i < e->P; i++)
		own = (n0 + e->part[i].i0 * step) % q->coding.rows == 0;
	return own && e->P > 1;
}

enum moe_status moe_pack_expert_coded(struct moe_pack *p, struct moe_experts *e,
				      enum moe_expert_matrix which, int expert,
				      const struct moe_quantised *q, int64_t n0, int64_t step)
{
	struct moe_pack_job j = { .dtype = MOE_U8,
				  .tensor = p->n_tensors - 1,
				  .experts = e,
				  .which = which,
				  .expert = expert,
				  .n0 = n0,
				  .step = step };

	MOE_TRY(keep_coded(p, q, &j.coded));
	j.way = p->m->expand	? moe_pack_expand_way
		: e->requantise ? moe_pack_masters_way
				: moe_pack_coded_way;
	if (j.way != moe_pack_coded_way ||
	    !parts_have_rows(e, which, q, n0, step)) /* blocks may lie in several parts */
		return add_whole(p, &j);
	for (j.part = 0; j.part < e->P; j.part++) {
		j.source = moe_experts_source(e, which, expert, j.part, NULL, MOE_U8);
		MOE_TRY(add(p, &j));
	}
	return MOE_OK;
}
