/* SPDX-License-Identifier: Apache-2.0 */
/* What a training state holds: arrays and scalars, and whether they are what was written. */
#include "engine/points.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors_sum.h"
#include "model/state.h"
#include "model/sum.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define SUM_KEY "sum"
#define ARRAYS "state.safetensors"
#define SUFFIX ".safetensors"

struct moe_state {
	struct moe_safetensors *arrays;
	cJSON *scalars;
	char *path;
};

static enum moe_status no_memory(const char *path)
{
	return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
}

/* Over names and texts of all scalars but the sum itself. */
static void sum_of(const cJSON *scalars, char text[17])
{
	struct moe_sum sum;
	const cJSON *c;

	moe_sum_begin(&sum);
	cJSON_ArrayForEach(c, scalars)
	{
		if (!strcmp(c->string, SUM_KEY))
			continue;
		moe_sum_add(&sum, c->string, strlen(c->string) + 1);
		if (cJSON_IsString(c))
			moe_sum_add(&sum, c->valuestring, strlen(c->valuestring) + 1);
	}
	snprintf(text, 17, "%016llx", (unsigned long long)moe_sum_end(&sum));
}

/* Reads dir/state.json and checks its format and sum; *path gets the file's name for messages. */
static enum moe_status read_scalars(const char *dir, char **path, cJSON **out)
{
	const char *format = NULL, *sum = NULL;
	char found[17];
	enum moe_status status;

	*path = moe_path_join(dir, "state.json");
	*out = NULL;
	if (!*path)
		return no_memory(dir);
	MOE_TRY(moe_json_read(*path, out));
	status = moe_json_opt_text(*out, "format", &format);
	if (status != MOE_OK || !format || strcmp(format, MOE_STATE_FORMAT) != 0)
		return moe_fail(MOE_ERR_FORMAT, "%s: format is '%.64s', expected '%s'", *path,
				format ? format : "", MOE_STATE_FORMAT);
	sum_of(*out, found);
	if (moe_json_opt_text(*out, SUM_KEY, &sum) != MOE_OK || !sum || strcmp(sum, found) != 0)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: is damaged: its checksum is %s, '%.64s' was written", *path,
				found, sum ? sum : "");
	return MOE_OK;
}

/* Scalars are texts in the file: JSON numbers lose int64 and have no infinities. */
static enum moe_status scalar_of(const cJSON *scalars, const char *path, const char *key,
				 const char **out)
{
	*out = NULL;
	if (moe_json_opt_text(scalars, key, out) != MOE_OK || !*out)
		return moe_fail(MOE_ERR_FORMAT, "%s: '%s' is missing or not a string", path, key);
	return MOE_OK;
}

static enum moe_status int_of(const cJSON *scalars, const char *path, const char *key, int64_t *out)
{
	const char *text;
	long long v;
	char *end;

	MOE_TRY(scalar_of(scalars, path, key, &text));
	errno = 0;
	v = strtoll(text, &end, 10);
	if (errno || end == text || *end)
		return moe_fail(MOE_ERR_FORMAT, "%s: '%s' is '%.64s', not an integer", path, key,
				text);
	*out = v;
	return MOE_OK;
}

/* MOE_OK if dir has the scalars of step, < 0: any. */
static enum moe_status check_scalars(const char *dir, int64_t step)
{
	cJSON *scalars;
	char *path;
	int64_t found = -1;
	enum moe_status status = read_scalars(dir, &path, &scalars);

	if (status == MOE_OK)
		status = int_of(scalars, path, "step", &found);
	if (status == MOE_OK && step >= 0 && found != step)
		status = moe_fail(MOE_ERR_FORMAT, "%s: is of step %lld", path, (long long)found);
	cJSON_Delete(scalars);
	moe_free(path);
	return status;
}

/* Every tensor file of the folder. */
static enum moe_status check_tensors(const char *dir)
{
	enum moe_status status = MOE_OK;
	bool arrays = false;
	struct dirent *e;
	DIR *d = opendir(dir);

	if (!d)
		return moe_fail(MOE_ERR_IO, "%s: cannot list the folder: %s", dir, strerror(errno));
	while (status == MOE_OK && (e = readdir(d))) {
		size_t n = strlen(e->d_name), tail = strlen(SUFFIX);
		char *path;

		if (n <= tail || strcmp(e->d_name + n - tail, SUFFIX) != 0)
			continue;
		arrays = arrays || !strcmp(e->d_name, ARRAYS);
		path = moe_path_join(dir, e->d_name);
		status = path ? moe_safetensors_verify(path) : no_memory(dir);
		moe_free(path);
	}
	closedir(d);
	if (status == MOE_OK && !arrays)
		status = moe_fail(MOE_ERR_FORMAT, "%s: " ARRAYS " is missing", dir);
	return status;
}

enum moe_status moe_state_check(const char *dir, int64_t step)
{
	MOE_TRY(check_scalars(dir, step));
	return check_tensors(dir);
}

static bool add_scalar(cJSON *root, const struct moe_scalar *s)
{
	char text[64];
	const char *value = text;
	void *before = moe_points_enter();

	if (s->kind == MOE_SCALAR_INT)
		snprintf(text, sizeof text, "%lld", (long long)s->i);
	else if (s->kind == MOE_SCALAR_REAL)
		snprintf(text, sizeof text, "%.17g", s->r);
	else
		value = s->text ? s->text : "";
	moe_points_leave(before);
	return cJSON_AddStringToObject(root, s->key, value) != NULL;
}

static enum moe_status write_scalars(const char *path, const struct moe_scalar *scalars, size_t n)
{
	cJSON *root = cJSON_CreateObject();
	enum moe_status status = MOE_OK;
	char sum[17];

	if (!root || !cJSON_AddStringToObject(root, "format", MOE_STATE_FORMAT))
		status = no_memory(path);
	for (size_t i = 0; i < n && status == MOE_OK; i++) {
		if (cJSON_GetObjectItemCaseSensitive(root, scalars[i].key) ||
		    !strcmp(scalars[i].key, SUM_KEY))
			status = moe_fail(MOE_ERR_ARG, "%s: scalar '%s' is given twice or reserved",
					  path, scalars[i].key);
		else if (!add_scalar(root, &scalars[i]))
			status = no_memory(path);
	}
	if (status == MOE_OK) {
		sum_of(root, sum);
		status = cJSON_AddStringToObject(root, SUM_KEY, sum) ? moe_json_write(path, root)
								     : no_memory(path);
	}
	cJSON_Delete(root);
	return status;
}

enum moe_status moe_state_write(const char *dir, const struct moe_st_item *items, size_t n_items,
				const struct moe_scalar *scalars, size_t n_scalars)
{
	const struct moe_st_meta meta = { "format", MOE_STATE_FORMAT };
	char *arrays = moe_path_join(dir, ARRAYS);
	char *json = moe_path_join(dir, "state.json");
	enum moe_status status;

	if (!arrays || !json)
		status = no_memory(dir);
	else
		status = moe_safetensors_write(arrays, items, n_items, &meta, 1);
	if (status == MOE_OK) /* last: its presence says that the arrays are whole */
		status = write_scalars(json, scalars, n_scalars);
	moe_free(arrays);
	moe_free(json);
	return status;
}

enum moe_status moe_state_open(const char *dir, struct moe_state **out)
{
	struct moe_state *s = moe_calloc(1, sizeof *s);
	char *arrays = moe_path_join(dir, ARRAYS);
	enum moe_status status;

	if (!s || !arrays)
		status = no_memory(dir);
	else
		status = read_scalars(dir, &s->path, &s->scalars);
	if (status == MOE_OK)
		status = moe_safetensors_open(arrays, &s->arrays);
	moe_free(arrays);
	if (status != MOE_OK) {
		moe_state_close(s);
		return status;
	}
	*out = s;
	return MOE_OK;
}

void moe_state_close(struct moe_state *s)
{
	if (!s)
		return;
	moe_safetensors_close(s->arrays);
	cJSON_Delete(s->scalars);
	moe_free(s->path);
	moe_free(s);
}

const struct moe_safetensors *moe_state_arrays(const struct moe_state *s)
{
	return s->arrays;
}

bool moe_state_has(const struct moe_state *s, const char *key)
{
	return moe_json_get(s->scalars, key) != NULL;
}

enum moe_status moe_state_int(const struct moe_state *s, const char *key, int64_t *out)
{
	return int_of(s->scalars, s->path, key, out);
}

enum moe_status moe_state_real(const struct moe_state *s, const char *key, double *out)
{
	const char *text;
	char *end;
	double v;

	MOE_TRY(scalar_of(s->scalars, s->path, key, &text));
	v = moe_strtod(text, &end);
	if (end == text || *end)
		return moe_fail(MOE_ERR_FORMAT, "%s: '%s' is '%.64s', not a number", s->path, key,
				text);
	*out = v;
	return MOE_OK;
}

enum moe_status moe_state_text(const struct moe_state *s, const char *key, const char **out)
{
	return scalar_of(s->scalars, s->path, key, out);
}
