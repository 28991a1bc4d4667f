/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/safetensors.h"
#include "model/readers/gguf.h"
#include "model/readers/kt.h"
#include "model/readers/safetensors_header.h"
#include "model/readers/safetensors_own.h"
#include "model/readers/safetensors_table.h"

#include <errno.h>
#include <dirent.h>

#define SUFFIX ".safetensors"
/* Shards are found by linear search: a hostile index must not make that slow. */
#define MAX_SHARDS 4096

static enum moe_status no_memory(const struct moe_safetensors *st)
{
	return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", st->path);
}

/* Adds the tensors of file's header to the table, or fills the entries that the index made. */
static enum moe_status merge_file(struct moe_safetensors *st, int file,
				  const struct moe_st_header *h)
{
	const char *path = st->files[file].path;

	for (size_t i = 0; i < h->count; i++) {
		struct moe_st_tensor t = h->list[i], *known = moe_st_known(st, t.name);

		t.file = file;
		if (!known) {
			MOE_TRY(moe_st_append(st, &t));
			continue;
		}
		if (known->file != file) {
			if (st->index)
				continue; /* the index names the other file */
			return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%.200s' is also in %s", path,
					t.name, st->files[known->file].path);
		}
		if (known->data)
			return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%.200s' is given twice", path,
					t.name);
		t.name = known->name;
		*known = t;
	}
	return MOE_OK;
}

static enum moe_status load_file(struct moe_safetensors *st, int file)
{
	struct st_file *f = &st->files[file];
	struct moe_st_header h;
	enum moe_status status;

	MOE_TRY(moe_file_map(f->path, &f->map));
	MOE_TRY(moe_st_header_parse(f->path, &f->map, &h));
	status = merge_file(st, file, &h);
	f->root = h.root;
	f->metadata = h.metadata;
	h.root = NULL;
	moe_st_header_free(&h);
	return status;
}

/* The number of the shard `name` beside the index, added if new. */
static enum moe_status shard_of(struct moe_safetensors *st, const char *dir, const char *name,
				int *out)
{
	size_t skip = strlen(dir) + 1;

	if (!name[0] || name[0] == '.' || strchr(name, '/'))
		return moe_fail(MOE_ERR_FORMAT,
				"%s/" MOE_INDEX_NAME ": shard '%.200s' is not a plain "
				"file name",
				dir, name);
	/* names come grouped by shard: look from the newest */
	for (int i = st->n_files - 1; i >= 0; i--)
		if (!strcmp(st->files[i].path + skip, name)) {
			*out = i;
			return MOE_OK;
		}
	if (st->n_files == MAX_SHARDS)
		return moe_fail(MOE_ERR_FORMAT, "%s/" MOE_INDEX_NAME ": more than %d shards", dir,
				MAX_SHARDS);
	*out = st->n_files;
	return moe_st_add_file(st, moe_format("%s/%s", dir, name));
}

static enum moe_status read_index(struct moe_safetensors *st, const char *dir, const char *path)
{
	const cJSON *map, *c;

	MOE_TRY(moe_json_read(path, &st->index));
	map = moe_json_get(st->index, "weight_map");
	if (!cJSON_IsObject(map) || !map->child)
		return moe_fail(MOE_ERR_FORMAT, "%s: weight_map is missing or empty", path);
	cJSON_ArrayForEach(c, map)
	{
		struct moe_st_tensor t = { .name = c->string };

		if (!cJSON_IsString(c))
			return moe_fail(MOE_ERR_FORMAT, "%s: shard of '%.200s' is not a string",
					path, c->string);
		if (moe_st_known(st, t.name))
			return moe_fail(MOE_ERR_FORMAT, "%s: '%.200s' is given twice", path,
					t.name);
		MOE_TRY(shard_of(st, dir, c->valuestring, &t.file));
		MOE_TRY(moe_st_append(st, &t));
	}
	return MOE_OK;
}

/* model-00001.safetensors and those that follow. */
static enum moe_status add_numbered_files(struct moe_safetensors *st, const char *dir)
{
	for (int i = 1; i <= MAX_SHARDS; i++) {
		char *path = moe_format("%s/model-%05d" SUFFIX, dir, i);

		if (path && !moe_path_exists(path)) {
			moe_free(path);
			return MOE_OK;
		}
		MOE_TRY(moe_st_add_file(st, path));
	}
	return MOE_OK;
}

/* The only *.safetensors of dir. */
static enum moe_status add_lone_file(struct moe_safetensors *st, const char *dir)
{
	char *found = NULL;
	struct dirent *e;
	int n = 0;
	DIR *d = opendir(dir);

	if (!d)
		return moe_fail(MOE_ERR_IO, "%s: cannot list the directory: %s", dir, strerror(errno));
	while ((e = readdir(d))) {
		size_t len = strlen(e->d_name);

		if (e->d_name[0] == '.' || len < sizeof SUFFIX ||
		    strcmp(e->d_name + len - (sizeof SUFFIX - 1), SUFFIX) != 0)
			continue;
		if (n++ == 0)
			found = moe_format("%s/%s", dir, e->d_name);
	}
	closedir(d);
	if (n == 1)
		return moe_st_add_file(st, found);
	moe_free(found);
	MOE_TRY(add_numbered_files(st, dir));
	if (st->n_files == n && n)
		return MOE_OK;
	return moe_fail(n ? MOE_ERR_FORMAT : MOE_ERR_IO,
			n ? "%s: %d *.safetensors files but no " MOE_INDEX_NAME
			  : "%s: no model.safetensors, no " MOE_INDEX_NAME " (%d *.safetensors files)",
			dir, n);
}

static enum moe_status choose_files(struct moe_safetensors *st)
{
	enum moe_status status;
	char *single = NULL, *index = NULL, *dir = NULL;
	size_t n = strlen(st->path);

	if (!moe_path_is_dir(st->path))
		return moe_st_add_file(st, moe_strdup(st->path));
	dir = moe_strdup(st->path);
	while (dir && n > 1 && dir[n - 1] == '/')
		dir[--n] = 0;
	single = dir ? moe_format("%s/model" SUFFIX, dir) : NULL;
	index = dir ? moe_format("%s/" MOE_INDEX_NAME, dir) : NULL;
	if (!single || !index) {
		status = no_memory(st);
	} else if (moe_path_exists(single)) {
		status = moe_st_add_file(st, single);
		single = NULL;
	} else if (moe_path_exists(index)) {
		status = read_index(st, dir, index);
	} else {
		status = add_lone_file(st, dir);
	}
	moe_free(dir);
	moe_free(single);
	moe_free(index);
	return status;
}

static enum moe_status load_gguf(struct moe_safetensors *st, bool experts_only)
{
	struct moe_gguf *g;
	enum moe_status status;

	MOE_TRY(moe_gguf_open(st->path, &g));
	status = moe_gguf_fill(g, experts_only, st);
	moe_gguf_close(g);
	return status;
}

enum how {
	WHOLE,
	EXPERTS, /* of a GGUF nothing else */
	RAW,	 /* a folder of kt-kernel's under its own names */
};

static enum moe_status load(struct moe_safetensors *st, enum how how)
{
	bool kt = how != RAW && moe_path_is_dir(st->path);
	enum moe_status status;

	if (moe_gguf_is(st->path))
		return load_gguf(st, how == EXPERTS);
	status = choose_files(st);
	if (status == MOE_ERR_IO && kt && moe_kt_is(st->path))
		return moe_kt_fill(st->path, st);
	MOE_TRY(status);
	for (int i = 0; i < st->n_files; i++)
		MOE_TRY(load_file(st, i));
	for (size_t i = 0; i < st->count; i++) {
		const struct moe_st_tensor *t = &st->tensors[i];

		if (!t->data)
			return moe_fail(MOE_ERR_FORMAT,
					"%s: tensor '%.200s' of the index is not in it",
					st->files[t->file].path, t->name);
	}
	return kt && moe_kt_is_merged(st) ? moe_kt_fill(st->path, st) : MOE_OK;
}

static enum moe_status open_path(const char *path, enum how how, struct moe_safetensors **out)
{
	struct moe_safetensors *st = moe_calloc(1, sizeof *st);
	enum moe_status status;

	if (st)
		st->path = moe_strdup(path);
	if (!st || !st->path) {
		moe_free(st);
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
	}
	status = load(st, how);
	if (status != MOE_OK) {
		moe_safetensors_close(st);
		return status;
	}
	*out = st;
	return MOE_OK;
}

enum moe_status moe_safetensors_open(const char *path, struct moe_safetensors **out)
{
	return open_path(path, WHOLE, out);
}

enum moe_status moe_safetensors_open_experts(const char *path, struct moe_safetensors **out)
{
	return open_path(path, EXPERTS, out);
}

enum moe_status moe_st_table_open(const char *path, struct moe_safetensors **out)
{
	return open_path(path, RAW, out);
}
