/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/gguf_file.h"

#include <stdio.h>
#include <stdlib.h>

#define MAGIC "GGUF"
#define SUFFIX ".gguf"
#define DEFAULT_ALIGNMENT 32
#define MAX_ALIGNMENT (1 << 20)
#define MAX_SPLITS 4096
#define MAX_NAME 128 /* bytes; the format allows 64 */
/* The fewest bytes that a key with its value, and a tensor's entry, can have. */
#define KEY_BYTES (8 + 1 + 4 + 1)
#define ENTRY_BYTES (8 + 1 + 4 + 4 + 8)

static enum moe_status no_memory(const char *path)
{
	return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
}

/* ---- tensors ---- */

static bool is_name(const char *text, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		if (text[i] <= ' ' || text[i] > '~' || text[i] == '"' || text[i] == '\\')
			return false;
	return bytes > 0 && bytes <= MAX_NAME;
}

/* Bytes of a tensor of its shape; 0 where its type is unknown, and with it the size of its blocks. */
static enum moe_status size_tensor(const char *path, struct moe_gguf_tensor *t)
{
	int64_t count = moe_shape_count(t->ndim, t->shape), row = t->shape[t->ndim - 1];

	if (count < 0 || count > INT64_MAX / 512)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: the shape of tensor '%s' is beyond what can be", path,
				t->name);
	if (!t->type)
		return MOE_OK;
	if (row % t->type->values)
		return moe_fail(
			MOE_ERR_FORMAT,
			"%s: tensor '%s' has rows of %lld weights; %s needs a multiple of %d", path,
			t->name, (long long)row, t->type->name, t->type->values);
	t->bytes = (size_t)(count / t->type->values) * (size_t)t->type->bytes;
	return MOE_OK;
}

/* *offset: of its data, from where data begin. */
static enum moe_status take_tensor(struct gguf_cursor *c, struct moe_gguf_tensor *t,
				   uint64_t *offset)
{
	uint64_t dim[MOE_GGUF_DIMS];
	const char *name = "";
	size_t bytes = 0;
	uint32_t ndim = 0;

	MOE_TRY(moe_gguf_take_text(c, "a tensor's name", &name, &bytes));
	if (!is_name(name, bytes))
		return moe_fail(
			MOE_ERR_FORMAT,
			"%s: byte %zu: a tensor's name is expected, of 1 to %d printable bytes",
			c->path, (size_t)((const unsigned char *)name - c->begin), MAX_NAME);
	t->name = moe_format("%.*s", (int)bytes, name);
	if (!t->name)
		return no_memory(c->path);
	MOE_TRY(moe_gguf_take(c, 4, "a tensor's entry", &ndim));
	if (ndim < 1 || ndim > MOE_GGUF_DIMS)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: tensor '%s' has %u dimensions; 1 to %d are expected", c->path,
				t->name, ndim, MOE_GGUF_DIMS);
	MOE_TRY(moe_gguf_take(c, 8 * ndim, "a tensor's entry", dim));
	MOE_TRY(moe_gguf_take(c, 4, "a tensor's entry", &t->type_number));
	MOE_TRY(moe_gguf_take(c, 8, "a tensor's entry", offset));
	t->ndim = (int)ndim;
	for (uint32_t i = 0; i < ndim; i++) {
		if (dim[i] < 1 || dim[i] > INT64_MAX)
			return moe_fail(MOE_ERR_FORMAT,
					"%s: tensor '%s' has the size %llu in dimension %u",
					c->path, t->name, (unsigned long long)dim[i], i);
		t->shape[ndim - 1 - i] = (int64_t)dim[i];
	}
	t->type = moe_gguf_type(t->type_number);
	return size_tensor(c->path, t);
}

static enum moe_status place_tensor(const struct gguf_cursor *c, struct moe_gguf_tensor *t,
				    uint64_t offset, uint64_t alignment, size_t begin)
{
	uint64_t room = (uint64_t)(c->end - c->begin) - begin;

	if (offset % alignment)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: tensor '%s' begins at %llu, no multiple of the alignment %llu",
				c->path, t->name, (unsigned long long)offset,
				(unsigned long long)alignment);
	if (offset > room || t->bytes > room - offset)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: tensor '%s' lies at byte %llu of the data and has %zu bytes; "
				"the file has %llu of "
				"data: it is truncated or damaged",
				c->path, t->name, (unsigned long long)offset, t->bytes,
				(unsigned long long)room);
	t->data = c->begin + begin + offset;
	return MOE_OK;
}

static enum moe_status alignment_of(const struct gguf_cursor *c, const struct gguf_entry *list,
				    size_t n, int64_t *alignment)
{
	const struct gguf_entry *e = moe_gguf_find_entry(list, n, "general.alignment");

	*alignment = DEFAULT_ALIGNMENT;
	if (!e)
		return MOE_OK;
	MOE_TRY(moe_gguf_entry_int(c->path, e, alignment));
	if (*alignment < 1 || *alignment > MAX_ALIGNMENT || (*alignment & (*alignment - 1)))
		return moe_fail(MOE_ERR_FORMAT,
				"%s: general.alignment is %lld; a power of two is expected",
				c->path, (long long)*alignment);
	return MOE_OK;
}

static enum moe_status take_tensors(struct moe_gguf *g, struct gguf_cursor *c, int file, uint64_t n,
				    int64_t alignment)
{
	uint64_t *offset = moe_alloc((size_t)n + 1, sizeof *offset);
	struct moe_gguf_tensor *grown = moe_realloc(g->tensor, g->n_tensors + (size_t)n + 1,
						    sizeof *grown),
			       *t;
	enum moe_status st = MOE_OK;
	size_t begin;

	if (grown)
		g->tensor = grown;
	if (!offset || !grown) {
		moe_free(offset);
		return no_memory(c->path);
	}
	t = g->tensor + g->n_tensors;
	for (uint64_t i = 0; i < n && st == MOE_OK; i++) {
		t[i] = (struct moe_gguf_tensor){ .file = file };
		st = take_tensor(c, &t[i], &offset[i]);
		g->n_tensors++; /* also one that failed: its name is freed */
	}
	begin = (size_t)(c->at - c->begin);
	begin = (begin + (size_t)alignment - 1) & ~((size_t)alignment - 1);
	if (st == MOE_OK && n && begin > (size_t)(c->end - c->begin))
		st = moe_gguf_cut(c, "the header");
	for (uint64_t i = 0; i < n && st == MOE_OK; i++)
		st = place_tensor(c, &t[i], offset[i], (uint64_t)alignment, begin);
	moe_free(offset);
	return st;
}

/* ---- a file ---- */

static enum moe_status take_header(struct gguf_cursor *c, uint64_t *tensors, uint64_t *keys)
{
	char magic[4] = "";
	uint32_t version = 0;
	uint64_t left;

	MOE_TRY(moe_gguf_take(c, 4, "the header", magic));
	if (memcmp(magic, MAGIC, 4))
		return moe_fail(MOE_ERR_FORMAT,
				"%s: does not begin with \"GGUF\": it is no GGUF file", c->path);
	MOE_TRY(moe_gguf_take(c, 4, "the header", &version));
	if (version >= 1 << 16)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: a big-endian GGUF file: only little-endian ones can be read",
				c->path);
	if (version != 2 && version != 3)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: GGUF version %u cannot be read (known: 2, 3)", c->path,
				version);
	MOE_TRY(moe_gguf_take(c, 8, "the header", tensors));
	MOE_TRY(moe_gguf_take(c, 8, "the header", keys));
	left = (uint64_t)(c->end - c->at);
	if (*keys > left / KEY_BYTES || *tensors > left / ENTRY_BYTES)
		return moe_fail(
			MOE_ERR_FORMAT,
			"%s: %llu tensors and %llu keys, more than a file of %zu bytes can have",
			c->path, (unsigned long long)*tensors, (unsigned long long)*keys,
			(size_t)(c->end - c->begin));
	return MOE_OK;
}

static enum moe_status read_file(struct moe_gguf *g, int file)
{
	struct gguf_file *f = &g->file[file];
	struct gguf_cursor c = { .path = f->path };
	struct gguf_entry *list;
	uint64_t tensors = 0, keys = 0;
	int64_t alignment = DEFAULT_ALIGNMENT;
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_file_map(f->path, &f->map));
	c.at = c.begin = f->map.data ? f->map.data : (const unsigned char *)""; /* an empty file */
	c.end = c.begin + f->map.bytes;
	MOE_TRY(take_header(&c, &tensors, &keys));
	list = moe_calloc((size_t)keys + 1, sizeof *list);
	if (!list)
		return no_memory(f->path);
	for (uint64_t i = 0; i < keys && st == MOE_OK; i++)
		st = moe_gguf_take_entry(&c, &list[i]);
	if (st == MOE_OK)
		st = alignment_of(&c, list, (size_t)keys, &alignment);
	if (st == MOE_OK)
		st = take_tensors(g, &c, file, tensors, alignment);
	if (file) {
		moe_free(list);
	} else {
		g->entry = list;
		g->n_entries = st == MOE_OK ? (size_t)keys : 0;
	}
	return st;
}

/* ---- all files ---- */

static int compare_names(const void *a, const void *b)
{
	return strcmp((*(const struct moe_gguf_tensor *const *)a)->name,
		      (*(const struct moe_gguf_tensor *const *)b)->name);
}

static enum moe_status sort_names(struct moe_gguf *g)
{
	g->by_name = moe_alloc(g->n_tensors + 1, sizeof(void *));
	if (!g->by_name)
		return no_memory(g->path);
	for (size_t i = 0; i < g->n_tensors; i++)
		g->by_name[i] = &g->tensor[i];
	qsort(g->by_name, g->n_tensors, sizeof(void *), compare_names);
	for (size_t i = 1; i < g->n_tensors; i++)
		if (!strcmp(g->by_name[i - 1]->name, g->by_name[i]->name))
			return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' is given twice",
					g->file[g->by_name[i]->file].path, g->by_name[i]->name);
	return MOE_OK;
}

/* "-00001-of-00003.gguf": where it begins in path, else NULL. */
static const char *split_suffix(const char *path, int *number, int *of)
{
	size_t n = strlen(path), m = strlen("-00001-of-00001" SUFFIX);
	char again[64];

	if (n <= m || sscanf(path + n - m, "-%5d-of-%5d", number, of) != 2)
		return NULL;
	snprintf(again, sizeof again, "-%05d-of-%05d" SUFFIX, *number, *of);
	return strcmp(again, path + n - m) ? NULL : path + n - m;
}

static enum moe_status add_file(struct moe_gguf *g, char *path)
{
	if (!path)
		return no_memory(g->path);
	g->file[g->n_files++].path = path;
	return MOE_OK;
}

static enum moe_status choose_files(struct moe_gguf *g)
{
	int number = 1, of = 1;
	const char *suffix = split_suffix(g->path, &number, &of);

	if (suffix && (of < 1 || of > MAX_SPLITS || number < 1 || number > of))
		suffix = NULL;
	if (!suffix)
		of = 1;
	g->file = moe_calloc((size_t)of, sizeof *g->file);
	if (!g->file)
		return no_memory(g->path);
	if (!suffix)
		return add_file(g, moe_strdup(g->path));
	for (int i = 1; i <= of; i++) {
		char *path = moe_format("%.*s-%05d-of-%05d" SUFFIX, (int)(suffix - g->path),
					g->path, i, of);

		MOE_TRY(add_file(g, path));
		if (!moe_path_exists(path))
			return moe_fail(
				MOE_ERR_IO,
				"%s: is missing; %s is one of %d files that belong together", path,
				g->path, of);
	}
	return MOE_OK;
}

static enum moe_status check_split(const struct moe_gguf *g)
{
	int64_t n = 1, tensors = 0;
	bool found;

	MOE_TRY(moe_gguf_int(g, "split.count", &n, &found));
	if (found && n > 0 && n != g->n_files)
		return moe_fail(
			MOE_ERR_FORMAT,
			"%s: one of %lld files, %d found: they are NAME-00001-of-%05lld" SUFFIX
			" and so on, in one folder",
			g->path, (long long)n, g->n_files, (long long)n);
	MOE_TRY(moe_gguf_int(g, "split.tensors.count", &tensors, &found));
	if (found && tensors != (int64_t)g->n_tensors)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: the files have %zu tensors, split.tensors.count is %lld",
				g->path, g->n_tensors, (long long)tensors);
	return MOE_OK;
}

static enum moe_status open_all(struct moe_gguf *g)
{
	MOE_TRY(choose_files(g));
	for (int i = 0; i < g->n_files; i++)
		MOE_TRY(read_file(g, i));
	MOE_TRY(sort_names(g));
	return check_split(g);
}

bool moe_gguf_is(const char *path)
{
	size_t n = strlen(path), m = strlen(SUFFIX);
	struct moe_mapping map = { 0 };
	bool is = n > m && !strcmp(path + n - m, SUFFIX);

	if (moe_path_is_dir(path))
		return false;
	if (is || moe_file_map(path, &map) != MOE_OK)
		return is;
	is = map.bytes >= strlen(MAGIC) && !memcmp(map.data, MAGIC, strlen(MAGIC));
	moe_file_unmap(&map);
	return is;
}

enum moe_status moe_gguf_open(const char *path, struct moe_gguf **out)
{
	struct moe_gguf *g = moe_calloc(1, sizeof *g);
	enum moe_status st;

	*out = NULL;
	if (g)
		g->path = moe_strdup(path);
	if (!g || !g->path) {
		moe_free(g);
		return no_memory(path);
	}
	st = open_all(g);
	if (st == MOE_OK)
		*out = g;
	else
		moe_gguf_close(g);
	return st;
}

void moe_gguf_close(struct moe_gguf *g)
{
	if (!g)
		return;
	for (int i = 0; i < g->n_files; i++) {
		moe_file_unmap(&g->file[i].map);
		moe_free(g->file[i].path);
	}
	for (size_t i = 0; i < g->n_tensors; i++)
		moe_free((char *)(uintptr_t)g->tensor[i].name);
	moe_free(g->file);
	moe_free(g->tensor);
	moe_free(g->by_name);
	moe_free(g->entry);
	moe_free(g->path);
	moe_free(g);
}

enum moe_status moe_gguf_check_type(const struct moe_gguf *g, const struct moe_gguf_tensor *t)
{
	if (t->type)
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"%s: tensor '%s' has type %s (%u), which cannot be read (known: F32, F16, BF16, F64, Q8_0, Q4_0, Q4_1, "
			"Q4_K, Q6_K)",
			g->file[t->file].path, t->name, moe_gguf_type_name(t->type_number), t->type_number);
}

const char *moe_gguf_path(const struct moe_gguf *g)
{
	return g->path;
}

int moe_gguf_file_count(const struct moe_gguf *g)
{
	return g->n_files;
}

const char *moe_gguf_file_path(const struct moe_gguf *g, int file)
{
	return g->file[file].path;
}

struct moe_mapping moe_gguf_take_file(struct moe_gguf *g, int file)
{
	struct moe_mapping map = g->file[file].map;

	g->file[file].map = (struct moe_mapping){ 0 };
	return map;
}

size_t moe_gguf_count(const struct moe_gguf *g)
{
	return g->n_tensors;
}

const struct moe_gguf_tensor *moe_gguf_at(const struct moe_gguf *g, size_t i)
{
	return &g->tensor[i];
}

const struct moe_gguf_tensor *moe_gguf_find(const struct moe_gguf *g, const char *name)
{
	const struct moe_gguf_tensor key = { .name = name }, *at = &key;
	const struct moe_gguf_tensor **found =
		bsearch(&at, g->by_name, g->n_tensors, sizeof(void *), compare_names);

	return found ? *found : NULL;
}
