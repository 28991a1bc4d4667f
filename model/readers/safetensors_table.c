/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a checkpoint's tensors: names, memory, files, and what is asked of it. */
#include "model/readers/safetensors_own.h"
#include "model/readers/safetensors_table.h"

#include <sys/mman.h>

static enum moe_status no_memory(const struct moe_safetensors *st)
{
	return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", st->path);
}

static uint64_t hash_name(const char *s)
{
	uint64_t h = 14695981039346656037u; /* FNV-1a */

	for (; *s; s++)
		h = (h ^ (unsigned char)*s) * 1099511628211u;
	return h ^ h >> 32;
}

/* The slot that holds name, or the free one where it belongs. */
static uint32_t *slot_of(const struct moe_safetensors *st, const char *name)
{
	size_t mask = st->n_slots - 1, i = hash_name(name) & mask;

	while (st->slots[i] && strcmp(st->tensors[st->slots[i] - 1].name, name) != 0)
		i = (i + 1) & mask;
	return &st->slots[i];
}

/* Room for one more tensor in the list and the table. */
static enum moe_status reserve(struct moe_safetensors *st)
{
	if (st->count == st->cap) {
		size_t cap = st->cap ? st->cap * 2 : 64;
		struct moe_st_tensor *p = moe_realloc(st->tensors, cap, sizeof *p);

		if (!p)
			return no_memory(st);
		st->tensors = p;
		st->cap = cap;
	}
	if ((st->count + 1) * 2 > st->n_slots) {
		size_t n = st->n_slots ? st->n_slots * 2 : 128;
		uint32_t *p = moe_calloc(n, sizeof *p);

		if (!p)
			return no_memory(st);
		moe_free(st->slots);
		st->slots = p;
		st->n_slots = n;
		for (size_t i = 0; i < st->count; i++)
			*slot_of(st, st->tensors[i].name) = (uint32_t)i + 1;
	}
	return MOE_OK;
}

enum moe_status moe_st_append(struct moe_safetensors *st, const struct moe_st_tensor *t)
{
	MOE_TRY(reserve(st));
	st->tensors[st->count++] = *t;
	*slot_of(st, t->name) = (uint32_t)st->count;
	return MOE_OK;
}

struct moe_st_tensor *moe_st_known(const struct moe_safetensors *st, const char *name)
{
	uint32_t at = st->n_slots ? *slot_of(st, name) : 0;

	return at ? &st->tensors[at - 1] : NULL;
}

enum moe_status moe_st_add_file(struct moe_safetensors *st, char *path)
{
	if (!path)
		return no_memory(st);
	if (st->n_files == st->cap_files) {
		int cap = st->cap_files ? st->cap_files * 2 : 4;
		struct st_file *p = moe_realloc(st->files, (size_t)cap, sizeof *p);

		if (!p) {
			moe_free(path);
			return no_memory(st);
		}
		st->files = p;
		st->cap_files = cap;
	}
	st->files[st->n_files++] = (struct st_file){ .path = path };
	return MOE_OK;
}

/* ---- what other readers add ---- */

#define BLOCK_BYTES ((size_t)256 << 10)
#define BLOCK_ALIGN ((size_t)64)

void *moe_st_table_memory(struct moe_safetensors *st, size_t bytes)
{
	struct block *b = st->blocks;
	size_t first = (sizeof *b + BLOCK_ALIGN - 1) & ~(BLOCK_ALIGN - 1), at, room;

	bytes = (bytes + BLOCK_ALIGN - 1) & ~(BLOCK_ALIGN - 1);
	if (!b || b->bytes - b->used < bytes) {
		room = MOE_MAX(BLOCK_BYTES, bytes + first);
		b = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		if (b == MAP_FAILED)
			return NULL;
		b->bytes = room;
		b->used = first;
		b->next = st->blocks;
		st->blocks = b;
	}
	at = b->used;
	b->used += bytes;
	return (char *)b + at;
}

enum moe_status moe_st_table_file(struct moe_safetensors *st, const char *path,
				  struct moe_mapping map)
{
	enum moe_status status = moe_st_add_file(st, moe_strdup(path));

	if (status == MOE_OK)
		st->files[st->n_files - 1].map = map;
	else
		moe_file_unmap(&map);
	return status;
}

enum moe_status moe_st_table_tensor(struct moe_safetensors *st, const struct moe_st_tensor *t)
{
	struct moe_st_tensor own = *t;
	char *name;

	if (moe_st_known(st, t->name))
		return moe_fail(MOE_ERR_FORMAT, "%s is there already", t->name);
	name = moe_st_table_memory(st, strlen(t->name) + 1);
	if (!name)
		return no_memory(st);
	own.name = strcpy(name, t->name);
	return moe_st_append(st, &own);
}

enum moe_status moe_st_table_replace(struct moe_safetensors *st, const struct moe_st_tensor *t)
{
	struct moe_st_tensor own = *t, *known = moe_st_known(st, t->name);

	if (!known)
		return moe_st_table_tensor(st, t);
	own.name = known->name;
	own.file = known->file;
	*known = own;
	return MOE_OK;
}

static enum moe_status fill_slots(struct moe_safetensors *st)
{
	memset(st->slots, 0, st->n_slots * sizeof *st->slots);
	for (size_t i = 0; i < st->count; i++) {
		uint32_t *slot = slot_of(st, st->tensors[i].name);

		if (*slot)
			return moe_fail(MOE_ERR_FORMAT, "%s: two tensors would be '%.200s'",
					st->path, st->tensors[i].name);
		*slot = (uint32_t)i + 1;
	}
	return MOE_OK;
}

enum moe_status moe_st_table_rename(struct moe_safetensors *st, moe_st_rename_fn *rename,
				    void *user)
{
	size_t n = 0;

	for (size_t i = 0; i < st->count; i++) {
		struct moe_st_tensor t = st->tensors[i];
		char buf[256], *own;
		const char *name = rename(user, &t, buf, sizeof buf);

		if (!name)
			continue;
		if (strcmp(name, t.name)) {
			own = moe_st_table_memory(st, strlen(name) + 1);
			if (!own)
				return no_memory(st);
			t.name = strcpy(own, name);
		}
		st->tensors[n++] = t;
	}
	st->count = n;
	return st->n_slots ? fill_slots(st) : MOE_OK;
}

enum moe_status moe_st_table_own(struct moe_safetensors *st, void *owned,
				 void (*close)(void *owned))
{
	if (st->owned) {
		close(owned);
		return moe_fail(MOE_ERR_STATE,
				"%s: weights of experts were put in its place already", st->path);
	}
	st->owned = owned;
	st->close_owned = close;
	return MOE_OK;
}

/* ---- the end, and questions ---- */

void moe_safetensors_close(struct moe_safetensors *st)
{
	if (!st)
		return;
	if (st->owned)
		st->close_owned(st->owned);
	for (int i = 0; i < st->n_files; i++) {
		moe_file_unmap(&st->files[i].map);
		cJSON_Delete(st->files[i].root);
		moe_free(st->files[i].path);
	}
	cJSON_Delete(st->index);
	while (st->blocks) {
		struct block *b = st->blocks;

		st->blocks = b->next;
		munmap(b, b->bytes);
	}
	moe_free(st->files);
	moe_free(st->tensors);
	moe_free(st->slots);
	moe_free(st->path);
	moe_free(st);
}

size_t moe_safetensors_count(const struct moe_safetensors *st)
{
	return st->count;
}

const struct moe_st_tensor *moe_safetensors_at(const struct moe_safetensors *st, size_t i)
{
	return &st->tensors[i];
}

const struct moe_st_tensor *moe_safetensors_find(const struct moe_safetensors *st, const char *name)
{
	return moe_st_known(st, name);
}

int moe_safetensors_file_count(const struct moe_safetensors *st)
{
	return st->n_files;
}

const char *moe_safetensors_file_path(const struct moe_safetensors *st, int file)
{
	return st->files[file].path;
}

bool moe_safetensors_has_file(const struct moe_safetensors *st, const char *path)
{
	for (int i = 0; i < st->n_files; i++)
		if (!strcmp(st->files[i].path, path))
			return true;
	return false;
}

void moe_safetensors_file_data(const struct moe_safetensors *st, int file, const void **data,
			       size_t *bytes)
{
	*data = st->files[file].map.data;
	*bytes = st->files[file].map.bytes;
}

/* The file whose mapping holds an address; NULL: none. */
static const struct st_file *file_of(const struct moe_safetensors *st, const void *at)
{
	for (int i = 0; st && i < st->n_files; i++) {
		const struct moe_mapping *m = &st->files[i].map;

		if (m->opened && (uintptr_t)at - (uintptr_t)m->data < m->bytes)
			return &st->files[i];
	}
	return NULL;
}

enum moe_status moe_safetensors_fetch(const struct moe_safetensors *st, const void *from,
				      size_t bytes, void *out)
{
	const struct st_file *f = file_of(st, from);

	if (f)
		return moe_mapping_read(&f->map, f->path,
					(size_t)((const unsigned char *)from - f->map.data), bytes,
					out);
	memcpy(out, from, bytes);
	return MOE_OK;
}

const char *moe_safetensors_metadata(const struct moe_safetensors *st, const char *key)
{
	for (int i = 0; i < st->n_files; i++) {
		const cJSON *v = moe_json_get(st->files[i].metadata, key);

		if (v)
			return v->valuestring;
	}
	return NULL;
}

bool moe_safetensors_metadata_at(const struct moe_safetensors *st, int file, int i,
				 const char **key, const char **value)
{
	const cJSON *v = cJSON_GetArrayItem(st->files[file].metadata, i);

	if (!v)
		return false;
	*key = v->string;
	*value = v->valuestring;
	return true;
}

enum moe_status moe_safetensors_get(const struct moe_safetensors *st, const char *name, int ndim,
				    const int64_t *shape, const struct moe_st_tensor **out)
{
	const struct moe_st_tensor *t = moe_safetensors_find(st, name);
	char want[96], found[96];

	if (!t)
		return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' is missing", st->path, name);
	if (t->dtype == MOE_DTYPE_COUNT)
		return moe_fail(
			MOE_ERR_UNSUPPORTED,
			"%s: tensor '%s' has dtype '%.32s' and %d dimensions: not supported",
			st->path, name, t->dtype_text, t->ndim);
	if (t->ndim != ndim || (ndim && memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) != 0))
		return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' has shape %s, expected %s",
				st->path, name,
				moe_shape_text(t->ndim, t->shape, found, sizeof found),
				moe_shape_text(ndim, shape, want, sizeof want));
	*out = t;
	return MOE_OK;
}

enum moe_status moe_safetensors_get_typed(const struct moe_safetensors *st, const char *name,
					  enum moe_dtype dtype, int ndim, const int64_t *shape,
					  const struct moe_st_tensor **out)
{
	MOE_TRY(moe_safetensors_get(st, name, ndim, shape, out));
	if ((*out)->dtype != dtype)
		return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' has dtype %s, expected %s",
				st->path, name, (*out)->dtype_text, moe_dtype_name(dtype));
	return MOE_OK;
}

enum moe_status moe_safetensors_read_f32(const struct moe_safetensors *st, const char *name,
					 int ndim, const int64_t *shape, float *out)
{
	const struct moe_st_tensor *t = NULL;

	MOE_TRY(moe_safetensors_get(st, name, ndim, shape, &t));
	if (!moe_to_f32(out, t->data, t->dtype, t->bytes / moe_dtype_size(t->dtype)))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: tensor '%s' has dtype %s: cannot be read "
				"as float",
				st->path, name, t->dtype_text);
	return MOE_OK;
}
