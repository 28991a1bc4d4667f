/* SPDX-License-Identifier: Apache-2.0 */
#include "model/merge.h"
#include "model/adapters/adapter_form.h"
#include "model/file.h"
#include "model/merge_shards.h"
#include "model/staging.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define COPY_BYTES ((size_t)4 << 20)

/* ---- other files ---- */

/* Weights that are written anew; the index only where shards are split. */
static bool is_ours(const struct moe_merge_shards *m, const char *path)
{
	for (int i = 0; i < moe_safetensors_file_count(m->base); i++)
		if (!strcmp(moe_safetensors_file_path(m->base, i), path))
			return true;
	return m->split && !strcmp(strrchr(path, '/') + 1, MOE_INDEX_NAME);
}

static enum moe_status copy_bytes(struct moe_merge_shards *m, int fd, const char *from,
				  struct moe_file_writer *w)
{
	char *buf = moe_alloc(COPY_BYTES, 1);
	enum moe_status status = MOE_OK;
	ssize_t n = 1;

	if (!buf)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", from);
	while (status == MOE_OK && n > 0) {
		n = read(fd, buf, COPY_BYTES);
		if (n < 0 && errno == EINTR) {
			n = 1;
			continue;
		}
		if (n < 0)
			status = moe_fail(MOE_ERR_IO, "%s: cannot read: %s", from, strerror(errno));
		else
			status = moe_file_append(w, buf, (size_t)n);
		if (status == MOE_OK && n > 0)
			status = moe_merge_advance(m, from, n);
	}
	moe_free(buf);
	return status;
}

static enum moe_status copy_file(struct moe_merge_shards *m, const char *from, const char *to)
{
	struct moe_file_writer w;
	enum moe_status status;
	struct stat st;
	int fd = open(from, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return moe_fail(MOE_ERR_IO, "%s: cannot open: %s", from, strerror(errno));
	status = moe_file_begin(&w, to);
	if (status == MOE_OK)
		status = copy_bytes(m, fd, from, &w);
	if (status == MOE_OK && fstat(fd, &st) == 0)
		fchmod(w.fd, st.st_mode & 0777);
	if (status == MOE_OK)
		status = moe_file_commit(&w);
	moe_file_abort(&w);
	close(fd);
	return status;
}

/* Every file of dir and its folders, but hidden ones; copy false: only counts their bytes. */
static enum moe_status copy_others(struct moe_merge_shards *m, const char *dir, const char *to,
				   bool copy, int64_t *bytes)
{
	enum moe_status status = MOE_OK;
	struct dirent *e;
	DIR *d = opendir(dir);

	if (!d)
		return moe_fail(MOE_ERR_IO, "%s: cannot list the folder: %s", dir, strerror(errno));
	if (copy)
		status = moe_dir_make(to);
	while (status == MOE_OK && (e = readdir(d))) {
		char *from = moe_path_join(dir, e->d_name), *into = moe_path_join(to, e->d_name);
		struct stat st;

		if (!from || !into)
			status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
		else if (e->d_name[0] == '.' || stat(from, &st) != 0 || is_ours(m, from))
			; /* a link to nothing is no file */
		else if (S_ISDIR(st.st_mode))
			status = copy_others(m, from, into, copy, bytes);
		else if (S_ISREG(st.st_mode) && copy)
			status = copy_file(m, from, into);
		else if (S_ISREG(st.st_mode))
			*bytes += st.st_size;
		moe_free(from);
		moe_free(into);
	}
	closedir(d);
	return status;
}

/* ---- all of it ---- */

static enum moe_status check_paths(const struct moe_merge_params *p)
{
	char *model, *output;
	bool inside;
	size_t n;

	if (!moe_path_is_dir(p->model))
		return moe_fail(MOE_ERR_IO, "%s: no such folder", p->model);
	model = realpath(p->model, NULL);
	output = realpath(p->output_dir, NULL);
	n = model ? strlen(model) : 0;
	inside = model && output && !strncmp(output, model, n) && (!output[n] || output[n] == '/');
	free(model);
	free(output);
	return inside ? moe_fail(MOE_ERR_ARG,
				 "%s: lies in the base model's folder, which is only read",
				 p->output_dir)
		      : MOE_OK;
}

static enum moe_status check_room(const struct moe_merge_shards *m, const char *path)
{
	struct statvfs fs;
	double room;

	if (statvfs(path, &fs) != 0)
		return MOE_OK; /* writing will tell */
	room = (double)fs.f_bavail * (double)fs.f_frsize;
	if (room >= (double)m->total)
		return MOE_OK;
	return moe_fail(
		MOE_ERR_NOFIT,
		"%s: the merged model takes %.2f GiB, the file system has %.2f GiB left: make "
		"room, or name another output folder",
		path, (double)m->total / 0x1p30, room / 0x1p30);
}

static enum moe_status fill_folder(struct moe_merge_shards *m, const struct moe_merge_params *p,
				   const char *path)
{
	int64_t others = 0;

	MOE_TRY(moe_merge_plan(m, p->max_shard_bytes));
	MOE_TRY(copy_others(m, p->model, path, false, &others));
	m->total += others;
	MOE_TRY(check_room(m, path));
	MOE_TRY(moe_merge_write_shards(m, path));
	return copy_others(m, p->model, path, true, &others);
}

static enum moe_status open_inputs(struct moe_merge_shards *m, const struct moe_merge_params *p)
{
	struct moe_arch *arch = moe_calloc(1, sizeof *arch);

	m->arch = arch;
	if (!arch)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	MOE_TRY(moe_arch_load(p->model, arch));
	MOE_TRY(moe_adapter_read(p->adapter, &m->adapter));
	if (moe_adapter_check(m->adapter, arch) != MOE_OK)
		return moe_fail_in(MOE_ERR_FORMAT, "adapter %s, model %s", p->adapter, p->model);
	return moe_safetensors_open(p->model, &m->base);
}

enum moe_status moe_merge_run(const struct moe_merge_params *p, struct moe_merge_result *result)
{
	struct moe_merge_shards m = { .progress = p->progress, .user = p->user };
	struct moe_staging staging = { 0 };
	double start = moe_now();
	enum moe_status status = check_paths(p);

	if (status == MOE_OK)
		status = open_inputs(&m, p);
	if (status == MOE_OK)
		status = moe_staging_begin(p->output_dir, &staging);
	if (status == MOE_OK)
		status = fill_folder(&m, p, staging.path);
	if (status == MOE_OK)
		status = moe_staging_commit(&staging);
	moe_staging_abort(&staging);
	if (status == MOE_OK) {
		result->tensors = (int64_t)moe_safetensors_count(m.base);
		result->merged = m.merged;
		result->bytes = m.total;
		result->shards = m.n_shards;
		result->seconds = moe_now() - start;
	}
	moe_merge_shards_free(&m);
	return status;
}
