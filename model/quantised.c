/* SPDX-License-Identifier: Apache-2.0 */
#include "model/quantised.h"

#include <stdio.h>

#define NAME_MAX_BYTES 256
#define PLAIN_SUFFIX ".weight"

/* The names of a weight's tensors in one layout. */
struct names {
	char codes[NAME_MAX_BYTES], scale[NAME_MAX_BYTES], zero[NAME_MAX_BYTES];
};

static void join(char *to, const char *base, int length, const char *suffix)
{
	snprintf(to, NAME_MAX_BYTES, "%.*s%s", length, base, suffix);
}

/* Without ".weight". */
static int base_length(const char *name)
{
	size_t n = strlen(name), s = strlen(PLAIN_SUFFIX);

	return (int)(n > s && !strcmp(name + n - s, PLAIN_SUFFIX) ? n - s : n);
}

static struct names names_of(const char *name, const struct moe_format_layout *l)
{
	int length = base_length(name);
	struct names n = { .zero = "" };

	join(n.codes, name, length, l->codes);
	join(n.scale, name, length, l->scale);
	if (l->zero)
		join(n.zero, name, length, l->zero);
	return n;
}

/* One expert's part of a tensor; data at `expert`. */
static enum moe_status view(const struct moe_st_tensor *t, int64_t experts, struct moe_array *a)
{
	int skip = experts > 0;
	int64_t count;

	*a = (struct moe_array){ .dtype = t->dtype,
				 .ndim = t->ndim - skip,
				 .data = (void *)t->data };
	if (!strcmp(t->dtype_text, "F8_E8M0"))
		a->dtype = MOE_SCALE_UE8M0;
	if (skip && (t->ndim < 2 || t->shape[0] != experts))
		return moe_fail(
			MOE_ERR_FORMAT,
			"%s has %d dimensions and begins with %lld; %lld experts are expected",
			t->name, t->ndim, (long long)(t->ndim ? t->shape[0] : 0),
			(long long)experts);
	if (a->ndim > MOE_MAX_NDIM - skip && t->ndim > MOE_MAX_NDIM)
		return moe_fail(MOE_ERR_FORMAT, "%s has %d dimensions", t->name, t->ndim);
	for (int i = 0; i < a->ndim; i++)
		a->shape[i] = t->shape[i + skip];
	count = moe_shape_count(t->ndim, t->shape);
	if (count < 0 || (size_t)count * moe_dtype_size(a->dtype) != t->bytes)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%s has dtype %s, which no weight format has",
				t->name, t->dtype_text);
	return MOE_OK;
}

/* By reading: a page of the mapping would bring its neighbours into memory with it. */
static enum moe_status check_groups(const struct moe_safetensors *st, const char *name, const char *data,
				    const struct moe_quantised *q)
{
	int32_t group[1024];

	for (int64_t k = 0; k < q->k; k++) {
		int64_t at = k % (int64_t)MOE_COUNT(group);

		if (!at)
			MOE_TRY(moe_safetensors_fetch(st, data + 4 * k,
						      4 * (size_t)MOE_MIN(q->k - k, (int64_t)MOE_COUNT(group)), group));
		if (group[at] != k / q->coding.group)
			return moe_fail(MOE_ERR_UNSUPPORTED,
					"%s orders the columns (activation order, desc_act): column %lld is in group %d. "
					"Quantise again without it",
					name, (long long)k, (int)group[at]);
	}
	return MOE_OK;
}

/* GPTQ's order of columns: only the plain one is known. */
static enum moe_status check_order(const struct moe_safetensors *st, const char *name,
				   const struct moe_quantised *q)
{
	static const char *const suffixes[] = { ".g_idx", ".weight_g_idx" };
	char order[NAME_MAX_BYTES];

	for (size_t i = 0; i < MOE_COUNT(suffixes); i++) {
		const struct moe_st_tensor *t;

		join(order, name, base_length(name), suffixes[i]);
		t = moe_safetensors_find(st, order);
		if (!t)
			continue;
		if (t->dtype != MOE_I32 || t->ndim != 1 || t->shape[0] != q->k)
			return moe_fail(MOE_ERR_FORMAT, "%s: [%lld] of I32 is expected", order,
					(long long)q->k);
		MOE_TRY(check_groups(st, order, t->data, q));
	}
	return MOE_OK;
}

/* compressed-tensors' asymmetric codes where a layout has none; some writers store zeros for symmetric ones. */
static enum moe_status check_symmetric(const struct moe_safetensors *st, const char *name,
				       const struct moe_format *f, const struct moe_format_layout *l)
{
	char zero[NAME_MAX_BYTES], bytes[4096];
	const char *scale = strstr(l->scale, "scale");
	const struct moe_st_tensor *t;

	snprintf(zero, sizeof zero, "%.*s%.*szero_point", base_length(name), name, (int)(scale ? scale - l->scale : 0),
		 l->scale);
	t = l->zero ? NULL : moe_safetensors_find(st, zero);
	for (size_t at = 0; t && at < t->bytes; at += sizeof bytes) {
		size_t n = MOE_MIN(t->bytes - at, sizeof bytes);

		MOE_TRY(moe_safetensors_fetch(st, (const char *)t->data + at, n, bytes));
		for (size_t i = 0; i < n; i++)
			if (bytes[i])
				return moe_fail(MOE_ERR_UNSUPPORTED, "%s: %s with zero points cannot be read: quantise again, symmetric",
						zero, f->name);
	}
	return MOE_OK;
}

static enum moe_status open(const struct moe_safetensors *st, const char *name,
			    const struct moe_format *f, const struct moe_format_layout *l,
			    const struct names *n, int64_t rows, int64_t columns,
			    struct moe_st_quantised *out)
{
	struct moe_stored s = { .codes_name = n->codes,
				.scale_name = n->scale,
				.zero_name = n->zero,
				.n = rows,
				.k = columns };
	struct moe_quantised *q = &out->q;

	out->zero = l->zero ? moe_safetensors_find(st, n->zero) : NULL;
	MOE_TRY(view(out->codes, out->experts, &s.codes));
	MOE_TRY(view(out->scale, out->experts, &s.scale));
	if (out->zero)
		MOE_TRY(view(out->zero, out->experts, &s.zero));
	*q = (struct moe_quantised){ .coding = { .format = f },
				     .n = rows,
				     .k = columns,
				     .codes = s.codes,
				     .scale = s.scale,
				     .zero = s.zero,
				     .writer = l->writer };
	MOE_TRY(l->open(&s, q));
	MOE_TRY(check_symmetric(st, name, f, l));
	return check_order(st, name, q);
}

struct moe_quantised moe_st_quantised_own(const struct moe_st_tensor *t)
{
	struct moe_quantised q = t->codes->q;

	q.n = t->shape[0];
	q.k = t->shape[1];
	/* bytes, row by row: rows can be read alone; scales and zeros lie in them */
	q.codes = (struct moe_array){ .dtype = MOE_U8, .ndim = 2, .data = (void *)(uintptr_t)t->data };
	q.codes.shape[0] = t->codes->whole ? 1 : q.n;
	q.codes.shape[1] = (int64_t)t->bytes / q.codes.shape[0];
	q.scale.shape[0] = t->codes->whole ? 0 : q.n;
	return q;
}

void moe_st_quantised_row(const struct moe_st_tensor *t, const struct moe_quantised *q, int64_t row, int64_t k0,
			  int64_t k, float *dst)
{
	if (t->codes && t->codes->exact)
		t->codes->exact(q, row, k0, k, dst);
	else
		moe_dequantise_row(q, row, k0, k, dst);
}

static enum moe_status open_own(const struct moe_st_tensor *t, int64_t experts, int64_t n, int64_t k,
				struct moe_st_quantised *out)
{
	if (experts || t->ndim != 2 || t->shape[0] != n || t->shape[1] != k)
		return moe_fail(MOE_ERR_FORMAT, "%s has another shape than [%lld, %lld]", t->name, (long long)n,
				(long long)k);
	out->codes = out->scale = t;
	out->q = moe_st_quantised_own(t);
	return MOE_OK;
}

enum moe_status moe_st_quantised_find(const struct moe_safetensors *st, const char *name,
				      int64_t experts, int64_t n, int64_t k,
				      struct moe_st_quantised *out, bool *found)
{
	char missing[NAME_MAX_BYTES] = "", codes[NAME_MAX_BYTES] = "";

	const struct moe_st_tensor *own = moe_safetensors_find(st, name);

	*found = own && own->codes;
	*out = (struct moe_st_quantised){ .experts = experts };
	if (*found)
		return open_own(own, experts, n, k, out);
	for (int i = 0; moe_format_list[i]; i++)
		for (int j = 0; j < MOE_FORMAT_LAYOUTS && moe_format_list[i]->layout[j].codes;
		     j++) {
			const struct moe_format_layout *l = &moe_format_list[i]->layout[j];
			struct names names = names_of(name, l);

			out->codes = moe_safetensors_find(st, names.codes);
			if (!out->codes || out->codes->dtype != l->codes_dtype)
				continue;
			out->scale = moe_safetensors_find(st, names.scale);
			if (!out->scale) {
				if (!*missing) {
					memcpy(missing, names.scale, sizeof missing);
					memcpy(codes, names.codes, sizeof codes);
				}
				continue;
			}
			*found = true;
			return open(st, name, moe_format_list[i], l, &names, n, k, out);
		}
	return *missing ? moe_fail(MOE_ERR_FORMAT, "%s holds quantised codes, but %s is missing",
				   codes, missing)
			: MOE_OK;
}

/* Of an array of all experts. */
static void move(struct moe_array *a, int64_t e)
{
	if (a->data)
		a->data = (char *)a->data + (size_t)e * (size_t)moe_shape_count(a->ndim, a->shape) *
						    moe_dtype_size(a->dtype);
}

struct moe_quantised moe_st_quantised_expert(const struct moe_st_quantised *t, int64_t e)
{
	struct moe_quantised q = t->q;

	move(&q.codes, e);
	move(&q.scale, e);
	move(&q.zero, e);
	return q;
}

static size_t add_name(char *buf, size_t n, const char *name)
{
	if (n < MOE_FORMATS_TEXT)
		n += (size_t)snprintf(buf + n, MOE_FORMATS_TEXT - n, "%s%s", n ? ", " : "", name);
	return n;
}

const char *moe_formats_text(bool convert, char buf[MOE_FORMATS_TEXT])
{
	size_t n = 0;

	*buf = 0;
	for (int i = 0; moe_format_list[i]; i++) {
		const struct moe_format *f = moe_format_list[i];

		if (convert || f->quantise)
			n = add_name(buf, n, f->name);
		for (int j = 0; convert && j < MOE_FORMAT_LAYOUTS && f->layout[j].codes; j++)
			if (f->layout[j].name && !strchr(f->layout[j].name, ' '))
				n = add_name(buf, n, f->layout[j].name);
	}
	return buf;
}
