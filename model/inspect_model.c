/* SPDX-License-Identifier: Apache-2.0 */
/* Models and adapters, for inspect. */
#include "model/inspect.h"
#include "model/adapters/adapter_form.h"
#include "model/arch.h"
#include "model/file.h"
#include "model/quantised.h"
#include "model/readers/gguf.h"

#include <dirent.h>
#include <stdlib.h>

static enum moe_status no_memory(bool good)
{
	return good ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory");
}

/* ---- model ---- */

static bool add_arch(const struct moe_arch *a, cJSON *o)
{
	struct moe_param_count n;
	cJSON *groups;
	bool good;

	moe_arch_count_params(a, &n);
	good = cJSON_AddStringToObject(o, "arch", a->name) &&
	       moe_inspect_number(o, "params", n.total) &&
	       moe_inspect_number(o, "active_params", n.active) &&
	       moe_inspect_number(o, "layers", a->n_layers) &&
	       moe_inspect_number(o, "moe_layers", moe_arch_moe_layers(a)) &&
	       moe_inspect_number(o, "hidden", a->hidden) &&
	       moe_inspect_number(o, "heads", a->n_heads) &&
	       moe_inspect_number(o, "kv_heads", a->n_kv_heads) &&
	       moe_inspect_number(o, "head_dim", a->head_dim) &&
	       moe_inspect_number(o, "vocabulary", a->vocab) &&
	       moe_inspect_number(o, "max_positions", a->max_positions) &&
	       moe_inspect_number(o, "experts", a->n_experts) &&
	       moe_inspect_number(o, "experts_per_token", a->top_k) &&
	       moe_inspect_number(o, "moe_intermediate", a->moe_intermediate) &&
	       moe_inspect_number(o, "shared_intermediate", a->shared_intermediate) &&
	       moe_inspect_number(o, "intermediate", a->intermediate) &&
	       cJSON_AddBoolToObject(o, "tied_embeddings", a->tie_embeddings);
	groups = cJSON_AddObjectToObject(o, "params_by_group");
	for (int g = 0; good && groups && g < MOE_PARAMS_COUNT; g++)
		if (n.groups[g])
			good = moe_inspect_number(
				groups, moe_param_group_name((enum moe_param_group)g), n.groups[g]);
	return good && groups;
}

/* Codes stand for the weight of this plain name. */
static bool is_coded(const struct moe_arch *a, const struct moe_safetensors *st, enum moe_role role,
		     int layer, const char *name)
{
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(a, role, layer, shape);
	struct moe_st_quantised q;
	bool found = false;

	return moe_st_quantised_find(st, name, ndim == 3 ? shape[0] : 0, shape[ndim - 2],
				     shape[ndim - 1], &q, &found) == MOE_OK &&
	       found;
}

/* How the first MoE layer's experts lie in the files. */
static const char *experts_stored(const struct moe_arch *a, const struct moe_safetensors *st)
{
	char name[MOE_TENSOR_NAME_MAX];
	int layer = 0;

	while (layer < a->n_layers && !a->layer_is_moe[layer])
		layer++;
	for (int v = 0; moe_arch_tensor_name(a, MOE_ROLE_EXPERTS_GATE_UP, layer, -1, v, name); v++)
		if (moe_safetensors_find(st, name))
			return "fused";
	for (int v = 0; moe_arch_tensor_name(a, MOE_ROLE_EXPERT_GATE, layer, 0, v, name); v++)
		if (moe_safetensors_find(st, name))
			return "one by one";
	for (int v = 0; moe_arch_tensor_name(a, MOE_ROLE_EXPERTS_GATE_UP, layer, -1, v, name); v++)
		if (is_coded(a, st, MOE_ROLE_EXPERTS_GATE_UP, layer, name))
			return "fused";
	for (int v = 0; moe_arch_tensor_name(a, MOE_ROLE_EXPERT_GATE, layer, 0, v, name); v++)
		if (is_coded(a, st, MOE_ROLE_EXPERT_GATE, layer, name))
			return "one by one";
	return "absent";
}

static bool has_weights(const char *dir)
{
	struct dirent *e;
	bool found = false;
	DIR *d = opendir(dir);

	while (d && !found && (e = readdir(d)))
		found = strstr(e->d_name, ".safetensors") != NULL;
	if (d)
		closedir(d);
	return found;
}

enum moe_status moe_inspect_model(const char *path, cJSON *o)
{
	struct moe_arch *a = moe_calloc(1, sizeof *a);
	struct moe_safetensors *st = NULL;
	enum moe_status status = a ? moe_arch_load(path, a) : no_memory(false);
	bool good = true, known = status == MOE_OK;

	if (status == MOE_ERR_UNSUPPORTED) /* its files can still be looked at */
		good = cJSON_AddStringToObject(o, "not_supported", moe_last_error());
	else if (known)
		good = add_arch(a, o);
	else
		goto done;
	status = no_memory(good);
	if (status == MOE_OK && (moe_path_is_dir(path) || moe_gguf_is(path))) {
		status = moe_safetensors_open(path, &st);
		if (status == MOE_ERR_IO && !has_weights(path)) /* a config.json alone */
			status = no_memory(moe_inspect_number(o, "files", 0));
	}
	if (status == MOE_OK && st && known && a->n_experts)
		good = cJSON_AddStringToObject(o, "experts_stored", experts_stored(a, st));
	if (status == MOE_OK && st)
		status = no_memory(good && moe_inspect_dtypes(st, o));
done:
	moe_safetensors_close(st);
	moe_free(a);
	return status;
}

/* ---- adapter ---- */

/* A row per target: rank, scaling, and how many layers have it. */
static bool add_target(const struct moe_adapter *a, enum moe_adapter_target t, cJSON *list)
{
	struct moe_adapter one = *a;
	const struct moe_adapter_entry *first = NULL;
	bool alike = true, good;
	int64_t params = 0;
	int layers = 0;
	cJSON *o;

	for (size_t i = 0; i < a->n_entries; i++) {
		const struct moe_adapter_entry *e = &a->entries[i];

		if (e->target != t)
			continue;
		first = first ? first : e;
		alike = alike && e->rank == first->rank && e->alpha == first->alpha &&
			e->gate_up_rank == first->gate_up_rank;
		layers++;
		one.n_entries = 1;
		one.entries = (struct moe_adapter_entry *)(uintptr_t)e;
		params += moe_adapter_count_params(&one);
	}
	if (!first)
		return true;
	o = cJSON_CreateObject();
	good = o && cJSON_AddItemToArray(list, o) &&
	       cJSON_AddStringToObject(o, "target", moe_adapter_target_name(t)) &&
	       moe_inspect_number(o, "layers", layers) &&
	       (first->weight ? cJSON_AddTrueToObject(o, "weight") != NULL
			      : moe_inspect_number(o, "rank", first->rank)) &&
	       (!first->rank ||
		cJSON_AddNumberToObject(o, "scaling", moe_adapter_scaling(a, first)));
	if (good && t == MOE_ADAPTER_EXPERTS)
		good = moe_inspect_number(o, "gate_up_rank", first->gate_up_rank) &&
		       (!first->gate_up_rank ||
			cJSON_AddNumberToObject(o, "gate_up_scaling",
						moe_adapter_gate_up_scaling(a, first))) &&
		       moe_inspect_number(o, "experts", first->n_experts);
	return good && moe_inspect_number(o, "params", params) &&
	       (alike || cJSON_AddTrueToObject(o, "ranks_differ"));
}

/* Steps of the checkpoints beside an adapter of ours. */
static bool add_checkpoints(const char *dir, cJSON *o)
{
	cJSON *list = NULL;
	struct dirent *e;
	DIR *d = opendir(dir);
	bool good = true;

	while (d && good && (e = readdir(d))) {
		char *end;
		long step;

		if (strncmp(e->d_name, "checkpoint-", 11))
			continue;
		step = strtol(e->d_name + 11, &end, 10);
		if (*end || end == e->d_name + 11)
			continue;
		if (!list)
			list = cJSON_AddArrayToObject(o, "checkpoints");
		good = list && cJSON_AddItemToArray(list, cJSON_CreateNumber((double)step));
	}
	if (d)
		closedir(d);
	return good;
}

enum moe_status moe_inspect_adapter(const char *path, cJSON *o)
{
	struct moe_adapter *a;
	cJSON *list;
	bool good;

	MOE_TRY(moe_adapter_read(path, &a));
	good = cJSON_AddStringToObject(o, "form", a->form) &&
	       cJSON_AddStringToObject(o, "base_model", a->base_model ? a->base_model : "") &&
	       moe_inspect_number(o, "params", moe_adapter_count_params(a)) &&
	       moe_inspect_number(o, "rank", a->rank) &&
	       cJSON_AddNumberToObject(o, "alpha", a->alpha) &&
	       cJSON_AddBoolToObject(o, "rslora", a->rslora) &&
	       cJSON_AddBoolToObject(o, "gate_and_up_share_a", a->share_a);
	list = cJSON_AddArrayToObject(o, "targets");
	for (int t = 0; good && list && t < MOE_ADAPTER_TARGETS; t++)
		good = add_target(a, (enum moe_adapter_target)t, list);
	good = good && list && add_checkpoints(path, o);
	moe_adapter_free(a);
	return no_memory(good);
}
