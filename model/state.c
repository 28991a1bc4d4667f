/* SPDX-License-Identifier: Apache-2.0 */
#include "model/state.h"
#include "model/file.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PREFIX "checkpoint-"
#define TEMP_MARK ".tmp-" /* checkpoint-N.tmp-PID: being written */
#define OLD_MARK ".old-"  /* checkpoint-N.old-PID: complete, being replaced */

static enum moe_status no_memory(const char *path)
{
	return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
}

static enum moe_status rename_dir(const char *from, const char *to)
{
	if (rename(from, to) != 0)
		return moe_fail(MOE_ERR_IO, "%s: cannot rename to %s: %s", from, to,
				strerror(errno));
	return MOE_OK;
}

static void finish(struct moe_state_dir *dir)
{
	moe_free(dir->output);
	moe_free(dir->path);
	moe_free(dir->final);
	*dir = (struct moe_state_dir){ 0 };
}

enum moe_status moe_state_begin(const char *output, int64_t step, struct moe_state_dir *dir)
{
	enum moe_status status;

	if (step < 0)
		return moe_fail(MOE_ERR_ARG, "step %lld is negative", (long long)step);
	*dir = (struct moe_state_dir){ .step = step };
	dir->output = moe_strdup(output);
	dir->final = moe_format("%s/" PREFIX "%lld", output, (long long)step);
	dir->path =
		dir->final ? moe_format("%s" TEMP_MARK "%ld", dir->final, (long)getpid()) : NULL;
	if (!dir->output || !dir->path) {
		finish(dir);
		return no_memory(output);
	}
	status = moe_tree_remove(dir->path); /* left by a process of the same number */
	if (status == MOE_OK)
		status = moe_dir_make(dir->path);
	if (status != MOE_OK)
		finish(dir);
	return status;
}

/*
 * An existing directory cannot be replaced by rename: it steps aside first. A kill between the two
 * renames leaves it whole under the old mark, from which moe_state_clean puts it back.
 */
static enum moe_status replace_final(const struct moe_state_dir *dir)
{
	enum moe_status status;
	char *aside;

	if (!moe_path_exists(dir->final)) {
		MOE_TRY(rename_dir(dir->path, dir->final));
		return moe_dir_sync(dir->output);
	}
	aside = moe_format("%s" OLD_MARK "%ld", dir->final, (long)getpid());
	if (!aside)
		return no_memory(dir->final);
	MOE_TRY_GOTO(moe_tree_remove(aside), status, done);
	MOE_TRY_GOTO(rename_dir(dir->final, aside), status, done);
	status = rename_dir(dir->path, dir->final);
	if (status != MOE_OK) {
		if (rename(aside, dir->final) != 0)
			moe_log(MOE_LOG_ERROR, "%s stays as %s: %s", dir->final, aside, strerror(errno));
		goto done;
	}
	MOE_TRY_GOTO(moe_dir_sync(dir->output), status, done);
	status = moe_tree_remove(aside);
done:
	moe_free(aside);
	return status;
}

enum moe_status moe_state_commit(struct moe_state_dir *dir)
{
	enum moe_status status = moe_tree_sync(dir->path);

	if (status == MOE_OK)
		status = replace_final(dir);
	if (status != MOE_OK)
		moe_state_abort(dir);
	finish(dir);
	return status;
}

void moe_state_abort(struct moe_state_dir *dir)
{
	/* the caller's error text is worth more than a failure to clean up */
	if (dir->path && moe_path_exists(dir->path)) {
		char *text = moe_strdup(moe_last_error());

		if (moe_tree_remove(dir->path) != MOE_OK)
			moe_log(MOE_LOG_WARNING, "%s", moe_last_error());
		moe_fail(MOE_OK, "%s", text ? text : "");
		moe_free(text);
	}
	finish(dir);
}

/* The N of "checkpoint-N" followed by what *rest gets; -1 for other names. */
static int64_t step_of(const char *name, const char **rest)
{
	char *end;
	long long n;

	if (strncmp(name, PREFIX, sizeof PREFIX - 1) != 0)
		return -1;
	name += sizeof PREFIX - 1;
	if (*name < '0' || *name > '9' || (name[0] == '0' && name[1] >= '0' && name[1] <= '9'))
		return -1;
	errno = 0;
	n = strtoll(name, &end, 10);
	*rest = end;
	return errno ? -1 : n;
}

struct step_list {
	int64_t *steps;
	size_t count;
};

static int by_step(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return x < y ? -1 : x > y;
}

/* Steps of the directories named checkpoint-N, ascending; an absent output has none. */
static enum moe_status list_steps(const char *output, struct step_list *list)
{
	DIR *d = opendir(output);
	struct dirent *e;

	*list = (struct step_list){ 0 };
	if (!d)
		return errno == ENOENT ? MOE_OK
				       : moe_fail(MOE_ERR_IO, "%s: cannot list the directory: %s",
						  output, strerror(errno));
	while ((e = readdir(d))) {
		const char *rest = "";
		int64_t step = step_of(e->d_name, &rest), *p;

		if (step < 0 || *rest)
			continue;
		p = moe_realloc(list->steps, list->count + 1, sizeof *p);
		if (!p) {
			moe_free(list->steps);
			closedir(d);
			return no_memory(output);
		}
		list->steps = p;
		p[list->count++] = step;
	}
	closedir(d);
	if (list->count)
		qsort(list->steps, list->count, sizeof *list->steps, by_step);
	return MOE_OK;
}

enum moe_status moe_state_latest(const char *output, int64_t *step, char **path)
{
	enum moe_status status = MOE_OK;
	struct step_list list;

	*path = NULL;
	MOE_TRY(list_steps(output, &list));
	for (size_t i = list.count; i-- > 0;) {
		char *dir = moe_format("%s/" PREFIX "%lld", output, (long long)list.steps[i]);

		status = dir ? moe_state_check(dir, list.steps[i]) : no_memory(output);
		if (status == MOE_OK) {
			*step = list.steps[i];
			*path = dir;
			break;
		}
		moe_free(dir);
		if (status == MOE_ERR_NOMEM)
			break;
		moe_log(MOE_LOG_WARNING, "checkpoint-%lld is passed over: %s", (long long)list.steps[i],
			moe_last_error());
		status = MOE_OK;
	}
	moe_free(list.steps);
	return status;
}

/* NAME.tmp-PID-SERIAL, as moe_file_begin has them. */
static bool is_temporary(const char *name)
{
	const char *mark = NULL;
	int at = 0;

	for (const char *c = strstr(name, TEMP_MARK); c; c = strstr(c + 1, TEMP_MARK))
		mark = c;
	return mark && mark > name && sscanf(mark, TEMP_MARK "%*[0-9]-%*[0-9]%n", &at) == 0 && at &&
	       !mark[at];
}

static enum moe_status clean_entry(const char *output, const char *name)
{
	enum moe_status status = MOE_OK;
	const char *rest = "";
	char *path, *final;
	int64_t step = step_of(name, &rest);
	bool temp = !strncmp(rest, TEMP_MARK, sizeof TEMP_MARK - 1);

	if (step < 0 && is_temporary(name)) {
		path = moe_path_join(output, name);
		if (!path)
			status = no_memory(output);
		else if (!moe_path_is_dir(path))
			status = moe_tree_remove(path);
		moe_free(path);
		return status;
	}
	if (step < 0 || (!temp && strncmp(rest, OLD_MARK, sizeof OLD_MARK - 1) != 0))
		return MOE_OK;
	path = moe_path_join(output, name);
	final = moe_format("%s/" PREFIX "%lld", output, (long long)step);
	if (!path || !final)
		status = no_memory(output);
	else if (!temp && !moe_path_exists(final))
		status = rename_dir(path, final);
	else
		status = moe_tree_remove(path);
	moe_free(path);
	moe_free(final);
	return status;
}

enum moe_status moe_state_clean(const char *output)
{
	enum moe_status status = MOE_OK;
	struct dirent *e;
	DIR *d = opendir(output);

	if (!d)
		return errno == ENOENT ? MOE_OK
				       : moe_fail(MOE_ERR_IO, "%s: cannot list the directory: %s",
						  output, strerror(errno));
	while (status == MOE_OK && (e = readdir(d)))
		status = clean_entry(output, e->d_name);
	closedir(d);
	return status;
}

/* First to a name that nobody takes for a checkpoint: removal is not atomic. */
static enum moe_status remove_step(const char *output, int64_t step)
{
	char *dir = moe_format("%s/" PREFIX "%lld", output, (long long)step);
	char *temp = dir ? moe_format("%s" TEMP_MARK "%ld", dir, (long)getpid()) : NULL;
	enum moe_status status = temp ? moe_tree_remove(temp) : no_memory(output);

	if (status == MOE_OK)
		status = rename_dir(dir, temp);
	if (status == MOE_OK)
		status = moe_tree_remove(temp);
	moe_free(dir);
	moe_free(temp);
	return status;
}

enum moe_status moe_state_drop_after(const char *output, int64_t step)
{
	enum moe_status status = MOE_OK;
	struct step_list list;

	MOE_TRY(list_steps(output, &list));
	for (size_t i = 0; i < list.count && status == MOE_OK; i++)
		if (list.steps[i] > step)
			status = remove_step(output, list.steps[i]);
	moe_free(list.steps);
	return status;
}

static bool skip_nothing(const char *path, void *user)
{
	(void)path;
	(void)user;
	return false;
}

enum moe_status moe_state_bytes(const char *output, int64_t *bytes)
{
	const struct moe_folder_copy all = { .skip = skip_nothing };
	enum moe_status status = MOE_OK;
	struct step_list list;

	*bytes = 0;
	MOE_TRY(list_steps(output, &list));
	for (size_t i = 0; i < list.count && status == MOE_OK; i++) {
		char *dir = moe_format("%s/" PREFIX "%lld", output, (long long)list.steps[i]);

		status = dir ? moe_folder_bytes(&all, dir, bytes) : no_memory(output);
		moe_free(dir);
	}
	moe_free(list.steps);
	return status;
}

enum moe_status moe_state_prune(const char *output, int keep, int64_t best)
{
	enum moe_status status = MOE_OK;
	struct step_list list;
	size_t left;

	if (keep <= 0)
		return MOE_OK;
	MOE_TRY(list_steps(output, &list));
	left = list.count;
	for (size_t i = 0; i + 1 < list.count && left > (size_t)keep && status == MOE_OK; i++) {
		if (list.steps[i] == best)
			continue;
		status = remove_step(output, list.steps[i]);
		left--;
	}
	moe_free(list.steps);
	return status;
}
