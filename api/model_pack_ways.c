/* SPDX-License-Identifier: Apache-2.0 */
/* What a job does: fetch its source, count what is not finite, pack. */
#include "api/model_pack_jobs.h"

#include "codelets/kernels/packed/coded.h"

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

int64_t moe_pack_count_non_finite(enum moe_dtype dtype, int64_t n, const char *src)
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

/* The first and the last part that a job is for. */
static int first_part(const struct moe_pack_job *j)
{
	return j->all ? 0 : j->part;
}

static int last_part(const struct moe_pack_job *j)
{
	return j->all ? j->experts->P - 1 : j->part;
}

/* A job with the rows of its codes in memory; scales are checked. */
static enum moe_status fetch_coded(struct moe_fetch *f, const struct moe_pack *p,
				   const struct moe_pack_job *j, struct moe_pack_job *here,
				   struct moe_quantised *q)
{
	const struct moe_experts *e = j->experts;
	int64_t i0 = e && j->which != MOE_DOWN && !j->all ? e->part[j->part].i0 : 0, first;

	MOE_TRY(moe_fetch_coded(f, j->coded, j->n0 + i0 * j->step, (j->source.n - 1) * j->step + 1,
				q, &first));
	*here = *j;
	here->coded = q;
	here->n0 -= first;
	return moe_check_scales(q, p->tensor[j->tensor].name);
}

/* The description of packed codes, without any. */
static void describe_coded(const struct moe_pack_job *j)
{
	struct moe_quantised q = *j->coded;
	const struct moe_coded_window all = { 0, j->source.n, 0, j->source.k, 1 };

	q.codes.data = NULL;
	for (int i = 0; j->experts && i < j->experts->P; i++)
		moe_experts_pack_coded(j->experts, j->which, j->expert, i, &q, j->n0, j->step);
	if (!j->experts)
		moe_coded_pack(moe_coded_order(moe_kernels()), j->source.w, &q, &all);
}

/* Masters are what the codes stand for, and the codes are made of them, as after any update. */
enum moe_status moe_pack_masters_way(struct moe_fetch *f, const struct moe_pack *p,
				     const struct moe_pack_job *j, int64_t *bad)
{
	int64_t n = j->source.n, k = j->source.k;
	struct moe_pack_job here;
	struct moe_quantised q;
	float *x;

	MOE_TRY(fetch_coded(f, p, j, &here, &q));
	x = moe_alloc((size_t)(n * k), sizeof *x);
	if (!x)
		return moe_fail(MOE_ERR_NOMEM, "no memory for masters of %s",
				p->tensor[j->tensor].name);
	describe_coded(&here);
	for (int64_t i = 0; i < n; i++) {
		moe_dequantise_row(&q, here.n0 + i * j->step, 0, k, x + i * k);
		*bad += moe_pack_count_non_finite(MOE_F32, k, (const char *)(x + i * k));
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

enum moe_status moe_pack_coded_way(struct moe_fetch *f, const struct moe_pack *p,
				   const struct moe_pack_job *j, int64_t *bad)
{
	struct moe_pack_job here;
	struct moe_quantised q;
	struct moe_coded_window all;

	MOE_TRY(fetch_coded(f, p, j, &here, &q));
	all = (struct moe_coded_window){ 0, q.n, 0, q.k, 1 };
	if (!j->experts)
		*bad = moe_coded_pack(moe_coded_order(moe_kernels()), j->source.w, &q, &all);
	for (int i = first_part(j); j->experts && i <= last_part(j); i++)
		*bad += moe_experts_pack_coded(j->experts, j->which, j->expert, i, &q, here.n0,
					       j->step);
	return MOE_OK;
}

/* Of an expert, or rows of a weight that is never quantised here. */
enum moe_status moe_pack_expand_way(struct moe_fetch *f, const struct moe_pack *p,
				    const struct moe_pack_job *j, int64_t *bad)
{
	const struct moe_pack_tensor *t = &p->tensor[j->tensor];
	const struct moe_pack_source *s = &j->source;
	uint16_t *plain = moe_alloc((size_t)(s->n * s->k), sizeof *plain);
	float *row = moe_alloc((size_t)s->k, sizeof *row);
	enum moe_status st =
		plain && row ? MOE_OK
			     : moe_fail(MOE_ERR_NOMEM, "%s: no memory to expand codes", t->name);
	struct moe_pack_job here = *j;
	struct moe_quantised q;

	if (st == MOE_OK)
		st = fetch_coded(f, p, j, &here, &q);
	for (int64_t i = 0; st == MOE_OK && i < s->n; i++) {
		moe_st_quantised_row(t->from, &q, here.n0 + i * j->step, 0, s->k, row);
		*bad += moe_pack_count_non_finite(MOE_F32, s->k, (const char *)row);
		moe_from_f32(plain + i * s->k, MOE_BF16, row, (size_t)s->k);
	}
	if (st == MOE_OK && !j->experts)
		moe_kernels()->weight_pack(s->w, plain, MOE_BF16, s->n, s->k, s->k, MOE_USE_GEMM);
	for (int i = first_part(j); st == MOE_OK && j->experts && i <= last_part(j); i++)
		moe_experts_pack_part(j->experts, j->which, j->expert, i, plain, MOE_BF16);
	moe_free(plain);
	moe_free(row);
	return st;
}

static enum moe_status fetch_whole(struct moe_fetch *f, const struct moe_pack_job *j,
				   const void **src)
{
	return moe_fetch_bytes(f, j->source.src,
			       (size_t)(j->source.n * j->source.k) * moe_dtype_size(j->dtype), src);
}

enum moe_status moe_pack_quantise_way(struct moe_fetch *f, const struct moe_pack *p,
				      const struct moe_pack_job *j, int64_t *bad)
{
	const struct moe_pack_source *s = &j->source;
	struct moe_quantised q;
	const void *src;
	void *memory = NULL;
	enum moe_status st;

	(void)bad; /* such values cannot be quantised */
	MOE_TRY(fetch_whole(f, j, &src));
	st = moe_quantise(p->m->convert, src, j->dtype, s->n, s->k, s->k, &q, &memory);
	for (int i = 0; st == MOE_OK && i < j->experts->P; i++)
		moe_experts_pack_coded(j->experts, j->which, j->expert, i, &q, 0, 1);
	moe_free(memory);
	if (st != MOE_OK)
		return moe_fail_in(st, "expert %d", j->expert);
	if (j->experts->requantise) { /* masters keep what codes drop */
		moe_experts_take_master(j->experts, j->which, j->expert, src, j->dtype);
		moe_experts_requantise(j->experts, j->which, j->expert);
	}
	return MOE_OK;
}

enum moe_status moe_pack_whole_way(struct moe_fetch *f, const struct moe_pack *p,
				   const struct moe_pack_job *j, int64_t *bad)
{
	const void *src;

	MOE_TRY(fetch_whole(f, j, &src));
	if (!p->m->params.skip_value_check)
		*bad += moe_pack_count_non_finite(j->dtype, j->source.n * j->source.k, src);
	if (j->trained)
		moe_trained_set(j->trained, src, j->dtype);
	for (int i = first_part(j); j->experts && i <= last_part(j); i++)
		moe_experts_pack_part(j->experts, j->which, j->expert, i, src, j->dtype);
	return MOE_OK;
}

/* Rows n0.. of a weight, n of them; n0 is a multiple of 16. */
static void pack_rows(const struct moe_pack_source *to, enum moe_dtype dtype, int64_t n0, int64_t n,
		      const char *src)
{
	struct moe_weight part = *to->w;

	part.data =
		(char *)to->w->data + moe_kernels()->weight_bytes(dtype, n0, to->k, MOE_USE_GEMM);
	moe_kernels()->weight_pack(&part, src, dtype, n, to->k, to->ld, MOE_USE_GEMM);
}

/* Where rows of a job go in one part, as if its matrix began at src. */
static struct moe_pack_source target(const struct moe_pack_job *j, int part, const void *src)
{
	struct moe_pack_source to = j->source;

	if (!j->all) {
		to.src = src;
		return to;
	}
	return moe_experts_source(j->experts, j->which, j->expert, part, src, j->dtype);
}

enum moe_status moe_pack_rows_way(struct moe_fetch *f, const struct moe_pack *p,
				  const struct moe_pack_job *j, int64_t *bad)
{
	const struct moe_pack_source *s = &j->source;
	size_t row = (size_t)s->ld * moe_dtype_size(j->dtype);
	int64_t most = MOE_MAX((int64_t)(MOE_FETCH_BYTES / row) / 16, 1) * 16;

	for (int64_t n0 = 0; n0 < s->n; n0 += most) {
		int64_t n = MOE_MIN(most, s->n - n0);
		const void *src;

		MOE_TRY(moe_fetch_bytes(f, s->src + (size_t)n0 * row, (size_t)n * row, &src));
		if (!p->m->params.skip_value_check)
			*bad += moe_pack_count_non_finite(j->dtype, n * s->k, src);
		for (int i = first_part(j); i <= last_part(j); i++) {
			struct moe_pack_source to = target(j, i, src);

			pack_rows(&to, j->dtype, n0, n, to.src);
		}
	}
	for (int i = first_part(j); i <= last_part(j); i++) {
		struct moe_pack_source to = target(j, i, NULL);

		moe_kernels()->weight_pack(to.w, NULL, j->dtype, to.n, to.k, to.ld, MOE_USE_GEMM);
		if (j->experts && j->experts->transposed)
			moe_expert_transpose(j->experts, j->experts->transposed, i, j->expert,
					     j->which);
	}
	return MOE_OK;
}
