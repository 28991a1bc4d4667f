/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights, for inspect: formats and bytes by the headers; ranges and errors by the values. */
#include "model/convert_plan.h"
#include "model/file.h"
#include "model/inspect.h"

#include <math.h>
#include <stdio.h>

#define MOST_KINDS 32

/* Weights that are coded alike. */
struct kind {
	const struct moe_convert_source *first;
	int64_t matrices, weights, bytes;
	/* of values, scales: */
	double least, largest, squares;
	double least_scale, largest_scale;
	int64_t zero_values, beyond; /* codes of value 0; values that are not finite */
	/* beside a base: */
	int64_t compared;
	double wrong, all, worst;
	/* of codes that come near the file's own: */
	double lost, meant, most;
	char worst_name[MOE_CONVERT_NAME + 24];
};

struct view {
	struct moe_convert_plan plan;
	struct moe_safetensors *base; /* or NULL */
	struct kind kind[MOST_KINDS];
	int n_kinds;
	bool values;
};

static const void *find_all(void *user, const char *name)
{
	(void)name;
	return user;
}

static const char *what(const struct moe_convert_source *s)
{
	return s->expert ? "experts" : s->linear ? "projections" : "others";
}

static bool alike(const struct moe_convert_source *a, const struct moe_convert_source *b)
{
	const struct moe_coding *x = &a->coded.q.coding, *y = &b->coded.q.coding;
	bool rows = x->group == a->k && y->group == b->k; /* whole ones */

	if (a->coded.codes->codes != b->coded.codes->codes)
		return false;
	return a->layout == b->layout && !strcmp(what(a), what(b)) && x->scale == y->scale &&
	       x->zero == y->zero && (rows || x->group == y->group);
}

static struct kind *kind_of(struct view *v, const struct moe_convert_source *s)
{
	for (int i = 0; i < v->n_kinds; i++)
		if (alike(v->kind[i].first, s))
			return &v->kind[i];
	if (v->n_kinds == MOST_KINDS) /* the last stands for what is rare */
		return &v->kind[MOST_KINDS - 1];
	v->kind[v->n_kinds] = (struct kind){
		.first = s, .least = INFINITY, .largest = -INFINITY, .least_scale = INFINITY
	};
	return &v->kind[v->n_kinds++];
}

/* ---- values ---- */

static void add_row(struct kind *k, const float *x, int64_t n)
{
	for (int64_t i = 0; i < n; i++) {
		if (!isfinite(x[i])) {
			k->beyond++;
			continue;
		}
		k->least = MOE_MIN(k->least, x[i]);
		k->largest = MOE_MAX(k->largest, x[i]);
		k->squares += (double)x[i] * (double)x[i];
		k->zero_values += x[i] == 0;
	}
}

static void add_scales(struct kind *k, const struct moe_quantised *q)
{
	int64_t groups = moe_groups(&q->coding, q->k);

	for (int64_t n = 0; n < q->n; n += q->coding.rows)
		for (int64_t g = 0; g < groups; g++) {
			double s = fabs((double)q->reader->scale(q, n, g));

			k->least_scale = MOE_MIN(k->least_scale, s);
			k->largest_scale = MOE_MAX(k->largest_scale, s);
		}
}

/* What is lost where codes only come near. */
static void add_lost(struct kind *k, const struct moe_convert_source *s, const struct moe_quantised *q, int64_t row,
		     const float *x, float *meant)
{
	if (!s->coded.codes->codes || !s->coded.codes->codes->exact)
		return;
	moe_st_quantised_row(s->coded.codes, q, row, 0, s->k, meant);
	for (int64_t i = 0; i < s->k; i++) {
		double d = (double)x[i] - (double)meant[i];

		k->lost += d * d;
		k->meant += (double)meant[i] * (double)meant[i];
		k->most = MOE_MAX(k->most, fabs(d));
	}
}

/* The same rows of the base; false: it has none of this name and shape. */
static bool base_rows(const struct view *v, const struct moe_convert_source *s, int64_t row,
		      float *to)
{
	const struct moe_st_tensor *t = v->base ? moe_safetensors_find(v->base, s->name) : NULL;
	int fused = s->experts > 0;

	if (!t || t->dtype > MOE_F64 || t->ndim != 2 + fused || t->shape[fused] != s->n ||
	    t->shape[fused + 1] != s->k || (fused && t->shape[0] != s->experts))
		return false;
	return moe_to_f32(to,
			  (const char *)t->data + (size_t)(row * s->k) * moe_dtype_size(t->dtype),
			  t->dtype, (size_t)s->k);
}

static void add_values(struct view *v, struct kind *k, const struct moe_convert_source *s, float *x)
{
	float *want = x + s->k;

	for (int64_t e = 0; e < MOE_MAX(s->experts, 1); e++) {
		struct moe_quantised q = moe_st_quantised_expert(&s->coded, e);
		double wrong = 0, all = 0, error;

		add_scales(k, &q);
		for (int64_t n = 0; n < s->n; n++) {
			moe_dequantise_row(&q, n, 0, s->k, x);
			add_row(k, x, s->k);
			add_lost(k, s, &q, n, x, want);
			if (!base_rows(v, s, e * s->n + n, want))
				continue;
			for (int64_t i = 0; i < s->k; i++) {
				double d = (double)x[i] - (double)want[i];

				wrong += d * d;
				all += (double)want[i] * (double)want[i];
			}
		}
		k->compared += all > 0;
		k->wrong += wrong;
		k->all += all;
		error = all > 0 ? sqrt(wrong / all) : 0;
		if (error > k->worst) {
			k->worst = error;
			snprintf(k->worst_name, sizeof k->worst_name,
				 s->experts ? "%s, expert %lld" : "%s", s->name, (long long)e);
		}
	}
}

static enum moe_status count(struct view *v, const struct moe_convert_source *s)
{
	struct kind *k = kind_of(v, s);
	int64_t matrices = MOE_MAX(s->experts, 1);
	float *x;

	k->matrices += matrices;
	k->weights += matrices * s->n * s->k;
	k->bytes += moe_st_tensor_bytes(s->coded.codes) +
		    (s->coded.scale != s->coded.codes ? (int64_t)s->coded.scale->bytes : 0) +
		    (s->coded.zero ? (int64_t)s->coded.zero->bytes : 0);
	if (!v->values)
		return MOE_OK;
	x = moe_alloc((size_t)s->k * 2, sizeof *x);
	if (!x)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	add_values(v, k, s, x);
	if (!s->coded.codes->stored) /* a mapping */
		moe_mapping_forget(s->coded.codes->data, s->coded.codes->bytes);
	moe_free(x);
	return MOE_OK;
}

/* ---- JSON ---- */

static bool add_error(const struct view *v, const struct kind *k, cJSON *o)
{
	if (!v->base)
		return true;
	return moe_inspect_number(o, "compared", k->compared) &&
	       (!k->compared || (cJSON_AddNumberToObject(o, "error", sqrt(k->wrong / k->all)) &&
				 cJSON_AddNumberToObject(o, "worst_error", k->worst) &&
				 cJSON_AddStringToObject(o, "worst", k->worst_name)));
}

static bool add_ranges(const struct view *v, const struct kind *k, cJSON *o)
{
	double finite = (double)(k->weights - k->beyond);

	if (!v->values)
		return true;
	return (finite <= 0 ||
		(cJSON_AddNumberToObject(o, "least", k->least) &&
		 cJSON_AddNumberToObject(o, "largest", k->largest) &&
		 cJSON_AddNumberToObject(o, "rms", sqrt(k->squares / finite)) &&
		 cJSON_AddNumberToObject(o, "zeros_share", (double)k->zero_values / finite))) &&
	       cJSON_AddNumberToObject(o, "least_scale", k->least_scale) &&
	       cJSON_AddNumberToObject(o, "largest_scale", k->largest_scale) &&
	       moe_inspect_number(o, "not_finite", k->beyond) &&
	       (!(k->meant > 0) || (cJSON_AddNumberToObject(o, "reading_error", sqrt(k->lost / k->meant)) &&
				    cJSON_AddNumberToObject(o, "largest_reading_error", k->most))) &&
	       add_error(v, k, o);
}

static bool add_kind(const struct view *v, const struct kind *k, cJSON *list)
{
	const struct moe_quantised *q = &k->first->coded.q;
	cJSON *o = cJSON_CreateObject();
	bool row = q->coding.group == k->first->k && q->coding.rows == 1;
	const char *scale =
		q->coding.scale == MOE_SCALE_UE8M0 ? "E8M0" : moe_dtype_name(q->coding.scale);

	return o && cJSON_AddItemToArray(list, o) &&
	       cJSON_AddStringToObject(o, "format", q->coding.format->name) &&
	       cJSON_AddStringToObject(o, "of", what(k->first)) &&
	       cJSON_AddStringToObject(o, "names",
				       k->first->layout ? k->first->layout->codes : k->first->coded.codes->dtype_text) &&
	       moe_inspect_number(o, "columns_per_scale", row ? 0 : q->coding.group) &&
	       moe_inspect_number(o, "rows_per_scale", q->coding.rows) &&
	       cJSON_AddStringToObject(o, "scale", scale) &&
	       cJSON_AddBoolToObject(o, "zero_points", q->coding.zero) &&
	       moe_inspect_number(o, "matrices", k->matrices) &&
	       moe_inspect_number(o, "weights", k->weights) &&
	       moe_inspect_number(o, "bytes", k->bytes) &&
	       cJSON_AddNumberToObject(o, "bits_per_weight",
				       8.0 * (double)k->bytes / (double)k->weights) &&
	       add_ranges(v, k, o);
}

static enum moe_status fill(struct view *v, cJSON *o)
{
	bool *used = moe_calloc(moe_safetensors_count(v->plan.st), sizeof *used), good = true;
	enum moe_status status;
	cJSON *list;

	v->plan.source = moe_calloc(moe_safetensors_count(v->plan.st), sizeof *v->plan.source);
	status = used && v->plan.source ? moe_convert_scan(&v->plan, used)
					: moe_fail(MOE_ERR_NOMEM, "out of memory");
	moe_free(used);
	for (size_t i = 0; status == MOE_OK && i < v->plan.n_sources; i++)
		if (!v->plan.source[i].plain)
			status = count(v, &v->plan.source[i]);
	if (status != MOE_OK || !v->n_kinds)
		return status;
	list = cJSON_AddArrayToObject(o, "quantised");
	for (int i = 0; good && i < v->n_kinds; i++)
		good = list && add_kind(v, &v->kind[i], list);
	return good ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory");
}

enum moe_status moe_inspect_quantised(const char *path, const char *base, bool values, cJSON *o)
{
	struct moe_convert_change change = { .find = find_all };
	struct view *v = moe_calloc(1, sizeof *v);
	enum moe_status status;

	if (!v)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	change.user = v;
	v->plan.change = &change;
	v->plan.target.keep = true;
	v->values = values || base;
	status = moe_safetensors_open(path, &v->plan.st);
	if (status == MOE_OK && base)
		status = moe_safetensors_open(base, &v->base);
	if (status == MOE_OK)
		status = fill(v, o);
	moe_safetensors_close(v->base);
	moe_convert_plan_free(&v->plan);
	moe_free(v);
	return status;
}
