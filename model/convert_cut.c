/* SPDX-License-Identifier: Apache-2.0 */
/* The output's files: which tensors are in which, where, and their headers. */
#include "model/convert_plan.h"
#include "model/json.h"

#include <stdlib.h>

#define SUFFIX ".safetensors"

/* Tensors of one input file, those of one matrix together, in the order of the input. */
static int by_file(const void *a, const void *b)
{
	const struct moe_convert_tensor *x = a, *y = b;

	if (x->shard != y->shard)
		return x->shard < y->shard ? -1 : 1;
	if (x->at != y->at)
		return x->at < y->at ? -1 : 1;
	if (x->copy || y->copy) /* one of them is empty */
		return x->copy ? y->copy ? strcmp(x->name, y->name) : -1 : 1;
	if (x->piece != y->piece)
		return x->piece < y->piece ? -1 : 1;
	return x->slot - y->slot;
}

/* Wide ones first, so that all are aligned; then by name. */
static int by_dtype(const void *a, const void *b)
{
	const struct moe_convert_tensor *x = a, *y = b;

	if (x->dtype_bytes != y->dtype_bytes)
		return x->dtype_bytes > y->dtype_bytes ? -1 : 1;
	return strcmp(x->name, y->name);
}

/* Where the tensor stood in the input. */
static size_t place(const struct moe_convert_plan *p, const struct moe_convert_tensor *t)
{
	const struct moe_convert_source *s = t->copy ? NULL : &p->source[p->piece[t->piece].source];
	const struct moe_st_tensor *from = t->copy ? t->copy : s->plain ? s->plain : s->coded.codes;
	const void *data = NULL;
	size_t bytes;

	moe_safetensors_file_data(p->st, from->file, &data, &bytes);
	return (size_t)((uintptr_t)from->data - (uintptr_t)data);
}

/* Files of the input, cut where they would be larger than the limit; never inside a matrix. */
static enum moe_status cut(struct moe_convert_plan *p, int64_t limit)
{
	int file = -1;

	p->shard = moe_calloc(p->n_tensors + 1, sizeof *p->shard);
	if (!p->shard)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (size_t i = 0; i < p->n_tensors;) {
		struct moe_convert_tensor *t = &p->tensor[i];
		struct moe_convert_shard *s = &p->shard[p->n_shards - !!p->n_shards];
		size_t n = 1, bytes = t->bytes;

		for (; !t->copy && i + n < p->n_tensors && !t[n].copy && t[n].piece == t->piece;
		     n++)
			bytes += t[n].bytes;
		if (t->shard != file || (limit && s->n && (int64_t)(s->bytes + bytes) > limit)) {
			file = t->shard;
			s = &p->shard[p->n_shards++];
			s->first = i;
		}
		s->n += n;
		s->bytes += bytes;
		p->bytes += (int64_t)bytes;
		i += n;
	}
	return MOE_OK;
}

static bool add_entry(cJSON *root, const struct moe_convert_tensor *t)
{
	cJSON *o = cJSON_AddObjectToObject(root, t->name), *shape, *offsets;

	if (!o || !cJSON_AddStringToObject(o, "dtype", t->dtype))
		return false;
	shape = cJSON_AddArrayToObject(o, "shape");
	for (int d = 0; shape && d < t->ndim; d++)
		cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->shape[d]));
	offsets = cJSON_AddArrayToObject(o, "data_offsets");
	return shape && offsets &&
	       cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)t->at)) &&
	       cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(t->at + t->bytes)));
}

/* The length and the JSON text, padded so that data are aligned. */
static enum moe_status make_header(const struct moe_convert_plan *p, struct moe_convert_shard *s)
{
	cJSON *root = cJSON_CreateObject(), *meta = cJSON_AddObjectToObject(root, "__metadata__");
	bool good = meta && cJSON_AddStringToObject(meta, "format", "pt");
	char *text = NULL;
	uint64_t length;

	for (size_t i = s->first; good && i < s->first + s->n; i++)
		good = add_entry(root, &p->tensor[i]);
	if (good)
		text = cJSON_PrintUnformatted(root);
	cJSON_Delete(root);
	length = text ? strlen(text) : 0;
	s->header_bytes = 8 + length + (-length & 7);
	s->header = text ? moe_alloc(s->header_bytes, 1) : NULL;
	if (s->header) {
		memset(s->header, ' ', s->header_bytes);
		memcpy(s->header + 8, text, length);
		length = s->header_bytes - 8;
		memcpy(s->header, &length, 8);
	}
	cJSON_free(text);
	return s->header ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory");
}

static int compare_names(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A split tensor could get the name of another. */
static enum moe_status check_names(const struct moe_convert_plan *p)
{
	const char **name = moe_alloc(p->n_tensors, sizeof *name);
	enum moe_status status = MOE_OK;

	if (!name)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (size_t i = 0; i < p->n_tensors; i++)
		name[i] = p->tensor[i].name;
	qsort(name, p->n_tensors, sizeof *name, compare_names);
	for (size_t i = 1; i < p->n_tensors && status == MOE_OK; i++)
		if (!strcmp(name[i - 1], name[i]))
			status = moe_fail(MOE_ERR_FORMAT, "%s would be there twice", name[i]);
	moe_free(name);
	return status;
}

/* The input's, unless files were split. */
static char *file_name(const struct moe_convert_plan *p, int i)
{
	const char *path = moe_safetensors_file_path(p->st, p->tensor[p->shard[i].first].shard);
	size_t n = strlen(path), m = strlen(SUFFIX);
	bool other = n < m || strcmp(path + n - m, SUFFIX); /* a GGUF file */

	if (other && p->n_shards == 1)
		return moe_strdup("model" SUFFIX);
	if (other || p->n_shards != moe_safetensors_file_count(p->st))
		return moe_format("model-%05d-of-%05d" SUFFIX, i + 1, p->n_shards);
	return moe_strdup(strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
}

static enum moe_status finish(struct moe_convert_plan *p, int i)
{
	struct moe_convert_shard *s = &p->shard[i];
	size_t at = 0;

	s->name = file_name(p, i);
	if (!s->name)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	qsort(p->tensor + s->first, s->n, sizeof *p->tensor, by_dtype);
	for (size_t j = s->first; j < s->first + s->n; j++) {
		struct moe_convert_tensor *t = &p->tensor[j];

		t->shard = i;
		t->at = at;
		at += t->bytes;
		if (!t->copy)
			p->piece[t->piece].tensor[t->slot] = (int64_t)j;
	}
	return make_header(p, s);
}

enum moe_status moe_convert_cut(struct moe_convert_plan *p, int64_t max_shard_bytes)
{
	for (size_t i = 0; i < p->n_tensors; i++)
		p->tensor[i].at = place(p, &p->tensor[i]);
	qsort(p->tensor, p->n_tensors, sizeof *p->tensor, by_file);
	MOE_TRY(check_names(p));
	MOE_TRY(cut(p, max_shard_bytes));
	for (int i = 0; i < p->n_shards; i++)
		MOE_TRY(finish(p, i));
	return MOE_OK;
}
