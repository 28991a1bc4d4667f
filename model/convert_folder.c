/* SPDX-License-Identifier: Apache-2.0 */
#include "model/convert_folder.h"
#include "model/convert_kt.h"
#include "model/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define STATE "convert.json"

static enum moe_status no_memory(void)
{
	return moe_fail(MOE_ERR_NOMEM, "out of memory");
}

/* ---- what a conversion is made from ---- */

static bool add_inputs(const struct moe_convert_plan *plan, cJSON *o)
{
	cJSON *list = cJSON_AddArrayToObject(o, "inputs");

	for (int i = 0; list && i < moe_safetensors_file_count(plan->st); i++) {
		const char *path = moe_safetensors_file_path(plan->st, i);
		cJSON *file = cJSON_CreateObject();
		char *full = realpath(path, NULL);
		struct stat st;
		bool good = full && stat(path, &st) == 0 && file &&
			    cJSON_AddStringToObject(file, "file", full) &&
			    cJSON_AddNumberToObject(file, "bytes", (double)st.st_size) &&
			    cJSON_AddNumberToObject(file, "changed", (double)st.st_mtim.tv_sec) &&
			    cJSON_AddNumberToObject(file, "changed_ns", (double)st.st_mtim.tv_nsec);

		free(full);
		if (!good) {
			cJSON_Delete(file);
			return false;
		}
		cJSON_AddItemToArray(list, file);
	}
	return list != NULL;
}

static cJSON *describe(const struct moe_convert_model_params *p, const char *note,
		       const struct moe_convert_plan *plan)
{
	cJSON *o = cJSON_CreateObject();

	if (o && cJSON_AddStringToObject(o, "format", "moesaic-convert-1") &&
	    cJSON_AddStringToObject(o, "weights", p->weights) &&
	    cJSON_AddStringToObject(o, "note", note ? note : "") &&
	    cJSON_AddStringToObject(o, "layers", plan->target.linear ? "linear" : "experts") &&
	    cJSON_AddNumberToObject(o, "max_shard_bytes", (double)p->max_shard_bytes) &&
	    (!plan->kt || (cJSON_AddNumberToObject(o, "kt_parts", plan->kt->p.parts) &&
			   cJSON_AddBoolToObject(o, "kt_backward", plan->kt->p.backward))) &&
	    add_inputs(plan, o))
		return o;
	cJSON_Delete(o);
	return NULL;
}

/* ---- the folder ---- */

static enum moe_status make_path(const char *final, struct moe_convert_folder *f)
{
	char *slash;
	size_t n;

	MOE_TRY(moe_dir_check_new(final));
	f->final = moe_strdup(final);
	if (!f->final)
		return no_memory();
	for (n = strlen(final); n > 1 && f->final[n - 1] == '/'; n--)
		f->final[n - 1] = 0;
	slash = strrchr(f->final, '/');
	if (!*f->final || !strcmp(slash ? slash : f->final, "/") || !strcmp(f->final, ".") ||
	    !strcmp(f->final, ".."))
		return moe_fail(MOE_ERR_ARG, "'%s' is not the name of a folder to make", final);
	f->path = moe_format("%s.partial", f->final);
	if (!f->path)
		return no_memory();
	f->fresh = !moe_path_exists(f->path);
	MOE_TRY(moe_dir_make(f->path));
	f->fd = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (f->fd < 0)
		return moe_fail(MOE_ERR_IO, "%s: cannot open: %s", f->path, strerror(errno));
	if (flock(f->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
		return moe_fail(MOE_ERR_BUSY, "%s: another process is converting into it", f->path);
	return MOE_OK;
}

static const cJSON *noted(const struct moe_convert_folder *f, const char *name)
{
	const cJSON *c, *list = moe_json_get(f->state, "done");

	cJSON_ArrayForEach(c, list)
	{
		const cJSON *file = moe_json_get(c, "file");

		if (cJSON_IsString(file) && !strcmp(file->valuestring, name))
			return c;
	}
	return NULL;
}

/* Shards that are noted and have the bytes they had. */
static enum moe_status verify(struct moe_convert_folder *f, struct moe_convert_plan *plan)
{
	for (int i = 0; i < plan->n_shards; i++) {
		struct moe_convert_shard *s = &plan->shard[i];
		const cJSON *note = noted(f, s->name), *sum = moe_json_get(note, "sha256");
		char *path = moe_path_join(f->path, s->name);
		enum moe_status status = path ? MOE_OK : no_memory();

		if (path && note && moe_path_exists(path))
			status = plan->kt ? moe_convert_kt_sum(plan, i, f->path) : moe_file_sha256(path, s->sha256);
		s->done = status == MOE_OK && cJSON_IsString(sum) && *s->sha256 &&
			  !strcmp(sum->valuestring, s->sha256);
		if (path && note && !s->done && status == MOE_OK)
			moe_log(MOE_LOG_WARNING, "%s: its checksum has changed: it is made again",
				path);
		moe_free(path);
		MOE_TRY(status);
	}
	return MOE_OK;
}

/* Removes all but the shards that are done. */
static enum moe_status clean(struct moe_convert_folder *f, const struct moe_convert_plan *plan)
{
	enum moe_status status = MOE_OK;
	struct dirent *e;
	DIR *d = opendir(f->path);

	if (!d)
		return moe_fail(MOE_ERR_IO, "%s: cannot list the folder: %s", f->path,
				strerror(errno));
	while (status == MOE_OK && (e = readdir(d))) {
		bool keep = !strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") ||
			    !strcmp(e->d_name, STATE);
		char *path;

		for (int i = 0; i < plan->n_shards && !keep; i++)
			keep = plan->shard[i].done && !strcmp(plan->shard[i].name, e->d_name);
		if (keep)
			continue;
		path = moe_path_join(f->path, e->d_name);
		status = path ? moe_tree_remove(path) : no_memory();
		moe_free(path);
	}
	closedir(d);
	return status;
}

static enum moe_status save(struct moe_convert_folder *f)
{
	char *path = moe_path_join(f->path, STATE);
	enum moe_status status = path ? moe_json_write(path, f->state) : no_memory();

	moe_free(path);
	return status;
}

/* What an earlier call left, if it did the same. */
static enum moe_status take_up(struct moe_convert_folder *f, struct moe_convert_plan *plan)
{
	char *path = moe_path_join(f->path, STATE);
	cJSON *old = NULL, *done;
	bool same;

	if (!path)
		return no_memory();
	if (!moe_path_exists(path)) { /* killed before it was written, or a stranger's */
		moe_free(path);
		if (!moe_dir_is_empty(f->path) && !f->fresh)
			return moe_fail(MOE_ERR_ARG,
					"%s: exists, and no conversion made it: remove it",
					f->path);
		return MOE_OK;
	}
	if (moe_json_read(path, &old) != MOE_OK) {
		moe_free(path);
		return moe_fail_in(MOE_ERR_FORMAT, "remove %s", f->path);
	}
	moe_free(path);
	done = cJSON_DetachItemFromObjectCaseSensitive(old, "done");
	same = cJSON_Compare(old, f->state, true);
	cJSON_Delete(old);
	if (!same) {
		cJSON_Delete(done);
		return moe_fail(MOE_ERR_ARG,
				"%s: a conversion with other input or flags was begun there: go on "
				"with that one, or remove the folder",
				f->path);
	}
	if (cJSON_IsArray(done))
		cJSON_AddItemToObject(f->state, "done", done);
	else
		cJSON_Delete(done);
	return verify(f, plan);
}

enum moe_status moe_convert_folder_open(const struct moe_convert_model_params *p, const char *note,
					struct moe_convert_plan *plan, struct moe_convert_folder *f)
{
	*f = (struct moe_convert_folder){ .fd = -1 };
	f->state = describe(p, note, plan);
	if (!f->state)
		return no_memory();
	MOE_TRY(make_path(p->out, f));
	MOE_TRY(take_up(f, plan));
	MOE_TRY(clean(f, plan));
	if (!moe_json_get(f->state, "done") && !cJSON_AddArrayToObject(f->state, "done"))
		return no_memory();
	return save(f);
}

enum moe_status moe_convert_folder_note(struct moe_convert_folder *f,
					const struct moe_convert_shard *s)
{
	cJSON *list = cJSON_GetObjectItemCaseSensitive(f->state, "done"), *o = cJSON_CreateObject();

	for (int i = 0; i < cJSON_GetArraySize(list); i++) {
		const cJSON *file = moe_json_get(cJSON_GetArrayItem(list, i), "file");

		if (cJSON_IsString(file) && !strcmp(file->valuestring, s->name))
			cJSON_DeleteItemFromArray(list, i--);
	}
	if (!o || !cJSON_AddStringToObject(o, "file", s->name) ||
	    !cJSON_AddStringToObject(o, "sha256", s->sha256) || !cJSON_AddItemToArray(list, o)) {
		cJSON_Delete(o);
		return no_memory();
	}
	return save(f);
}

enum moe_status moe_convert_folder_commit(struct moe_convert_folder *f)
{
	char *state = moe_path_join(f->final, STATE), *parent = moe_strdup(f->final), *slash;
	enum moe_status status = state && parent ? moe_tree_sync(f->path) : no_memory();

	if (status == MOE_OK && rename(f->path, f->final) != 0)
		status = moe_fail(MOE_ERR_IO, "%s: cannot be given its name %s: %s", f->path,
				  f->final, strerror(errno));
	if (status == MOE_OK) {
		unlink(state); /* a note that does no harm */
		slash = strrchr(parent, '/');
		if (slash)
			slash[slash == parent] = 0;
		status = moe_dir_sync(slash ? parent : ".");
		moe_free(f->path);
		f->path = NULL;
	}
	moe_free(state);
	moe_free(parent);
	return status;
}

void moe_convert_folder_close(struct moe_convert_folder *f, bool keep)
{
	if (f->path && f->fd >= 0 && !keep) {
		char *kept = moe_strdup(moe_last_error()); /* what went wrong before */

		moe_tree_remove(f->path);
		if (kept && *kept)
			moe_fail(MOE_OK, "%s", kept);
		moe_free(kept);
	}
	if (f->fd >= 0)
		close(f->fd);
	moe_free(f->path);
	moe_free(f->final);
	cJSON_Delete(f->state);
	*f = (struct moe_convert_folder){ .fd = -1 };
}
