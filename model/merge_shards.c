/* SPDX-License-Identifier: Apache-2.0 */
#include "model/merge_shards.h"
#include "model/file.h"
#include "model/json.h"
#include "model/merge_math.h"

#include <stdio.h>
#include <stdlib.h>

/* Tensors tensor[first..first + n) of one base file, as one file. */
struct moe_merge_part {
	int file;
	size_t first, n;
	char *name;
};

enum moe_status moe_merge_advance(struct moe_merge_shards *m, const char *what, int64_t bytes)
{
	m->done += bytes;
	if (m->progress && m->progress(what, m->done, m->total, m->user))
		return moe_fail(MOE_ERR_INTERRUPTED, "interrupted: nothing was written");
	return MOE_OK;
}

/* ---- which tensors ---- */

static enum moe_status add_job(struct moe_merge_shards *m, enum moe_role role,
			       const struct moe_adapter_entry *e, int expert)
{
	const struct moe_st_tensor *t = NULL;
	char name[MOE_TENSOR_NAME_MAX], first[MOE_TENSOR_NAME_MAX] = "";
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(m->arch, role, e->layer, shape);

	for (int v = 0; !t && moe_arch_tensor_name(m->arch, role, e->layer, expert, v, name); v++) {
		if (!v)
			snprintf(first, sizeof first, "%s", name);
		t = moe_safetensors_find(m->base, name);
	}
	MOE_TRY(moe_safetensors_get(m->base, t ? t->name : first, ndim, shape, &t));
	if (t->dtype > MOE_F64)
		return moe_fail(
			MOE_ERR_UNSUPPORTED,
			"tensor '%s' is %s, and the adapter changes it: F32, BF16, F16 and F64 "
			"can be merged; use the checkpoint in bf16",
			t->name, t->dtype_text);
	moe_merge_job_set(&m->job[t - moe_safetensors_at(m->base, 0)], m->adapter, e, role, expert);
	m->merged++;
	return MOE_OK;
}

static bool exists(const struct moe_merge_shards *m, enum moe_role role, int layer)
{
	char name[MOE_TENSOR_NAME_MAX];

	for (int v = 0; moe_arch_tensor_name(m->arch, role, layer, -1, v, name); v++)
		if (moe_safetensors_find(m->base, name))
			return true;
	return false;
}

static enum moe_status add_experts(struct moe_merge_shards *m, const struct moe_adapter_entry *e)
{
	if (exists(m, MOE_ROLE_EXPERTS_GATE_UP, e->layer)) {
		if (e->gate_up_rank)
			MOE_TRY(add_job(m, MOE_ROLE_EXPERTS_GATE_UP, e, -1));
		return e->rank ? add_job(m, MOE_ROLE_EXPERTS_DOWN, e, -1) : MOE_OK;
	}
	for (int x = 0; x < e->n_experts; x++) {
		if (e->gate_up_rank) {
			MOE_TRY(add_job(m, MOE_ROLE_EXPERT_GATE, e, x));
			MOE_TRY(add_job(m, MOE_ROLE_EXPERT_UP, e, x));
		}
		if (e->rank)
			MOE_TRY(add_job(m, MOE_ROLE_EXPERT_DOWN, e, x));
	}
	return MOE_OK;
}

static enum moe_status find_tensors(struct moe_merge_shards *m)
{
	m->job = moe_calloc(moe_safetensors_count(m->base), sizeof *m->job);
	if (!m->job)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (size_t i = 0; m->adapter && i < m->adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &m->adapter->entries[i];

		MOE_TRY(e->target == MOE_ADAPTER_EXPERTS
				? add_experts(m, e)
				: add_job(m, moe_adapter_target_role(e->target), e, -1));
	}
	return MOE_OK;
}

/* ---- which files ---- */

static int by_place(const void *a, const void *b)
{
	const struct moe_st_tensor *x = *(const struct moe_st_tensor *const *)a;
	const struct moe_st_tensor *y = *(const struct moe_st_tensor *const *)b;

	if (x->file != y->file)
		return x->file < y->file ? -1 : 1;
	if (x->data != y->data)
		return (const char *)x->data < (const char *)y->data ? -1 : 1;
	return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; /* empty ones first */
}

static enum moe_status sort_tensors(struct moe_merge_shards *m)
{
	size_t n = moe_safetensors_count(m->base);

	m->tensor = moe_alloc(n, sizeof *m->tensor);
	m->part = moe_calloc(n + (size_t)moe_safetensors_file_count(m->base), sizeof *m->part);
	if (!m->tensor || !m->part)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (size_t i = 0; i < n; i++)
		m->tensor[i] = moe_safetensors_at(m->base, i);
	qsort(m->tensor, n, sizeof *m->tensor, by_place);
	return MOE_OK;
}

/* One part per file, or several where a file is above the limit. */
static void cut(struct moe_merge_shards *m, int64_t limit)
{
	size_t count = moe_safetensors_count(m->base), at = 0, bytes;
	const void *data;

	for (int f = 0; f < moe_safetensors_file_count(m->base); f++) {
		size_t end = at;
		int64_t held = 0;

		while (end < count && m->tensor[end]->file == f)
			end++;
		moe_safetensors_file_data(m->base, f, &data, &bytes);
		m->total += (int64_t)bytes;
		m->part[m->n_shards++] = (struct moe_merge_part){ .file = f, .first = at };
		for (; at < end; at++) {
			struct moe_merge_part *p = &m->part[m->n_shards - 1];
			int64_t size = (int64_t)m->tensor[at]->bytes;

			if (limit && (int64_t)bytes > limit && p->n && held + size > limit) {
				p = &m->part[m->n_shards++];
				*p = (struct moe_merge_part){ .file = f, .first = at };
				held = 0;
				m->split = true;
			}
			p->n++;
			held += size;
		}
	}
}

static enum moe_status name_parts(struct moe_merge_shards *m)
{
	for (int i = 0; i < m->n_shards; i++) {
		struct moe_merge_part *p = &m->part[i];
		const char *path = moe_safetensors_file_path(m->base, p->file);

		p->name = m->split
				  ? moe_format("model-%05d-of-%05d.safetensors", i + 1, m->n_shards)
				  : moe_strdup(strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
		if (!p->name)
			return moe_fail(MOE_ERR_NOMEM, "out of memory");
	}
	return MOE_OK;
}

enum moe_status moe_merge_plan(struct moe_merge_shards *m, int64_t max_shard_bytes)
{
	MOE_TRY(find_tensors(m));
	MOE_TRY(sort_tensors(m));
	cut(m, max_shard_bytes);
	return name_parts(m);
}

/* ---- writing ---- */

static enum moe_status write_plain(struct moe_merge_shards *m, struct moe_file_writer *w,
				   const char *what, const void *data, size_t bytes)
{
	const char *p = data;

	while (bytes) {
		size_t n = MOE_MIN(bytes, (size_t)8 << 20);

		MOE_TRY(moe_file_append(w, p, n));
		moe_mapping_forget(p, n);
		MOE_TRY(moe_merge_advance(m, what, (int64_t)n));
		p += n;
		bytes -= n;
	}
	return MOE_OK;
}

static enum moe_status write_tensor(struct moe_merge_shards *m, struct moe_file_writer *w,
				    const struct moe_st_tensor *t)
{
	const struct moe_merge_job *job = &m->job[t - moe_safetensors_at(m->base, 0)];
	struct moe_merge_block *b;
	enum moe_status status = MOE_OK;

	if (job->rewrite)
		return moe_rewrite_tensor(m, w, t, job);
	if (!job->entry)
		return write_plain(m, w, t->name, t->data, t->bytes);
	b = moe_merge_block_new(job, t);
	if (!b)
		return moe_fail(MOE_ERR_NOMEM, "out of memory for tensor '%s'", t->name);
	while (status == MOE_OK && moe_merge_block_next(b)) {
		status = moe_merge_check(t, b->wide, b->bytes / moe_dtype_size(t->dtype));
		if (status == MOE_OK)
			status = moe_file_append(w, b->out, b->bytes);
		moe_mapping_forget(b->from, b->bytes);
		if (status == MOE_OK)
			status = moe_merge_advance(m, t->name, (int64_t)b->bytes);
	}
	moe_free(b);
	return status;
}

/* A whole base file: its header as it is, gaps between tensors too. */
static enum moe_status write_whole(struct moe_merge_shards *m, struct moe_file_writer *w,
				   const struct moe_merge_part *p)
{
	const void *data;
	const char *at, *end;
	size_t bytes;

	moe_safetensors_file_data(m->base, p->file, &data, &bytes);
	at = data;
	end = at + bytes;
	for (size_t i = p->first; i < p->first + p->n; i++) {
		const struct moe_st_tensor *t = m->tensor[i];
		const char *from = t->data;

		if (!t->bytes)
			continue;
		MOE_TRY(write_plain(m, w, p->name, at, (size_t)(from - at)));
		MOE_TRY(write_tensor(m, w, t));
		at = from + t->bytes;
	}
	return write_plain(m, w, p->name, at, (size_t)(end - at));
}

/* The header of a part: the base's entries with offsets of its own. */
static enum moe_status part_header(const struct moe_merge_shards *m, const struct moe_merge_part *p,
				   char **out, size_t *bytes)
{
	const char *path = moe_safetensors_file_path(m->base, p->file);
	cJSON *base = NULL, *root = cJSON_CreateObject(), *item;
	bool good = root != NULL;
	const void *data;
	uint64_t length;
	char *text = NULL;
	size_t size, at = 0, n;

	moe_safetensors_file_data(m->base, p->file, &data, &size);
	memcpy(&length, data, 8);
	MOE_TRY(moe_json_parse((const char *)data + 8, (size_t)length, path, &base));
	item = cJSON_DetachItemFromObjectCaseSensitive(base, "__metadata__");
	good = good && (!item || cJSON_AddItemToObject(root, "__metadata__", item));
	for (size_t i = p->first; good && i < p->first + p->n; i++) {
		const struct moe_st_tensor *t = m->tensor[i];
		const double offsets[2] = { (double)at, (double)(at + t->bytes) };

		item = cJSON_DetachItemFromObjectCaseSensitive(base, t->name);
		good = item &&
		       cJSON_ReplaceItemInObjectCaseSensitive(
			       item, "data_offsets", cJSON_CreateDoubleArray(offsets, 2)) &&
		       cJSON_AddItemToObject(root, t->name, item);
		at += t->bytes;
	}
	text = good ? cJSON_PrintUnformatted(root) : NULL;
	cJSON_Delete(base);
	cJSON_Delete(root);
	n = text ? strlen(text) : 0;
	*bytes = 8 + (n + 7) / 8 * 8;
	*out = text ? moe_alloc(*bytes, 1) : NULL;
	if (*out) {
		length = *bytes - 8;
		memset(*out, ' ', *bytes);
		memcpy(*out, &length, 8);
		memcpy(*out + 8, text, n);
	}
	cJSON_free(text);
	return *out ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
}

static enum moe_status write_split(struct moe_merge_shards *m, struct moe_file_writer *w,
				   const struct moe_merge_part *p)
{
	enum moe_status status;
	char *header;
	size_t bytes;

	MOE_TRY(part_header(m, p, &header, &bytes));
	status = moe_file_append(w, header, bytes);
	moe_free(header);
	for (size_t i = p->first; status == MOE_OK && i < p->first + p->n; i++)
		status = write_tensor(m, w, m->tensor[i]);
	return status;
}

static enum moe_status write_part(struct moe_merge_shards *m, const char *dir,
				  const struct moe_merge_part *p)
{
	char *path = moe_path_join(dir, p->name);
	struct moe_file_writer w = { .fd = -1 };
	enum moe_status status =
		path ? moe_file_begin(&w, path) : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);

	if (status == MOE_OK)
		status = m->split ? write_split(m, &w, p) : write_whole(m, &w, p);
	if (status == MOE_OK)
		status = moe_file_commit(&w);
	moe_file_abort(&w);
	moe_free(path);
	return status;
}

static enum moe_status write_index(const struct moe_merge_shards *m, const char *dir)
{
	cJSON *root = cJSON_CreateObject(), *meta, *map;
	char *path = moe_path_join(dir, MOE_INDEX_NAME);
	enum moe_status status = MOE_ERR_NOMEM;
	int64_t total = 0;
	bool good;

	for (size_t i = 0; i < moe_safetensors_count(m->base); i++)
		total += (int64_t)m->tensor[i]->bytes;
	meta = cJSON_AddObjectToObject(root, "metadata");
	map = cJSON_AddObjectToObject(root, "weight_map");
	good = path && map && cJSON_AddNumberToObject(meta, "total_size", (double)total);
	for (int s = 0; s < m->n_shards; s++)
		for (size_t i = 0; good && i < m->part[s].n; i++)
			good = cJSON_AddStringToObject(map, m->tensor[m->part[s].first + i]->name,
						       m->part[s].name);
	if (good)
		status = moe_json_write(path, root);
	else
		moe_fail(status, "%s: out of memory for an index", dir);
	cJSON_Delete(root);
	moe_free(path);
	return status;
}

enum moe_status moe_merge_write_shards(struct moe_merge_shards *m, const char *dir)
{
	for (int i = 0; i < m->n_shards; i++)
		MOE_TRY(write_part(m, dir, &m->part[i]));
	return m->split ? write_index(m, dir) : MOE_OK;
}

void moe_merge_shards_free(struct moe_merge_shards *m)
{
	for (int i = 0; m->part && i < m->n_shards; i++)
		moe_free(m->part[i].name);
	moe_free(m->part);
	moe_free(m->tensor);
	moe_free(m->job);
	moe_adapter_free(m->adapter);
	moe_safetensors_close(m->base);
	moe_free(m->arch);
}
