/* SPDX-License-Identifier: Apache-2.0 */
#include "model/merge_quantised.h"
#include "model/arch_reader.h"
#include "model/convert.h"
#include "model/merge_math.h"

#include <stdlib.h>
#include <sys/stat.h>

/* A tensor that gets something, under one of its names. */
struct name {
	char text[MOE_TENSOR_NAME_MAX];
	size_t job;
};

struct jobs {
	const struct moe_merge_shards *m;
	struct moe_merge_job *job;
	bool *found; /* [jobs] */
	size_t n_jobs;
	struct name *name; /* sorted */
	size_t n_names;
};

static int by_text(const void *a, const void *b)
{
	return strcmp(((const struct name *)a)->text, ((const struct name *)b)->text);
}

static const void *find(void *user, const char *text)
{
	struct jobs *j = user;
	struct name key;
	const struct name *n;

	if (strlen(text) >= sizeof key.text)
		return NULL;
	strcpy(key.text, text);
	n = bsearch(&key, j->name, j->n_names, sizeof key, by_text);
	if (!n)
		return NULL;
	j->found[n->job] = true;
	return &j->job[n->job];
}

static enum moe_status apply(const void *change, int64_t expert, int64_t row0, int64_t n, int64_t k, float *x)
{
	float *delta = moe_alloc((size_t)k, sizeof *delta);

	if (!delta)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	moe_merge_add(change, expert, row0, n, k, x, delta);
	moe_free(delta);
	return MOE_OK;
}

/* ---- which tensors ---- */

static void add(struct jobs *j, enum moe_role role, const struct moe_adapter_entry *e, int expert)
{
	char text[MOE_TENSOR_NAME_MAX];

	moe_merge_job_set(&j->job[j->n_jobs], j->m->adapter, e, role, expert);
	for (int v = 0; moe_arch_tensor_name(j->m->arch, role, e->layer, expert, v, text); v++) {
		strcpy(j->name[j->n_names].text, text);
		j->name[j->n_names++].job = j->n_jobs;
	}
	j->n_jobs++;
}

/* Fused first, then one by one: a checkpoint has either. */
static void add_experts(struct jobs *j, const struct moe_adapter_entry *e)
{
	if (e->gate_up_rank)
		add(j, MOE_ROLE_EXPERTS_GATE_UP, e, -1);
	if (e->rank)
		add(j, MOE_ROLE_EXPERTS_DOWN, e, -1);
	for (int x = 0; x < e->n_experts; x++) {
		if (e->gate_up_rank) {
			add(j, MOE_ROLE_EXPERT_GATE, e, x);
			add(j, MOE_ROLE_EXPERT_UP, e, x);
		}
		if (e->rank)
			add(j, MOE_ROLE_EXPERT_DOWN, e, x);
	}
}

static void free_jobs(struct jobs *j)
{
	moe_free(j->job);
	moe_free(j->found);
	moe_free(j->name);
}

static enum moe_status make_jobs(const struct moe_merge_shards *m, struct jobs *j)
{
	const struct moe_adapter *a = m->adapter;
	size_t most = 0;

	*j = (struct jobs){ .m = m };
	for (size_t i = 0; i < a->n_entries; i++)
		most += a->entries[i].target == MOE_ADAPTER_EXPERTS
				? 2 + 3 * (size_t)a->entries[i].n_experts
				: 1;
	j->job = moe_calloc(most, sizeof *j->job);
	j->found = moe_calloc(most, sizeof *j->found);
	j->name = moe_calloc(most * MOE_NAME_VARIANTS, sizeof *j->name);
	if (!j->job || !j->found || !j->name) {
		free_jobs(j);
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	}
	for (size_t i = 0; i < a->n_entries; i++) {
		const struct moe_adapter_entry *e = &a->entries[i];

		if (e->target == MOE_ADAPTER_EXPERTS)
			add_experts(j, e);
		else
			add(j, moe_adapter_target_role(e->target), e, -1);
	}
	qsort(j->name, j->n_names, sizeof *j->name, by_text);
	return MOE_OK;
}

/* Whether the job's tensor is in the fused one of its layer. */
static bool is_fused(const struct jobs *j, size_t i)
{
	const struct moe_merge_job *job = &j->job[i];
	enum moe_role role = job->role == MOE_ROLE_EXPERT_DOWN ? MOE_ROLE_EXPERTS_DOWN
							       : MOE_ROLE_EXPERTS_GATE_UP;

	for (size_t k = i; moe_role_is_expert(job->role) && k-- > 0 && j->job[k].entry == job->entry;)
		if (j->job[k].role == role)
			return j->found[k];
	return false;
}

/* Every matrix of the adapter has its tensor. */
static enum moe_status check_found(const struct jobs *j)
{
	for (size_t i = 0; i < j->n_jobs; i++) {
		enum moe_role role = j->job[i].role;
		char text[MOE_TENSOR_NAME_MAX];

		if (j->found[i] || is_fused(j, i) || role == MOE_ROLE_EXPERTS_GATE_UP ||
		    role == MOE_ROLE_EXPERTS_DOWN)
			continue;
		moe_arch_tensor_name(j->m->arch, role, j->job[i].entry->layer, j->job[i].expert, 0,
				     text);
		return moe_fail(MOE_ERR_FORMAT,
				"tensor '%s' is missing or of a dtype that cannot be merged into, "
				"and the adapter changes it",
				text);
	}
	return MOE_OK;
}

/* ---- merging ---- */

static enum moe_status plan_keep(const struct moe_merge_shards *m, struct jobs *j, bool *quantised)
{
	const struct moe_convert_change change = { find, apply, j };
	struct moe_convert_plan plan = { .change = &change };
	struct moe_safetensors *st = NULL;
	enum moe_status status;

	MOE_TRY(moe_convert_target_find("keep", NULL, &plan.target));
	MOE_TRY(moe_safetensors_open(m->model, &st));
	status = moe_convert_plan_make(&plan, st, 0);
	for (size_t i = 0; status == MOE_OK && i < plan.n_sources; i++)
		*quantised = *quantised || !plan.source[i].plain;
	moe_convert_plan_free(&plan);
	return status;
}

enum moe_status moe_merge_is_quantised(const struct moe_merge_shards *m, bool *out)
{
	struct jobs j;
	enum moe_status status;

	*out = false;
	MOE_TRY(make_jobs(m, &j));
	status = plan_keep(m, &j, out);
	free_jobs(&j);
	return status;
}

/* The adapter's file, its size and when it was changed. */
static char *describe(const char *adapter)
{
	char *file = moe_format("%s/adapter_model.safetensors", adapter);
	struct stat st = { 0 };
	char *text;

	if (file)
		stat(file, &st);
	text = file ? moe_format("adapter %s, %lld bytes, changed %lld.%09ld", file,
				 (long long)st.st_size, (long long)st.st_mtim.tv_sec,
				 st.st_mtim.tv_nsec)
		    : NULL;
	moe_free(file);
	return text;
}

static enum moe_status run(struct jobs *j, const struct moe_merge_params *p,
			   struct moe_convert_model_result *r)
{
	const struct moe_convert_change change = { find, apply, j };
	const struct moe_convert_model_params c = { .struct_size = sizeof c,
						    .in = p->model,
						    .out = p->output_dir,
						    .weights = p->weights ? p->weights : "keep",
						    .max_shard_bytes = p->max_shard_bytes,
						    .progress = p->progress,
						    .user = p->user };
	char *note = describe(p->adapter);
	bool quantised = false;
	enum moe_status status =
		note ? plan_keep(j->m, j, &quantised) : moe_fail(MOE_ERR_NOMEM, "out of memory");

	if (status == MOE_OK)
		status = check_found(j);
	if (status == MOE_OK)
		status = moe_convert_model_run(&c, &change, note, r);
	moe_free(note);
	return status;
}

enum moe_status moe_merge_quantised(const struct moe_merge_shards *m,
				    const struct moe_merge_params *p,
				    struct moe_merge_result *result)
{
	struct moe_convert_model_result r = { .struct_size = sizeof r };
	struct jobs j;
	enum moe_status status;

	MOE_TRY(make_jobs(m, &j));
	status = run(&j, p, &r);
	for (size_t i = 0; status == MOE_OK && i < j.n_jobs; i++)
		result->merged += j.found[i];
	free_jobs(&j);
	MOE_TRY(status);
	result->tensors = r.tensors;
	result->shards = r.shards;
	result->bytes = r.bytes;
	result->seconds = r.seconds;
	result->error = r.error;
	result->worst_error = r.worst_error;
	return MOE_OK;
}
