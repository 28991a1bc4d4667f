/* SPDX-License-Identifier: Apache-2.0 */
#include "model/inspect.h"
#include "engine/trace_read.h"
#include "model/file.h"
#include "model/readers/gguf.h"
#include "model/readers/kt.h"
#include "model/readers/safetensors.h"
#include "model/state.h"
#include "model/tokens.h"

#include <stdio.h>

static enum moe_status no_memory(bool good)
{
	return good ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory");
}

/* ---- tensors of any file ---- */

bool moe_inspect_dtypes(const struct moe_safetensors *st, cJSON *o)
{
	cJSON *dtypes;
	int64_t bytes = 0;
	bool good;

	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		bytes += moe_st_tensor_bytes(moe_safetensors_at(st, i));
	good = moe_inspect_number(o, "files", moe_safetensors_file_count(st)) &&
	       moe_inspect_number(o, "tensors", (int64_t)moe_safetensors_count(st)) &&
	       moe_inspect_number(o, "bytes", bytes);
	dtypes = cJSON_AddObjectToObject(o, "bytes_by_dtype");
	for (size_t i = 0; good && dtypes && i < moe_safetensors_count(st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(st, i);
		cJSON *known = cJSON_GetObjectItemCaseSensitive(dtypes, t->dtype_text);

		if (known)
			cJSON_SetNumberValue(known, known->valuedouble + (double)moe_st_tensor_bytes(t));
		else
			good = moe_inspect_number(dtypes, t->dtype_text, moe_st_tensor_bytes(t));
	}
	return good && dtypes;
}

static bool add_tensor(cJSON *list, const struct moe_st_tensor *t)
{
	cJSON *o = cJSON_CreateObject();
	char shape[96];

	return o && cJSON_AddItemToArray(list, o) && cJSON_AddStringToObject(o, "name", t->name) &&
	       cJSON_AddStringToObject(o, "dtype", t->dtype_text) &&
	       cJSON_AddStringToObject(o, "shape",
				       moe_shape_text(MOE_MIN(t->ndim, MOE_MAX_NDIM), t->shape,
						      shape, sizeof shape)) &&
	       moe_inspect_number(o, "bytes", moe_st_tensor_bytes(t));
}

static enum moe_status inspect_tensors(const char *path, cJSON *o)
{
	struct moe_safetensors *st;
	const char *key, *value;
	cJSON *list, *meta;
	bool good;

	MOE_TRY(moe_safetensors_open(path, &st));
	good = moe_inspect_dtypes(st, o);
	meta = cJSON_AddObjectToObject(o, "metadata");
	for (int i = 0; good && moe_safetensors_metadata_at(st, 0, i, &key, &value); i++)
		good = meta && cJSON_AddStringToObject(meta, key, value);
	list = cJSON_AddArrayToObject(o, "list");
	for (size_t i = 0; good && list && i < moe_safetensors_count(st); i++)
		good = add_tensor(list, moe_safetensors_at(st, i));
	moe_safetensors_close(st);
	return no_memory(good && meta && list);
}

/* ---- token file ---- */

static enum moe_status inspect_tokens(const char *path, cJSON *o)
{
	struct moe_tokens *t;
	bool good;

	MOE_TRY(moe_tokens_open(path, 0, &t));
	good = moe_inspect_number(o, "tokens", t->n_tokens) &&
	       moe_inspect_number(o, "trained_tokens", t->n_trained) &&
	       moe_inspect_number(o, "documents", t->n_docs) &&
	       moe_inspect_number(o, "rows", t->n_rows) &&
	       moe_inspect_number(o, "longest_document", t->max_doc_tokens) &&
	       moe_inspect_number(o, "longest_row", t->max_row_tokens) &&
	       moe_inspect_number(o, "vocabulary", t->vocab) &&
	       moe_inspect_number(o, "cutoff_len", t->cutoff_len) &&
	       cJSON_AddStringToObject(o, "source", t->source) &&
	       cJSON_AddStringToObject(o, "hash", t->hash);
	moe_tokens_close(t);
	return no_memory(good);
}

/* ---- training state ---- */

static enum moe_status inspect_state(const char *path, cJSON *o)
{
	static const char *const counts[] = { "step", "tokens", "trained_tokens" };
	char *adapter = moe_path_join(path, "adapter_config.json");
	struct moe_state *s;
	enum moe_status status = moe_state_open(path, &s);
	bool good = adapter != NULL;
	int64_t value;

	if (status != MOE_OK) {
		moe_free(adapter);
		return status;
	}
	for (size_t i = 0; good && i < MOE_COUNT(counts); i++)
		if (moe_state_int(s, counts[i], &value) == MOE_OK)
			good = moe_inspect_number(o, counts[i], value);
	good = good && moe_inspect_dtypes(moe_state_arrays(s), o) &&
	       cJSON_AddBoolToObject(o, "adapter", adapter && moe_path_exists(adapter));
	moe_state_close(s);
	moe_free(adapter);
	return no_memory(good);
}

/* ---- trace ---- */

/* Rows and bounds over the chunks of a type. */
struct span {
	int64_t rows, time[2], step[2];
};

static struct span span_of(const struct moe_mxt_reader *r, uint32_t type)
{
	struct span s = { 0 };

	for (size_t i = 0; i < r->n; i++) {
		const struct moe_mxt_head *h = &r->chunk[i].head;

		if (h->type != type)
			continue;
		s.time[0] = s.rows ? MOE_MIN(s.time[0], h->time[0]) : h->time[0];
		s.time[1] = s.rows ? MOE_MAX(s.time[1], h->time[1]) : h->time[1];
		s.step[0] = s.rows ? MOE_MIN(s.step[0], h->step[0]) : h->step[0];
		s.step[1] = s.rows ? MOE_MAX(s.step[1], h->step[1]) : h->step[1];
		s.rows += h->rows;
	}
	return s;
}

static bool add_header(const struct moe_mxt_reader *r, cJSON *o)
{
	static const char *const keys[] = { "moesaic.version", "moesaic.revision", "starpu.version",
					    "host.name",       "host.cpu",	   "host.load",
					    "topology.nodes",  "workers",	   "parts",
					    "policy",	       "placement" };
	cJSON *run;
	char buf[256];

	for (size_t i = 0; i < MOE_COUNT(keys); i++)
		if (moe_mxt_value(r, keys[i], buf, sizeof buf) &&
		    !cJSON_AddStringToObject(o, keys[i], buf))
			return false;
	run = cJSON_AddObjectToObject(o, "run");
	for (const char *line = r->header; run && line && *line;
	     line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
		const char *equals = strchr(line, '='), *end = strchr(line, '\n');
		char key[64];

		if (strncmp(line, "config.", 7) || !equals || (end && equals > end) ||
		    equals - line >= (long)sizeof key)
			continue;
		snprintf(key, sizeof key, "%.*s", (int)(equals - line), line);
		if (moe_mxt_value(r, key, buf, sizeof buf) &&
		    !cJSON_AddStringToObject(run, key + 7, buf))
			return false;
	}
	return run != NULL;
}

static enum moe_status inspect_trace(const char *path, cJSON *o)
{
	struct moe_mxt_reader r;
	struct span tasks, deps;
	bool good;

	if (!moe_mxt_open(&r, path))
		return moe_fail(MOE_ERR_FORMAT, "%s: %s", path, r.error);
	tasks = span_of(&r, MOE_MXT_TASKS);
	deps = span_of(&r, MOE_MXT_DEPS);
	good = moe_inspect_number(o, "bytes", r.bytes) &&
	       moe_inspect_number(o, "tasks", tasks.rows) &&
	       moe_inspect_number(o, "submitted", deps.rows) &&
	       moe_inspect_number(o, "first_step", tasks.step[0]) &&
	       moe_inspect_number(o, "last_step", tasks.step[1]) &&
	       cJSON_AddNumberToObject(o, "seconds",
				       1e-9 * (double)(tasks.time[1] - tasks.time[0])) &&
	       cJSON_AddBoolToObject(o, "ended_in_order", r.ended) &&
	       moe_inspect_number(o, "lost_bytes", r.lost_bytes) && add_header(&r, o);
	moe_mxt_close(&r);
	return no_memory(good);
}

/* ---- which kind ---- */

struct kind {
	const char *name, *file; /* a folder with file is of this kind */
	enum moe_status (*fill)(const char *path, cJSON *o);
};

static const struct kind folders[] = {
	{ "state", "state.json", inspect_state },
	{ "adapter", "adapter_config.json", moe_inspect_adapter },
	{ "model", "config.json", moe_inspect_model },
	{ "tensors", MOE_INDEX_NAME, inspect_tensors },
	{ "tensors", "model.safetensors", inspect_tensors },
};

static enum moe_status kind_of_folder(const char *path, const struct kind **out)
{
	static const struct kind kt = { "tensors", NULL, inspect_tensors };

	for (size_t i = 0; i < MOE_COUNT(folders); i++) {
		char *file = moe_path_join(path, folders[i].file);
		bool there = file && moe_path_exists(file);

		if (!file)
			return moe_fail(MOE_ERR_NOMEM, "out of memory");
		moe_free(file);
		*out = &folders[i];
		if (there)
			return MOE_OK;
	}
	*out = &kt;
	if (moe_kt_is(path))
		return MOE_OK;
	return moe_fail(
		MOE_ERR_FORMAT,
		"%s: no model (config.json), adapter (adapter_config.json) or training state "
		"(state.json) is in it",
		path);
}

static bool is_token_file(const struct moe_safetensors *st)
{
	const char *format = moe_safetensors_metadata(st, "format");

	return format && !strncmp(format, "moesaic-tokens-", 15);
}

static enum moe_status kind_of_file(const char *path, const struct kind **out)
{
	static const struct kind trace = { "trace", NULL, inspect_trace },
				 tokens = { "tokens", NULL, inspect_tokens },
				 model = { "model", NULL, moe_inspect_model },
				 tensors = { "tensors", NULL, inspect_tensors };
	struct moe_safetensors *st;
	struct moe_mapping map = { 0 };
	const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
	bool mxt;

	MOE_TRY(moe_file_map(path, &map));
	mxt = map.bytes >= 8 && !memcmp(map.data, MOE_MXT_MARK, 8);
	moe_file_unmap(&map);
	*out = mxt ? &trace : &model;
	if (mxt || !strcmp(name, "config.json") || moe_gguf_is(path))
		return MOE_OK;
	if (moe_safetensors_open(path, &st) != MOE_OK)
		return moe_fail(
			MOE_ERR_FORMAT,
			"%s; it is no trace either, so neither a model, an adapter, a token "
			"file, a training state nor a trace",
			moe_last_error());
	*out = is_token_file(st) ? &tokens : &tensors;
	moe_safetensors_close(st);
	return MOE_OK;
}

/* What only the user can ask for, of checkpoints. */
static enum moe_status add_quantised(const char *path, const struct kind *kind,
				     const struct moe_inspect_params *p, cJSON *o)
{
	bool tensors = !strcmp(kind->name, "model") || !strcmp(kind->name, "tensors");
	const cJSON *files = cJSON_GetObjectItemCaseSensitive(o, "files");

	if (tensors && cJSON_IsNumber(files) && files->valuedouble > 0) {
		enum moe_status status = moe_inspect_quantised(path, p ? p->base : NULL,
							       p && p->values, o);

		if (status != MOE_ERR_FORMAT && status != MOE_ERR_UNSUPPORTED)
			return status;
		if (p && (p->base || p->values))
			return status;
		return no_memory(cJSON_AddStringToObject(o, "quantised_error", moe_last_error()));
	}
	if (p && (p->base || p->values))
		return moe_fail(MOE_ERR_ARG, "%s: it has no weights whose values could be looked at",
				path);
	return MOE_OK;
}

enum moe_status moe_inspect_path(const char *path, const struct moe_inspect_params *p, cJSON **out)
{
	const struct kind *kind = NULL;
	enum moe_status status;

	*out = NULL;
	if (!moe_path_exists(path))
		return moe_fail(MOE_ERR_IO, "%s: no such file or folder", path);
	if (moe_path_is_dir(path))
		MOE_TRY(moe_dir_check(path));
	MOE_TRY(moe_path_is_dir(path) ? kind_of_folder(path, &kind) : kind_of_file(path, &kind));
	*out = cJSON_CreateObject();
	if (!*out || !cJSON_AddStringToObject(*out, "kind", kind->name) ||
	    !cJSON_AddStringToObject(*out, "path", path))
		status = moe_fail(MOE_ERR_NOMEM, "out of memory");
	else
		status = kind->fill(path, *out);
	if (status == MOE_OK)
		status = add_quantised(path, kind, p, *out);
	if (status != MOE_OK) {
		cJSON_Delete(*out);
		*out = NULL;
	}
	return status;
}
