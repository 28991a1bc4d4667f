/* SPDX-License-Identifier: Apache-2.0 */
#include "model/rewrite_coded.h"

#include "model/file.h"
#include "model/merge_math.h"
#include "model/rewrite.h"

enum { CODES = 1, SCALE, ZERO };

/* The weight of a role under whichever name it has. */
static enum moe_status find(const struct moe_merge_shards *m, enum moe_role role, int layer,
			    int expert, struct moe_st_quantised *t, bool *found)
{
	char name[MOE_TENSOR_NAME_MAX];
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(m->arch, role, layer, shape);

	*found = false;
	for (int v = 0;
	     ndim > 1 && !*found && moe_arch_tensor_name(m->arch, role, layer, expert, v, name);
	     v++)
		MOE_TRY(moe_st_quantised_find(m->base, name, ndim == 3 ? shape[0] : 0,
					      shape[ndim - 2], shape[ndim - 1], t, found));
	return MOE_OK;
}

static void mark(struct moe_merge_shards *m, const struct moe_st_tensor *t,
		 struct moe_merge_job job, int coded)
{
	if (!t)
		return;
	job.coded = coded;
	m->job[t - moe_safetensors_at(m->base, 0)] = job;
	m->merged++;
}

enum moe_status moe_rewrite_mark_coded(struct moe_merge_shards *m, const struct moe_rewrite *r,
				       enum moe_role role, int layer, int expert)
{
	const struct moe_merge_job job = {
		.rewrite = r, .role = role, .layer = layer, .expert = expert
	};
	struct moe_st_quantised t;
	bool found;

	if (!r->coded)
		return MOE_OK;
	MOE_TRY(find(m, role, layer, expert, &t, &found));
	if (!found)
		return MOE_OK;
	mark(m, t.codes, job, CODES);
	mark(m, t.scale, job, SCALE);
	mark(m, t.zero, job, ZERO);
	return MOE_OK;
}

/* What is written of one matrix: codes, scales or zeros of tensors t. */
struct storing {
	const struct moe_st_quantised *t;
	int coded;
	struct moe_array part; /* memory of its own */
};

static enum moe_status store(const struct moe_quantised *q, void *arg)
{
	struct storing *o = arg;
	const struct moe_st_quantised *t = o->t;
	struct moe_stored s = {
		.n = q->n, .k = q->k, .codes = t->q.codes, .scale = t->q.scale, .zero = t->q.zero
	};
	struct moe_array *a[] = { &s.codes, &s.scale, &s.zero };
	enum moe_status st = MOE_OK;

	if (!t->q.writer)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%s: there is no writer for its layout", t->codes->name);
	for (int i = 0; i < 3; i++) {
		bool present = a[i]->data != NULL;
		int64_t count = moe_shape_count(a[i]->ndim, a[i]->shape);

		a[i]->data = present ? moe_calloc((size_t)count, moe_dtype_size(a[i]->dtype)) : NULL;
		if (present && !a[i]->data)
			st = moe_fail(MOE_ERR_NOMEM, "no memory to write %s", t->codes->name);
	}
	if (st == MOE_OK)
		st = t->q.writer->store(q, &s);
	o->part = *a[o->coded - CODES];
	for (int i = 0; i < 3; i++)
		if (st != MOE_OK || i != o->coded - CODES)
			moe_free(a[i]->data);
	return st;
}

enum moe_status moe_rewrite_coded_tensor(struct moe_merge_shards *m, struct moe_file_writer *w,
					 const struct moe_st_tensor *t, const struct moe_merge_job *job)
{
	const struct moe_rewrite *r = job->rewrite;
	struct moe_st_quantised all;
	bool found;

	MOE_TRY(find(m, job->role, job->layer, job->expert, &all, &found));
	if (!found)
		return moe_fail(MOE_ERR_FORMAT, "%s: the base's codes have gone", t->name);
	for (int64_t e = 0; e < MOE_MAX(all.experts, 1); e++) {
		struct storing s = { &all, job->coded, { 0 } };
		enum moe_status st;
		size_t bytes;

		MOE_TRY(r->coded(r->user, job->role, job->layer, all.experts ? (int)e : job->expert,
				 store, &s));
		bytes = (size_t)moe_shape_count(s.part.ndim, s.part.shape) * moe_dtype_size(s.part.dtype);
		st = moe_file_append(w, s.part.data, bytes);
		moe_free(s.part.data);
		MOE_TRY(st);
		MOE_TRY(moe_merge_advance(m, t->name, (int64_t)bytes));
	}
	return MOE_OK;
}
