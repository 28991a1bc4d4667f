/* SPDX-License-Identifier: Apache-2.0 */
#include "model/staging.h"
#include "model/file.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define MARK ".partial-"

/* "dir/name" into its two parts, name without slashes at the end. */
static enum moe_status split(const char *final, char **dir, char **name)
{
	size_t n = strlen(final);
	const char *slash;

	while (n > 1 && final[n - 1] == '/')
		n--;
	*name = moe_strdup(final);
	*dir = moe_strdup(final);
	if (!*name || !*dir)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", final);
	(*name)[n] = (*dir)[n] = 0;
	slash = strrchr(*dir, '/');
	if (!slash) {
		strcpy(*dir, n ? "." : "");
	} else {
		size_t at = (size_t)(slash - *dir);

		memmove(*name, *name + at + 1, n - at);
		(*dir)[at ? at : 1] = 0;
	}
	if (!n || !**name || !strcmp(*name, ".") || !strcmp(*name, ".."))
		return moe_fail(MOE_ERR_ARG, "'%s' is not the name of a folder to make", final);
	return MOE_OK;
}

/* Removes what processes that are gone left of the same folder. */
static void clean(const char *dir, const char *name)
{
	size_t n = strlen(name);
	struct dirent *e;
	DIR *d = opendir(dir);

	while (d && (e = readdir(d))) {
		char *end, *path;
		long pid;

		if (strncmp(e->d_name, name, n) || strncmp(e->d_name + n, MARK, strlen(MARK)))
			continue;
		pid = strtol(e->d_name + n + strlen(MARK), &end, 10);
		if (*end || pid < 1 || kill((pid_t)pid, 0) == 0 || errno != ESRCH)
			continue;
		path = moe_path_join(dir, e->d_name);
		if (path && moe_tree_remove(path) == MOE_OK)
			moe_log(MOE_LOG_INFO, "removed %s, which a killed process left", path);
		moe_free(path);
	}
	if (d)
		closedir(d);
}

static enum moe_status make(const char *final, struct moe_staging *s, const char *dir,
			    const char *name)
{
	char *own;

	MOE_TRY(moe_dir_check_new(final));
	MOE_TRY(moe_dir_make(dir));
	clean(dir, name);
	own = moe_format("%s" MARK "%ld", name, (long)getpid());
	s->final = moe_path_join(dir, name);
	s->path = own ? moe_path_join(dir, own) : NULL;
	moe_free(own);
	if (!s->final || !s->path)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", final);
	if (mkdir(s->path, 0777) != 0)
		return moe_fail(MOE_ERR_IO, "%s: cannot create the folder: %s", s->path,
				strerror(errno));
	return MOE_OK;
}

enum moe_status moe_staging_begin(const char *final, struct moe_staging *s)
{
	char *dir = NULL, *name = NULL;
	enum moe_status status;

	*s = (struct moe_staging){ 0 };
	status = split(final, &dir, &name);
	if (status == MOE_OK)
		status = make(final, s, dir, name);
	moe_free(dir);
	moe_free(name);
	if (status != MOE_OK) {
		moe_free(s->final);
		moe_free(s->path);
		*s = (struct moe_staging){ 0 };
	}
	return status;
}

enum moe_status moe_staging_commit(struct moe_staging *s)
{
	enum moe_status status = moe_tree_sync(s->path);
	char *slash;

	if (status == MOE_OK && rename(s->path, s->final) != 0)
		status = moe_fail(MOE_ERR_IO, "%s: cannot be given its name %s: %s", s->path,
				  s->final, strerror(errno));
	if (status == MOE_OK) {
		moe_free(s->path);
		s->path = NULL;
		slash = strrchr(s->final, '/');
		if (slash) {
			slash[slash == s->final] = 0;
			status = moe_dir_sync(s->final);
		}
	}
	moe_staging_abort(s);
	return status;
}

void moe_staging_abort(struct moe_staging *s)
{
	if (s->path) {
		char kept[512];

		/* removing may fail too: what went wrong before is what is said */
		snprintf(kept, sizeof kept, "%s", moe_last_error());
		moe_tree_remove(s->path);
		if (*kept)
			moe_fail(MOE_OK, "%s", kept);
	}
	moe_free(s->path);
	moe_free(s->final);
	*s = (struct moe_staging){ 0 };
}
