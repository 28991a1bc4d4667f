/* SPDX-License-Identifier: Apache-2.0 */
/* kt-kernel's files of experts: cut into parts, quantised, packed. */
#include "model/convert_jobs.h"
#include "model/convert_kt.h"
#include "model/file.h"
#include "model/readers/kt_layout.h"

#include <math.h>

static enum moe_status no_memory(void)
{
	return moe_fail(MOE_ERR_NOMEM, "out of memory");
}

/* ---- an expert ---- */

struct writing {
	const struct moe_convert_plan *plan;
	const char *folder;
	int shard;
};

/* One matrix while it is cut. */
struct cut {
	struct writing *w;
	const struct moe_convert_piece *piece;
	int expert, which;
	float *x; /* [piece->n, piece->k] */
	double wrong, all, largest;
	bool kept;
};

static enum moe_status write_file(const struct cut *c, int which, int part, bool scale,
				  const void *data)
{
	struct moe_convert_kt *kt = c->w->plan->kt;
	size_t index = moe_convert_kt_index(kt, c->expert, which, part, scale), bytes;
	char name[MOE_CONVERT_KT_NAME], *path;
	enum moe_status status;

	bytes = moe_convert_kt_file(kt, kt->layer[c->w->shard], index, name);
	path = moe_path_join(c->w->folder, name);
	status = path ? moe_file_make(path, data, bytes) : no_memory();
	moe_sha256(data, bytes, kt->sum[(size_t)c->w->shard * moe_convert_kt_files(kt) + index]);
	moe_free(path);
	return status;
}

/* The source's codes and scale of a row's columns k0..k0+k; false: others must be made. */
static bool take_over(const struct cut *c, int64_t row, int64_t k0, int64_t k, uint8_t *codes,
		      float *scale)
{
	const struct moe_convert_plan *p = c->w->plan;
	const struct moe_convert_source *s = &p->source[c->piece->source];
	struct moe_quantised q;

	if (s->plain || s->coded.q.coding.format->values != p->target.format->values ||
	    s->coded.q.coding.zero || s->coded.q.coding.rows != 1 ||
	    (s->coded.codes->codes && s->coded.codes->codes->exact) ||
	    k0 / s->coded.q.coding.group != (k0 + k - 1) / s->coded.q.coding.group)
		return false;
	q = moe_st_quantised_expert(&s->coded, c->piece->expert);
	q.reader->codes(&q, c->piece->row0 + row, k0, k, codes);
	*scale = q.reader->scale(&q, c->piece->row0 + row, k0 / q.coding.group);
	return true;
}

static enum moe_status not_finite(void)
{
	return moe_fail(MOE_ERR_FORMAT, "a weight is not finite");
}

/* Codes and scale of a row, to the nearest; the largest code is that of the largest weight. */
static enum moe_status quantise(const struct cut *c, const float *x, int64_t k, uint8_t *codes,
				float *scale)
{
	const struct moe_format *f = c->w->plan->target.format;
	float largest = moe_largest(1, k, x, k), most = f->bits == 8 ? 127 : 7;

	for (int64_t i = 0; i < k; i++)
		if (!isfinite(x[i]))
			return not_finite();
	*scale = largest > 0 ? largest / most : 1;
	*scale = *scale >= 0x1p-122f ? *scale
				     : 0x1p-122f; /* a sixteenth of it must be a number too */
	f->encode(1, k, x, k, *scale, codes, k);
	return MOE_OK;
}

/* Part p of the matrix, or of its transpose, into `packed` and scales. */
static enum moe_status fill_part(struct cut *c, int which, int part, uint8_t *packed, float *scales,
				 float *row, uint8_t *codes)
{
	const struct moe_convert_kt *kt = c->w->plan->kt;
	const struct moe_format *f = c->w->plan->target.format;
	bool backward = which >= MOE_KT_FORWARD, columns = moe_kt_cuts_columns(which);
	int64_t n, k, ld = c->piece->k;

	moe_convert_kt_part(kt, which, &n, &k);
	for (int64_t i = 0; i < n; i++) {
		int64_t r = columns ? i : i + part * n, c0 = columns ? part * k : 0;
		const float *x = backward ? row : c->x + r * ld + c0;

		for (int64_t j = 0; backward && j < k; j++)
			row[j] = c->x[(c0 + j) * ld + r];
		if (backward || !take_over(c, r, c0, k, codes, &scales[i])) {
			MOE_TRY(quantise(c, x, k, codes, &scales[i]));
			c->kept = c->kept && backward;
		}
		moe_kt_write_codes(kt->bits, n, k, codes, i, packed);
		for (int64_t j = 0; !backward && j < k; j++) {
			double d = (double)(f->values[codes[j]] * scales[i]) - (double)x[j];

			c->wrong += d * d;
			c->all += (double)x[j] * (double)x[j];
			c->largest = MOE_MAX(c->largest, fabs(d));
		}
		if (!isfinite(c->wrong)) /* codes that were taken over, times a scale that is too large */
			return not_finite();
		scales[i] /= kt->bits == 8 ? 1 : MOE_KT_INT4_VALUE;
	}
	return MOE_OK;
}

static enum moe_status write_parts(struct cut *c, int which)
{
	const struct moe_convert_kt *kt = c->w->plan->kt;
	size_t bytes = moe_convert_kt_bytes(kt, which, false),
	       scale_bytes = moe_convert_kt_bytes(kt, which, true);
	int64_t n, k;
	char *memory;
	enum moe_status status = MOE_OK;

	moe_convert_kt_part(kt, which, &n, &k);
	memory = moe_alloc(1, (size_t)k * sizeof(float) + scale_bytes + bytes + (size_t)k);
	if (!memory)
		return no_memory();
	for (int p = 0; p < kt->p.parts && status == MOE_OK; p++) {
		float *row = (float *)(void *)memory, *scales = row + k;
		uint8_t *packed = (uint8_t *)scales + scale_bytes, *codes = packed + bytes;

		status = fill_part(c, which, p, packed, scales, row, codes);
		if (status == MOE_OK)
			status = write_file(c, which, p, false, packed);
		if (status == MOE_OK)
			status = write_file(c, which, p, true, scales);
	}
	moe_free(memory);
	return status;
}

static enum moe_status write_matrix(struct cut *c)
{
	enum moe_status status;

	c->x = moe_alloc((size_t)(c->piece->n * c->piece->k), sizeof *c->x);
	if (!c->x)
		return no_memory();
	c->kept = true;
	status = moe_convert_read(c->w->plan, c->piece, c->piece->expert, c->x);
	if (status == MOE_OK)
		status = write_parts(c, c->which);
	if (status == MOE_OK && c->w->plan->kt->p.backward)
		status = write_parts(c, c->which + MOE_KT_FORWARD);
	moe_free(c->x);
	if (status != MOE_OK)
		return moe_fail_in(status, "%s, expert %d",
				   c->w->plan->source[c->piece->source].name, c->expert);
	moe_convert_forget(c->w->plan, c->piece, c->piece->expert);
	return MOE_OK;
}

static enum moe_status write_expert(struct moe_convert_jobs *j, size_t expert)
{
	struct writing *w = j->user;
	const struct moe_convert_kt *kt = w->plan->kt;

	for (int which = 0; which < MOE_KT_FORWARD; which++) {
		size_t piece = ((size_t)w->shard * (size_t)kt->experts + expert) * MOE_KT_FORWARD +
			       (size_t)which;
		struct cut c = { .w = w,
				 .piece = &w->plan->piece[piece],
				 .expert = (int)expert,
				 .which = which };

		MOE_TRY(write_matrix(&c));
		pthread_mutex_lock(&j->lock);
		moe_convert_counted(j->run, c.piece, c.piece->expert, c.wrong, c.all, c.largest,
				    c.kept);
		pthread_mutex_unlock(&j->lock);
	}
	moe_convert_jobs_done(j, (int64_t)(moe_convert_kt_layer_bytes(kt) / (size_t)kt->experts));
	return MOE_OK;
}

/* ---- a layer ---- */

enum moe_status moe_convert_kt_write(struct moe_convert_run *r, int shard, const char *folder)
{
	struct moe_convert_plan *p = (struct moe_convert_plan *)(uintptr_t)r->plan; /* its sums */
	struct writing w = { .plan = r->plan, .folder = folder, .shard = shard };
	struct moe_convert_jobs jobs = { .run = r,
					 .what = p->shard[shard].name,
					 .n = (size_t)p->kt->experts,
					 .job = write_expert,
					 .user = &w };

	for (int part = 0; part < p->kt->p.parts; part++) {
		char *path = moe_format("%s/%s/_numa_%d", folder, p->shard[shard].name, part);
		enum moe_status status = path ? moe_dir_make(path) : no_memory();

		moe_free(path);
		MOE_TRY(status);
	}
	MOE_TRY(moe_convert_jobs_run(&jobs));
	moe_convert_kt_sum_files(p, shard);
	return MOE_OK;
}
