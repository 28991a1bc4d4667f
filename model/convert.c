/* SPDX-License-Identifier: Apache-2.0 */
#include "model/convert.h"
#include "model/arch_reader.h"
#include "model/convert_config.h"
#include "model/convert_folder.h"
#include "model/convert_kt.h"
#include "model/convert_work.h"
#include "model/kt_experts.h"
#include "model/readers/gguf.h"
#include "model/readers/kt.h"

#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

struct convert {
	const struct moe_convert_model_params *p;
	struct moe_convert_plan plan;
	struct moe_convert_folder folder;
	struct moe_convert_run run;
	cJSON *config;
	int resumed;
	char *kt; /* what its experts come from; NULL: from in */
	bool opened, gguf;
};

static int cpus(void)
{
	cpu_set_t set;

	return sched_getaffinity(0, sizeof set, &set) == 0 ? MOE_MAX(CPU_COUNT(&set), 1) : 1;
}

/* ---- input ---- */

static enum moe_status check_paths(struct convert *c)
{
	const struct moe_convert_model_params *p = c->p;

	c->gguf = moe_gguf_is(p->in);
	if (c->gguf)
		return MOE_OK;
	MOE_TRY(moe_dir_check(p->in));
	if (moe_path_inside(p->out, p->in))
		return moe_fail(MOE_ERR_ARG, "%s: lies in the input's folder, which is only read",
				p->out);
	return MOE_OK;
}

/* kt's experts in place of the model's. */
static enum moe_status put_experts(struct convert *c, struct moe_safetensors *st)
{
	struct moe_arch *arch = moe_calloc(1, sizeof *arch);
	enum moe_status status = arch ? moe_arch_load(c->p->in, arch) : moe_fail(MOE_ERR_NOMEM, "out of memory");
	char *real = realpath(c->p->kt_weights, NULL);
	uint64_t stamp = 0;

	if (status == MOE_OK)
		status = moe_kt_put_experts(st, c->p->kt_weights, arch, &stamp);
	if (status == MOE_OK) {
		c->kt = moe_format("experts of %s, %016llx", real ? real : c->p->kt_weights, (unsigned long long)stamp);
		status = c->kt ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory");
	}
	free(real);
	moe_free(arch);
	return status;
}

/* Codes in a way of a file's own are what "nearest" is about. */
static enum moe_status check_nearest(const struct convert *c, const struct moe_safetensors *st)
{
	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		if (moe_safetensors_at(st, i)->codes)
			return MOE_OK;
	return !c->plan.target.nearest || c->gguf
		       ? MOE_OK
		       : moe_fail(MOE_ERR_ARG, "%s: weights \"nearest\" are for GGUF and kt's files", c->p->in);
}

static bool experts_alone(const struct moe_safetensors *st)
{
	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		if (!moe_safetensors_at(st, i)->stored)
			return false;
	return moe_safetensors_count(st) > 0;
}

static enum moe_status open_input(struct convert *c, struct moe_safetensors **st)
{
	enum moe_status status = MOE_OK;

	MOE_TRY(moe_safetensors_open(c->p->in, st));
	if (experts_alone(*st))
		status = moe_fail(MOE_ERR_ARG,
				  "%s: a folder of kt's files has no model in it: give the model as IN, and this folder as "
				  "kt_weights (--kt-weights)",
				  c->p->in);
	if (status == MOE_OK && c->p->kt_weights)
		status = put_experts(c, *st);
	if (status == MOE_OK)
		status = check_nearest(c, *st);
	if (status != MOE_OK)
		moe_safetensors_close(*st);
	return status;
}

static enum moe_status read_config(struct convert *c)
{
	char *path;
	const char *type = NULL;
	enum moe_status status;

	if (c->gguf)
		return moe_gguf_read_config(c->p->in, &c->config);
	path = moe_path_join(c->p->in, "config.json");
	status = path ? moe_json_read(path, &c->config) : moe_fail(MOE_ERR_NOMEM, "out of memory");
	moe_free(path);
	MOE_TRY(status);
	MOE_TRY(moe_json_opt_text(c->config, "model_type", &type));
	status = moe_arch_check_quantisation(c->config);
	if (status != MOE_OK)
		return moe_fail_in(status, "%s", c->p->in);
	if (type && !strcmp(type, "gpt_oss"))
		return moe_fail(
			MOE_ERR_UNSUPPORTED,
			"%s: gpt_oss keeps its experts transposed and with rows of gate and "
			"up in turn, which cannot be converted yet",
			c->p->in);
	return MOE_OK;
}

/* Later layers than the model's own (those that predict further tokens) are left out, as kt-kernel does. */
static enum moe_status plan_kt(struct convert *c, struct moe_safetensors *st)
{
	struct moe_convert_kt_params p = { .parts = MOE_MAX(c->p->kt_parts, 1), .backward = c->p->kt_backward };
	int64_t layers = 0;

	c->plan.st = st;
	MOE_TRY(moe_json_opt_int(c->config, "num_hidden_layers", 0, INT_MAX, &layers));
	p.n_layers = (int)layers;
	return moe_convert_kt_plan(&c->plan, &p);
}

static enum moe_status make_plan(struct convert *c)
{
	struct moe_safetensors *st = NULL;

	MOE_TRY(moe_convert_target_find(c->p->weights, c->p->layers, &c->plan.target));
	MOE_TRY(check_paths(c));
	MOE_TRY(read_config(c));
	MOE_TRY(open_input(c, &st));
	if (c->plan.target.kt_bits)
		MOE_TRY(plan_kt(c, st));
	else
		MOE_TRY(moe_convert_plan_make(&c->plan, st, c->p->max_shard_bytes));
	if (c->plan.kt ? c->plan.n_shards > 0 : c->plan.n_sources > 0)
		return MOE_OK;
	return moe_fail(MOE_ERR_ARG,
			"%s: nothing in it can become %s: it has no weights of %s that are not so "
			"already",
			c->p->in, c->p->weights, c->plan.target.linear ? "projections" : "experts");
}

/* ---- output ---- */

static enum moe_status advance(const char *what, int64_t bytes, void *user)
{
	struct convert *c = user;

	c->run.done += bytes;
	if (c->p->progress && c->p->progress(what, c->run.done, c->run.total, c->p->user))
		return moe_fail(MOE_ERR_INTERRUPTED, "interrupted: what is complete was kept, the "
						     "same command goes on with it");
	return MOE_OK;
}

/* What is taken over of a folder that a GGUF file lies in. */
static bool is_tokenizer(const char *name)
{
	static const char *const names[] = { "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
					     "chat_template.jinja", "generation_config.json" };

	for (size_t i = 0; i < MOE_COUNT(names); i++)
		if (!strcmp(name, names[i]))
			return true;
	return false;
}

/* The folder that the other files come from; moe_free it. */
static char *folder_of(const struct convert *c)
{
	const char *slash = c->gguf ? strrchr(c->p->in, '/') : NULL;

	if (slash)
		return moe_format("%.*s", (int)(slash - c->p->in) + (slash == c->p->in), c->p->in);
	return moe_strdup(c->gguf ? "." : c->p->in);
}

static enum moe_status copy_others(struct convert *c, const struct moe_folder_copy *others)
{
	char *from = folder_of(c), *tokenizer = moe_path_join(c->folder.path, "tokenizer.json");
	enum moe_status status = from && tokenizer ? moe_folder_copy(others, from, c->folder.path)
						   : moe_fail(MOE_ERR_NOMEM, "out of memory");

	if (status == MOE_OK && c->gguf && !moe_path_exists(tokenizer))
		moe_log(MOE_LOG_WARNING,
			"%s: no tokenizer.json lies beside it, and the one inside is not read: put the original model's "
			"tokenizer.json (and tokenizer_config.json) into %s",
			c->p->in, c->p->out);
	moe_free(from);
	moe_free(tokenizer);
	return status;
}

/* The weights, and what is written about them. */
static bool is_ours(const char *path, void *user)
{
	static const char *const names[] = { "config.json", MOE_INDEX_NAME, MOE_SUMS_NAME };
	const struct convert *c = user;
	const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
	int layer;

	if (c->gguf)
		return !is_tokenizer(name);
	if (sscanf(name, "_layer_%d", &layer) == 1)
		return true; /* kt's */
	if (moe_safetensors_has_file(c->plan.st, path))
		return true;
	for (size_t i = 0; i < MOE_COUNT(names); i++)
		if (!strcmp(name, names[i]))
			return true;
	return false;
}

static enum moe_status write_shard(struct convert *c, int i)
{
	struct moe_convert_shard *s = &c->plan.shard[i];
	char *path = moe_path_join(c->folder.path, s->name);
	struct moe_file_writer w = { .fd = -1 };
	enum moe_status status =
		path ? moe_file_begin(&w, path) : moe_fail(MOE_ERR_NOMEM, "out of memory");

	if (status == MOE_OK)
		status = moe_convert_write(&c->run, i, &w);
	if (status == MOE_OK)
		status = moe_file_commit(&w);
	moe_file_abort(&w);
	if (status == MOE_OK)
		status = moe_file_sha256(path, s->sha256);
	if (status == MOE_OK)
		status = moe_convert_folder_note(&c->folder, s);
	s->done = status == MOE_OK;
	moe_free(path);
	return status;
}

static enum moe_status write_sums(const struct convert *c)
{
	char *path = moe_path_join(c->folder.path, MOE_SUMS_NAME);
	struct moe_file_writer w = { .fd = -1 };
	enum moe_status status =
		path ? moe_file_begin(&w, path) : moe_fail(MOE_ERR_NOMEM, "out of memory");

	for (int i = 0; status == MOE_OK && i < c->plan.n_shards; i++)
		status = moe_file_append_sum(&w, c->plan.shard[i].sha256, c->plan.shard[i].name);
	if (status == MOE_OK)
		status = moe_file_commit(&w);
	moe_file_abort(&w);
	moe_free(path);
	return status;
}

static enum moe_status write_json(const struct convert *c, const char *name, const cJSON *o)
{
	char *path = moe_path_join(c->folder.path, name);
	enum moe_status status =
		path ? moe_json_write(path, o) : moe_fail(MOE_ERR_NOMEM, "out of memory");

	moe_free(path);
	return status;
}

static enum moe_status write_index(const struct convert *c)
{
	cJSON *root = cJSON_CreateObject(), *meta, *map;
	enum moe_status status;
	bool good;

	if (c->plan.n_shards == 1 && !strcmp(c->plan.shard[0].name, "model.safetensors")) {
		cJSON_Delete(root);
		return MOE_OK;
	}
	meta = cJSON_AddObjectToObject(root, "metadata");
	map = cJSON_AddObjectToObject(root, "weight_map");
	good = map && cJSON_AddNumberToObject(meta, "total_size", (double)c->plan.bytes);
	for (size_t i = 0; good && i < c->plan.n_tensors; i++)
		good = cJSON_AddStringToObject(map, c->plan.tensor[i].name,
					       c->plan.shard[c->plan.tensor[i].shard].name);
	status = good ? write_json(c, MOE_INDEX_NAME, root) : moe_fail(MOE_ERR_NOMEM, "out of memory");
	cJSON_Delete(root);
	return status;
}

static enum moe_status write_layer(struct convert *c, int i)
{
	struct moe_convert_shard *s = &c->plan.shard[i];

	MOE_TRY(moe_convert_kt_write(&c->run, i, c->folder.path));
	MOE_TRY(moe_convert_folder_note(&c->folder, s));
	s->done = true;
	return MOE_OK;
}

static enum moe_status fill(struct convert *c)
{
	const struct moe_folder_copy others = { is_ours, advance, c };

	c->run.total = c->plan.bytes;
	if (!c->gguf && !c->plan.kt) /* else some small files, or none */
		MOE_TRY(moe_folder_bytes(&others, c->p->in, &c->run.total));
	for (int i = 0; i < c->plan.n_shards; i++) {
		c->resumed += c->plan.shard[i].done;
		if (c->plan.shard[i].done)
			c->run.done += (int64_t)c->plan.shard[i].bytes;
	}
	MOE_TRY(moe_folder_room(c->folder.path, c->run.total - c->run.done, "the converted model"));
	for (int i = 0; i < c->plan.n_shards; i++)
		if (!c->plan.shard[i].done)
			MOE_TRY(c->plan.kt ? write_layer(c, i) : write_shard(c, i));
	if (c->plan.kt) {
		MOE_TRY(moe_convert_kt_finish(&c->plan, c->folder.path));
		return moe_convert_folder_commit(&c->folder);
	}
	MOE_TRY(write_index(c));
	MOE_TRY(write_sums(c));
	if (!c->plan.target.keep)
		MOE_TRY(moe_convert_config(&c->plan, c->config));
	MOE_TRY(write_json(c, "config.json", c->config));
	MOE_TRY(copy_others(c, &others));
	return moe_convert_folder_commit(&c->folder);
}

static bool any_done(const struct convert *c)
{
	for (int i = 0; c->plan.shard && i < c->plan.n_shards; i++)
		if (c->plan.shard[i].done)
			return true;
	return false;
}

static void report(const struct convert *c, struct moe_convert_model_result *r)
{
	const struct moe_convert_count *n = &c->run.count;

	r->tensors = (int64_t)c->plan.n_tensors;
	r->converted = n->matrices;
	r->kept = n->kept;
	r->shards = c->plan.n_shards;
	r->resumed = c->resumed;
	r->bytes_in = c->plan.bytes_in;
	r->bytes = c->plan.bytes;
	r->error = n->all > 0 ? sqrt(n->wrong / n->all) : 0;
	r->worst_error = n->worst;
	r->largest_error = n->largest;
	snprintf(r->worst, sizeof r->worst, "%s", n->worst_name);
}

enum moe_status moe_convert_model_run(const struct moe_convert_model_params *p,
				      const struct moe_convert_change *change, const char *note,
				      struct moe_convert_model_result *result)
{
	struct convert c = { .p = p, .plan = { .change = change }, .folder = { .fd = -1 } };
	double start = moe_now();
	enum moe_status status = make_plan(&c);

	c.run = (struct moe_convert_run){ .plan = &c.plan,
					  .threads = p->threads ? p->threads : cpus(),
					  .progress = p->progress,
					  .user = p->user };
	if (status == MOE_OK) {
		status = moe_convert_folder_open(p, c.kt ? c.kt : note, &c.plan, &c.folder);
		c.opened = status == MOE_OK;
	}
	if (status == MOE_OK)
		status = fill(&c);
	if (status == MOE_OK) {
		report(&c, result);
		result->seconds = moe_now() - start;
	}
	moe_convert_folder_close(&c.folder, c.opened ? any_done(&c) : !c.folder.fresh);
	moe_convert_plan_free(&c.plan);
	cJSON_Delete(c.config);
	moe_free(c.kt);
	return status;
}
