/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/safetensors_header.h"

#include <stdlib.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is little-endian");

/* What dtype a file's text means, MOE_DTYPE_COUNT if none of ours. */
static enum moe_dtype dtype_of(const char *text)
{
	for (int d = 0; d < MOE_DTYPE_COUNT; d++)
		if (!strcmp(text, moe_dtype_name((enum moe_dtype)d)))
			return (enum moe_dtype)d;
	return MOE_DTYPE_COUNT;
}

/* The only child of v named key: hostile headers repeat keys. */
static enum moe_status only_child(const cJSON *v, const char *key, const cJSON **out)
{
	const cJSON *found = NULL, *c;

	cJSON_ArrayForEach(c, v)
	{
		if (strcmp(c->string, key) != 0)
			continue;
		if (found)
			return moe_fail(MOE_ERR_FORMAT, "%s is given twice", key);
		found = c;
	}
	if (!found)
		return moe_fail(MOE_ERR_FORMAT, "%s is missing", key);
	*out = found;
	return MOE_OK;
}

static enum moe_status parse_shape(const cJSON *v, struct moe_st_tensor *t, int64_t *elements)
{
	const cJSON *c;
	int64_t dim;

	*elements = 1;
	t->ndim = 0;
	if (!cJSON_IsArray(v))
		return moe_fail(MOE_ERR_FORMAT, "shape is not a list");
	cJSON_ArrayForEach(c, v)
	{
		MOE_TRY(moe_json_as_int(c, "a dimension of shape", 0, MOE_JSON_INT_MAX, &dim));
		if (t->ndim < MOE_MAX_NDIM)
			t->shape[t->ndim] = dim;
		if (++t->ndim > 64)
			return moe_fail(MOE_ERR_FORMAT, "shape has more than 64 dimensions");
		if (__builtin_mul_overflow(*elements, dim, elements))
			return moe_fail(MOE_ERR_FORMAT, "the product of shape overflows");
	}
	return MOE_OK;
}

/* item is one `name: {dtype, shape, data_offsets}`; data holds size bytes. */
static enum moe_status parse_tensor(const cJSON *item, const unsigned char *data, size_t size,
				    struct moe_st_tensor *t)
{
	const cJSON *dtype = NULL, *shape = NULL, *offsets = NULL;
	int64_t begin, end, elements, bytes;

	if (!cJSON_IsObject(item))
		return moe_fail(MOE_ERR_FORMAT, "its entry is not an object");
	MOE_TRY(only_child(item, "dtype", &dtype));
	MOE_TRY(only_child(item, "shape", &shape));
	MOE_TRY(only_child(item, "data_offsets", &offsets));
	if (!cJSON_IsString(dtype))
		return moe_fail(MOE_ERR_FORMAT, "dtype is not a string");
	t->dtype_text = dtype->valuestring;
	t->dtype = dtype_of(t->dtype_text);
	MOE_TRY(parse_shape(shape, t, &elements));
	if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2)
		return moe_fail(MOE_ERR_FORMAT, "data_offsets is not a list of two");
	MOE_TRY(moe_json_as_int(offsets->child, "data_offsets[0]", 0, MOE_JSON_INT_MAX, &begin));
	MOE_TRY(moe_json_as_int(offsets->child->next, "data_offsets[1]", 0, MOE_JSON_INT_MAX,
				&end));
	if (begin > end)
		return moe_fail(MOE_ERR_FORMAT, "data_offsets [%lld, %lld] run backwards",
				(long long)begin, (long long)end);
	if ((uint64_t)end > size)
		return moe_fail(MOE_ERR_FORMAT,
				"data_offsets end at %lld, the file holds %zu bytes of data: "
				"truncated or an incomplete download",
				(long long)end, size);
	if (t->dtype != MOE_DTYPE_COUNT) {
		if (__builtin_mul_overflow(elements, (int64_t)moe_dtype_size(t->dtype), &bytes))
			return moe_fail(MOE_ERR_FORMAT, "the size of shape overflows");
		if (bytes != end - begin)
			return moe_fail(MOE_ERR_FORMAT,
					"shape and dtype %s make %lld bytes, "
					"data_offsets %lld",
					t->dtype_text, (long long)bytes, (long long)(end - begin));
	}
	if (t->ndim > MOE_MAX_NDIM)
		t->dtype = MOE_DTYPE_COUNT;
	t->data = data + begin;
	t->bytes = (size_t)(end - begin);
	return MOE_OK;
}

static enum moe_status parse_metadata(const cJSON *v)
{
	const cJSON *c;

	if (!cJSON_IsObject(v))
		return moe_fail(MOE_ERR_FORMAT, "__metadata__ is not an object");
	cJSON_ArrayForEach(c, v)
	{
		if (!cJSON_IsString(c))
			return moe_fail(MOE_ERR_FORMAT,
					"__metadata__ entry '%.100s' is not a string", c->string);
	}
	return MOE_OK;
}

static int by_data(const void *a, const void *b)
{
	const struct moe_st_tensor *x = *(const struct moe_st_tensor *const *)a;
	const struct moe_st_tensor *y = *(const struct moe_st_tensor *const *)b;

	if (x->data != y->data)
		return (const char *)x->data < (const char *)y->data ? -1 : 1;
	return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static enum moe_status check_overlap(const struct moe_st_header *h)
{
	const struct moe_st_tensor **order = moe_alloc(h->count, sizeof *order);
	enum moe_status status = MOE_OK;

	if (!order)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (size_t i = 0; i < h->count; i++)
		order[i] = &h->list[i];
	qsort(order, h->count, sizeof *order, by_data);
	for (size_t i = 1; i < h->count && status == MOE_OK; i++) {
		const struct moe_st_tensor *a = order[i - 1], *b = order[i];

		if ((const char *)b->data < (const char *)a->data + a->bytes)
			status = moe_fail(MOE_ERR_FORMAT,
					  "tensors '%.200s' and '%.200s' overlap in the file",
					  a->name, b->name);
	}
	moe_free(order);
	return status;
}

static enum moe_status parse_root(const unsigned char *data, size_t size, struct moe_st_header *h)
{
	size_t max = (size_t)cJSON_GetArraySize(h->root);
	const cJSON *c;

	h->list = moe_calloc(max, sizeof *h->list);
	if (!h->list)
		return moe_fail(MOE_ERR_NOMEM, "out of memory for %zu tensors", max);
	cJSON_ArrayForEach(c, h->root)
	{
		struct moe_st_tensor *t = &h->list[h->count];
		enum moe_status status;

		if (!strcmp(c->string, "__metadata__")) {
			if (h->metadata)
				return moe_fail(MOE_ERR_FORMAT, "__metadata__ is given twice");
			MOE_TRY(parse_metadata(c));
			h->metadata = c;
			continue;
		}
		t->name = c->string;
		status = parse_tensor(c, data, size, t);
		if (status != MOE_OK)
			return moe_fail_in(status, "tensor '%.200s'", t->name);
		h->count++;
	}
	return check_overlap(h);
}

static enum moe_status parse_mapped(const struct moe_mapping *map, struct moe_st_header *h)
{
	const char *text;
	uint64_t length;

	if (map->bytes < 8)
		return moe_fail(MOE_ERR_FORMAT,
				"%zu bytes are too few for a safetensors file: truncated?",
				map->bytes);
	text = (const char *)map->data + 8;
	memcpy(&length, map->data, 8);
	if (length > MOE_ST_HEADER_LIMIT)
		return moe_fail(MOE_ERR_FORMAT,
				"the header claims %llu bytes, at most %llu are allowed: "
				"not a safetensors file?",
				(unsigned long long)length,
				(unsigned long long)MOE_ST_HEADER_LIMIT);
	if (length > map->bytes - 8)
		return moe_fail(MOE_ERR_FORMAT,
				"the header claims %llu bytes, the file has %zu: truncated?",
				(unsigned long long)length, map->bytes);
	if (length == 0 || text[0] != '{')
		return moe_fail(MOE_ERR_FORMAT, "the header does not start with '{'");
	MOE_TRY(moe_json_parse(text, (size_t)length, "header", &h->root));
	return parse_root(map->data + 8 + length, map->bytes - 8 - (size_t)length, h);
}

enum moe_status moe_st_header_parse(const char *path, const struct moe_mapping *map,
				    struct moe_st_header *out)
{
	enum moe_status status;

	*out = (struct moe_st_header){ 0 };
	status = parse_mapped(map, out);
	if (status == MOE_OK)
		return MOE_OK;
	moe_fail_in(status, "%s", path); /* before its names are freed: the text is a copy */
	moe_st_header_free(out);
	return status;
}

void moe_st_header_free(struct moe_st_header *h)
{
	cJSON_Delete(h->root);
	moe_free(h->list);
	*h = (struct moe_st_header){ 0 };
}
