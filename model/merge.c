/* SPDX-License-Identifier: Apache-2.0 */
#include "model/merge.h"
#include "model/adapters/adapter_form.h"
#include "model/file.h"
#include "model/merge_quantised.h"
#include "model/readers/gguf.h"
#include "model/staging.h"

/* ---- other files ---- */

/* Weights that are written anew; the index only where shards are split. */
static bool is_ours(const char *path, void *user)
{
	const struct moe_merge_shards *m = user;

	return moe_safetensors_has_file(m->base, path) ||
	       (m->split && !strcmp(strrchr(path, '/') + 1, MOE_INDEX_NAME));
}

static enum moe_status advance(const char *path, int64_t bytes, void *user)
{
	return moe_merge_advance(user, path, bytes);
}

/* ---- all of it ---- */

static enum moe_status check_paths(const struct moe_merge_params *p)
{
	if (moe_gguf_is(p->model))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: an adapter cannot be merged into a GGUF file: moesaic convert %s DIR makes a folder it can be "
				"merged into",
				p->model, p->model);
	MOE_TRY(moe_dir_check(p->model));
	if (moe_path_inside(p->output_dir, p->model))
		return moe_fail(MOE_ERR_ARG,
				"%s: lies in the base model's folder, which is only read",
				p->output_dir);
	return MOE_OK;
}

static enum moe_status fill_folder(struct moe_merge_shards *m, const struct moe_merge_params *p,
				   const char *path)
{
	const struct moe_folder_copy others = { is_ours, advance, m };

	MOE_TRY(moe_merge_plan(m, p->max_shard_bytes));
	MOE_TRY(moe_folder_bytes(&others, p->model, &m->total));
	MOE_TRY(moe_folder_room(path, m->total, "the merged model"));
	MOE_TRY(moe_merge_write_shards(m, path));
	return moe_folder_copy(&others, p->model, path);
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

/* Shards as the base has them: only plain tensors change. */
static enum moe_status merge_plain(struct moe_merge_shards *m, const struct moe_merge_params *p,
				   struct moe_merge_result *result)
{
	struct moe_staging staging = { 0 };
	double start = moe_now();
	enum moe_status status = moe_staging_begin(p->output_dir, &staging);

	if (status == MOE_OK)
		status = fill_folder(m, p, staging.path);
	if (status == MOE_OK)
		status = moe_staging_commit(&staging);
	moe_staging_abort(&staging);
	result->tensors = (int64_t)moe_safetensors_count(m->base);
	result->merged = m->merged;
	result->bytes = m->total;
	result->shards = m->n_shards;
	result->seconds = moe_now() - start;
	return status;
}

enum moe_status moe_merge_run(const struct moe_merge_params *p, struct moe_merge_result *result)
{
	struct moe_merge_shards m = { .model = p->model, .progress = p->progress, .user = p->user };
	bool quantised = p->weights && strcmp(p->weights, "keep");
	enum moe_status status = check_paths(p);

	if (status == MOE_OK)
		status = open_inputs(&m, p);
	if (status == MOE_OK && !quantised)
		status = moe_merge_is_quantised(&m, &quantised);
	if (status == MOE_OK)
		status =
			quantised ? moe_merge_quantised(&m, p, result) : merge_plain(&m, p, result);
	moe_merge_shards_free(&m);
	return status;
}
