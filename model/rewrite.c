/* SPDX-License-Identifier: Apache-2.0 */
#include "model/rewrite.h"
#include "model/file.h"
#include "model/merge_math.h"
#include "model/merge_shards.h"
#include "model/rewrite_coded.h"
#include "model/staging.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>

#define CONFIG "config.json"

/* ---- other files ---- */

static bool is_of_training(const char *name)
{
	static const char *const names[] = { "README.md",
					     "run.yaml",
					     "trainer_log.jsonl",
					     "trainer_state.json",
					     "training_loss.svg",
					     "adapter_config.json",
					     "adapter_model.safetensors",
					     "fused_expert_lora.safetensors" };

	for (size_t i = 0; i < MOE_COUNT(names); i++)
		if (!strcmp(name, names[i]))
			return true;
	return !strncmp(name, "checkpoint-", 11) || !strncmp(name, "tokens-", 7);
}

static bool skip(const char *path, void *user)
{
	const struct moe_merge_shards *m = user;

	return moe_safetensors_has_file(m->base, path) || is_of_training(strrchr(path, '/') + 1);
}

static enum moe_status advance(const char *path, int64_t bytes, void *user)
{
	return moe_merge_advance(user, path, bytes);
}

/* ---- which tensors ---- */

/* Whichever name it has; absent ones stay so (experts are fused, or they are not). */
static enum moe_status mark(struct moe_merge_shards *m, const struct moe_rewrite *r, enum moe_role role,
			    int layer, int expert)
{
	char name[MOE_TENSOR_NAME_MAX];

	for (int v = 0; moe_arch_tensor_name(m->arch, role, layer, expert, v, name); v++) {
		const struct moe_st_tensor *t = moe_safetensors_find(m->base, name);

		if (!t || t->dtype > MOE_F64)
			continue;
		m->job[t - moe_safetensors_at(m->base, 0)] = (struct moe_merge_job){
			.rewrite = r, .role = role, .layer = layer, .expert = expert
		};
		m->merged++;
		return MOE_OK;
	}
	return moe_rewrite_mark_coded(m, r, role, layer, expert);
}

static enum moe_status mark_all(struct moe_merge_shards *m, const struct moe_rewrite *r)
{
	for (int role = 0; role < MOE_ROLE_COUNT; role++) {
		bool model = role <= MOE_ROLE_LM_HEAD, expert = moe_role_is_expert((enum moe_role)role);

		if (!r->replaces(r->user, (enum moe_role)role))
			continue;
		for (int l = model ? -1 : 0; l < (model ? 0 : m->arch->n_layers); l++)
			for (int e = expert ? 0 : -1; e < (expert ? m->arch->n_experts : 0); e++)
				MOE_TRY(mark(m, r, (enum moe_role)role, l, e));
	}
	return MOE_OK;
}

/* ---- their values ---- */

struct piece {
	enum moe_role role;
	int layer, expert;
	int64_t rows, cols;
};

static enum moe_status write_rows(struct moe_merge_shards *m, struct moe_file_writer *w,
				  const struct moe_st_tensor *t, const struct moe_rewrite *r,
				  const struct piece *p)
{
	size_t size = moe_dtype_size(t->dtype);
	int64_t lines = moe_role_is_expert(p->role) ? p->rows : MOE_MAX(((int64_t)1 << 18) / p->cols, 1);
	float *wide = moe_alloc((size_t)(lines * p->cols), sizeof *wide + size);
	enum moe_status st = wide ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "no memory for %s", t->name);

	for (int64_t row = 0; st == MOE_OK && row < p->rows; row += lines) {
		int64_t n = MOE_MIN(lines, p->rows - row);
		char *narrow = (char *)(wide + lines * p->cols);

		r->rows(r->user, p->role, p->layer, p->expert, row, n, wide);
		st = moe_merge_check(t, wide, (size_t)(n * p->cols));
		moe_from_f32(narrow, t->dtype, wide, (size_t)(n * p->cols));
		if (st == MOE_OK)
			st = moe_file_append(w, narrow, (size_t)(n * p->cols) * size);
		if (st == MOE_OK)
			st = moe_merge_advance(m, t->name, n * p->cols * (int64_t)size);
	}
	moe_free(wide);
	return st;
}

enum moe_status moe_rewrite_tensor(struct moe_merge_shards *m, struct moe_file_writer *w,
				   const struct moe_st_tensor *t, const struct moe_merge_job *job)
{
	bool gate_up = job->role == MOE_ROLE_EXPERTS_GATE_UP;
	struct piece p = { .role = job->role,
			   .layer = job->layer,
			   .expert = job->expert,
			   .rows = t->ndim > 1 ? t->shape[t->ndim - 2] : 1,
			   .cols = t->shape[t->ndim - 1] };

	if (job->coded)
		return moe_rewrite_coded_tensor(m, w, t, job);
	if (t->ndim < 3)
		return write_rows(m, w, t, job->rewrite, &p);
	p.rows /= gate_up ? 2 : 1;
	for (p.expert = 0; p.expert < t->shape[0]; p.expert++) {
		p.role = gate_up ? MOE_ROLE_EXPERT_GATE : MOE_ROLE_EXPERT_DOWN;
		MOE_TRY(write_rows(m, w, t, job->rewrite, &p));
		p.role = MOE_ROLE_EXPERT_UP;
		if (gate_up)
			MOE_TRY(write_rows(m, w, t, job->rewrite, &p));
	}
	return MOE_OK;
}

/* ---- all of it ---- */

static enum moe_status move(const char *from_dir, const char *to_dir, const char *name)
{
	char *from = moe_path_join(from_dir, name), *to = moe_path_join(to_dir, name);
	enum moe_status st =
		from && to ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", to_dir);

	if (st == MOE_OK && moe_path_is_dir(to)) /* rename does not replace one */
		st = moe_tree_remove(to);
	if (st == MOE_OK && rename(from, to) != 0)
		st = moe_fail(MOE_ERR_IO, "%s: cannot be given its name %s: %s", from, to,
			      strerror(errno));
	moe_free(from);
	moe_free(to);
	return st;
}

/* Until the last of its files is there, the folder is no model. */
static enum moe_status publish(const char *from, const char *dir)
{
	static const char *const first[] = { CONFIG, MOE_INDEX_NAME, "model.safetensors" };
	enum moe_status st = MOE_OK;
	struct dirent *e;
	DIR *d;

	for (size_t i = 0; i < MOE_COUNT(first); i++) { /* of a model that was here before */
		char *path = moe_path_join(dir, first[i]);

		if (!path)
			return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
		st = moe_tree_remove(path);
		moe_free(path);
		MOE_TRY(st);
	}
	MOE_TRY(moe_dir_sync(dir));
	d = opendir(from);
	if (!d)
		return moe_fail(MOE_ERR_IO, "%s: cannot list the folder: %s", from,
				strerror(errno));
	while (st == MOE_OK && (e = readdir(d)))
		if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && strcmp(e->d_name, CONFIG))
			st = move(from, dir, e->d_name);
	closedir(d);
	if (st == MOE_OK)
		st = moe_dir_sync(dir);
	if (st == MOE_OK)
		st = move(from, dir, CONFIG);
	return st == MOE_OK ? moe_dir_sync(dir) : st;
}

static enum moe_status fill(struct moe_merge_shards *m, const struct moe_rewrite *r,
			    const char *path)
{
	const struct moe_folder_copy others = { skip, advance, m };

	m->arch = moe_calloc(1, sizeof *m->arch);
	if (!m->arch)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	MOE_TRY(moe_arch_load(r->base, m->arch));
	MOE_TRY(moe_safetensors_open(r->base, &m->base));
	MOE_TRY(moe_merge_plan(m, 0));
	MOE_TRY(mark_all(m, r));
	MOE_TRY(moe_folder_bytes(&others, r->base, &m->total));
	MOE_TRY(moe_folder_room(path, m->total, "the model"));
	MOE_TRY(moe_merge_write_shards(m, path));
	MOE_TRY(moe_folder_copy(&others, r->base, path));
	return moe_tree_sync(path);
}

enum moe_status moe_rewrite_checkpoint(const struct moe_rewrite *r)
{
	struct moe_merge_shards m = { .done = 0 };
	struct moe_staging staging = { 0 };
	enum moe_status st;
	char *temp;

	MOE_TRY(moe_dir_make(r->dir));
	temp = moe_path_join(r->dir, ".model");
	st = temp ? moe_staging_begin(temp, &staging)
		  : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", r->dir);
	if (st == MOE_OK)
		st = fill(&m, r, staging.path);
	if (st == MOE_OK)
		st = publish(staging.path, r->dir);
	moe_staging_abort(&staging);
	moe_merge_shards_free(&m);
	moe_free(temp);
	return st == MOE_OK ? st : moe_fail_in(st, "writing the model to %s", r->dir);
}

enum moe_status moe_rewrite_bytes(const char *base, int64_t *bytes)
{
	struct moe_merge_shards m = { .done = 0 };
	const struct moe_folder_copy others = { skip, advance, &m };
	enum moe_status st;

	MOE_TRY(moe_safetensors_open(base, &m.base));
	for (int i = 0; i < moe_safetensors_file_count(m.base); i++) {
		const void *data;
		size_t n;

		moe_safetensors_file_data(m.base, i, &data, &n);
		*bytes += (int64_t)n;
	}
	st = moe_folder_bytes(&others, base, bytes);
	moe_merge_shards_free(&m);
	return st;
}
