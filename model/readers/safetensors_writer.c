/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/safetensors_writer.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors_sum.h"
#include "model/sum.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct text {
	char *data;
	size_t size, cap;
	bool failed;
};

static void put(struct text *t, const char *s, size_t n)
{
	if (t->failed)
		return;
	if (t->cap - t->size < n) {
		size_t cap = MOE_MAX(t->cap * 2, t->size + n + 4096);
		char *p = moe_realloc(t->data, cap, 1);

		if (!p) {
			t->failed = true;
			return;
		}
		t->data = p;
		t->cap = cap;
	}
	memcpy(t->data + t->size, s, n);
	t->size += n;
}

static void put_format(struct text *t, const char *fmt, ...) MOE_PRINTF(2, 3);
static void put_format(struct text *t, const char *fmt, ...)
{
	char buf[128];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(buf, sizeof buf, fmt, ap);
	va_end(ap);
	put(t, buf, strlen(buf));
}

static void put_string(struct text *t, const char *s)
{
	put(t, "\"", 1);
	for (; *s; s++) {
		if (*s == '"' || *s == '\\')
			put_format(t, "\\%c", *s);
		else if ((unsigned char)*s < 0x20)
			put_format(t, "\\u%04x", (unsigned)*s);
		else
			put(t, s, 1);
	}
	put(t, "\"", 1);
}

static int by_size_and_name(const void *a, const void *b)
{
	const struct moe_st_item *x = *(const struct moe_st_item *const *)a;
	const struct moe_st_item *y = *(const struct moe_st_item *const *)b;
	size_t sx = moe_dtype_size(x->dtype), sy = moe_dtype_size(y->dtype);

	if (sx != sy)
		return sx > sy ? -1 : 1;
	return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b)
{
	const struct moe_st_item *x = *(const struct moe_st_item *const *)a;
	const struct moe_st_item *y = *(const struct moe_st_item *const *)b;

	return strcmp(x->name, y->name);
}

/* MOE_OK if the item is complete; bytes becomes the size of its data. */
static enum moe_status check_item(const struct moe_st_item *it, size_t *bytes)
{
	int64_t n;
	size_t size;

	if (!it->name || !it->name[0] || !strcmp(it->name, "__metadata__") ||
	    !moe_utf8_valid(it->name, strlen(it->name)))
		return moe_fail(MOE_ERR_ARG, "tensor name '%.200s' is not usable",
				it->name ? it->name : "(null)");
	size = moe_dtype_size(it->dtype);
	n = it->ndim < 0 || it->ndim > MOE_MAX_NDIM ? -1 : moe_shape_count(it->ndim, it->shape);
	if (!size || n < 0 || __builtin_mul_overflow((size_t)n, size, bytes))
		return moe_fail(MOE_ERR_ARG, "tensor '%s' has an invalid dtype or shape", it->name);
	if (*bytes && !it->data && !it->fill)
		return moe_fail(MOE_ERR_ARG, "tensor '%s' has no data", it->name);
	return MOE_OK;
}

static enum moe_status check_all(const struct moe_st_item **order, size_t n,
				 const struct moe_st_meta *meta, size_t n_meta)
{
	size_t bytes, total = 0;

	for (size_t i = 0; i < n; i++) {
		MOE_TRY(check_item(order[i], &bytes));
		if (__builtin_add_overflow(total, bytes, &total))
			return moe_fail(MOE_ERR_ARG, "the sizes of the tensors overflow");
	}
	qsort(order, n, sizeof *order, by_name);
	for (size_t i = 1; i < n; i++)
		if (!strcmp(order[i - 1]->name, order[i]->name))
			return moe_fail(MOE_ERR_ARG, "tensor '%s' is given twice", order[i]->name);
	for (size_t i = 0; i < n_meta; i++)
		if (!strcmp(meta[i].key, MOE_ST_SUM_KEY))
			return moe_fail(MOE_ERR_ARG, "metadata '" MOE_ST_SUM_KEY "' is the writer's own");
		else if (!moe_utf8_valid(meta[i].key, strlen(meta[i].key)) ||
		    !moe_utf8_valid(meta[i].value, strlen(meta[i].value)))
			return moe_fail(MOE_ERR_ARG, "metadata '%.200s' is not UTF-8", meta[i].key);
	return MOE_OK;
}

/* The length field and the padded JSON header, whose first entry is the sum, zeros for now. */
static void make_header(struct text *t, const struct moe_st_item **order, size_t n,
			const struct moe_st_meta *meta, size_t n_meta)
{
	size_t at = 0, bytes = 0;
	uint64_t length;

	put(t, "\0\0\0\0\0\0\0\0", 8);
	put_format(t, MOE_ST_SUM_BEFORE "%0*d\"", MOE_ST_SUM_DIGITS, 0);
	for (size_t i = 0; i < n_meta; i++) {
		put(t, ",", 1);
		put_string(t, meta[i].key);
		put(t, ":", 1);
		put_string(t, meta[i].value);
	}
	put(t, "},", n ? 2 : 1);
	for (size_t i = 0; i < n; i++) {
		const struct moe_st_item *it = order[i];

		put(t, ",", i != 0);
		put_string(t, it->name);
		put_format(t, ":{\"dtype\":\"%s\",\"shape\":[", moe_dtype_name(it->dtype));
		for (int d = 0; d < it->ndim; d++)
			put_format(t, "%s%lld", d ? "," : "", (long long)it->shape[d]);
		check_item(it, &bytes);
		put_format(t, "],\"data_offsets\":[%zu,%zu]}", at, at + bytes);
		at += bytes;
	}
	put(t, "}", 1);
	put(t, "        ", -t->size & 7);
	length = t->size - 8;
	if (!t->failed)
		memcpy(t->data, &length, 8);
}

/* A file on its way, and the sum of what it has. */
struct output {
	struct moe_file_writer w;
	struct moe_sum sum;
};

static enum moe_status append(struct output *o, const void *data, size_t bytes)
{
	moe_sum_add(&o->sum, data, bytes);
	return moe_file_append(&o->w, data, bytes);
}

static enum moe_status write_item(struct output *o, const struct moe_st_item *it)
{
	enum moe_status status;
	size_t bytes = 0;
	void *buf;

	MOE_TRY(check_item(it, &bytes));
	if (it->data || !bytes)
		return append(o, it->data, bytes);
	buf = moe_alloc(bytes, 1);
	if (!buf)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory for tensor '%s'", o->w.path,
				it->name);
	status = it->fill(it->user, buf);
	if (status == MOE_OK)
		status = append(o, buf, bytes);
	moe_free(buf);
	return status;
}

static enum moe_status put_sum(struct output *o)
{
	char digits[MOE_ST_SUM_DIGITS + 1];

	snprintf(digits, sizeof digits, "%016llx", (unsigned long long)moe_sum_end(&o->sum));
	return moe_file_put(&o->w, MOE_ST_SUM_AT, digits, MOE_ST_SUM_DIGITS);
}

static enum moe_status write_file(const char *path, const struct text *header,
				  const struct moe_st_item **order, size_t n)
{
	struct output o;
	enum moe_status status;

	moe_sum_begin(&o.sum);
	MOE_TRY(moe_file_begin(&o.w, path));
	MOE_TRY_GOTO(append(&o, header->data, header->size), status, done);
	for (size_t i = 0; i < n; i++)
		MOE_TRY_GOTO(write_item(&o, order[i]), status, done);
	MOE_TRY_GOTO(put_sum(&o), status, done);
	status = moe_file_commit(&o.w);
done:
	moe_file_abort(&o.w);
	return status;
}

enum moe_status moe_safetensors_write(const char *path, const struct moe_st_item *items,
				      size_t n_items, const struct moe_st_meta *meta, size_t n_meta)
{
	const struct moe_st_item **order = moe_alloc(n_items, sizeof *order);
	struct text header = { 0 };
	enum moe_status status;

	if (!order)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
	for (size_t i = 0; i < n_items; i++)
		order[i] = &items[i];
	status = check_all(order, n_items, meta, n_meta);
	if (status != MOE_OK) {
		moe_fail_in(status, "%s", path);
		goto done;
	}
	qsort(order, n_items, sizeof *order, by_size_and_name);
	make_header(&header, order, n_items, meta, n_meta);
	if (header.failed)
		status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
	else
		status = write_file(path, &header, order, n_items);
done:
	moe_free(header.data);
	moe_free(order);
	return status;
}
