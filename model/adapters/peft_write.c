/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapters/peft.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors_writer.h"

#include <math.h>
#include <stdio.h>

#define GATE_UP "mlp.experts.gate_up_proj"
#define DOWN "mlp.experts.down_proj"
/* Tensors of an entry: A and B, for experts of gate_up and of down. */
#define MAX_ITEMS 4

/* The matrices that fill callbacks compose. */
struct fill {
	const struct moe_adapter_entry *entry;
	bool share_a;
};

/* rank and alpha of each target over all its layers. */
struct target_use {
	bool used;
	int64_t rank;
	double alpha;
};

static enum moe_status fill_gate_up_a(void *user, void *out)
{
	const struct fill *f = user;
	const struct moe_adapter_entry *e = f->entry;
	size_t n = (size_t)(e->rank * e->hidden);
	float *a = out;

	for (int64_t x = 0; x < e->n_experts; x++, a += 2 * n) {
		memcpy(a, e->gate_a + (size_t)x * n, n * sizeof *a);
		memcpy(a + n, e->up_a + (size_t)x * n, n * sizeof *a);
	}
	return MOE_OK;
}

/* out[row, (first + j) * E + e] = b[e, row, j] for rows rows; out has columns columns. */
static void scatter_b(float *out, int64_t columns, int64_t first, const float *b,
		      const struct moe_adapter_entry *e, int64_t rows)
{
	for (int64_t x = 0; x < e->n_experts; x++)
		for (int64_t row = 0; row < rows; row++)
			for (int64_t j = 0; j < e->rank; j++)
				out[row * columns + (first + j) * e->n_experts + x] =
					b[(x * rows + row) * e->rank + j];
}

static enum moe_status fill_gate_up_b(void *user, void *out)
{
	const struct fill *f = user;
	const struct moe_adapter_entry *e = f->entry;
	int64_t columns = (f->share_a ? 1 : 2) * e->rank * e->n_experts;
	float *up = (float *)out + e->intermediate * columns;

	memset(out, 0, (size_t)(2 * e->intermediate * columns) * sizeof *up);
	scatter_b(out, columns, 0, e->gate_b, e, e->intermediate);
	scatter_b(up, columns, f->share_a ? 0 : e->rank, e->up_b, e, e->intermediate);
	return MOE_OK;
}

static enum moe_status fill_down_b(void *user, void *out)
{
	const struct fill *f = user;
	const struct moe_adapter_entry *e = f->entry;

	scatter_b(out, e->rank * e->n_experts, 0, e->down_b, e, e->hidden);
	return MOE_OK;
}

/* Adds one matrix called base_model.model.model.layers.N.<module>.lora_<ab>.weight. */
static enum moe_status add_item(struct moe_st_item *it, const struct moe_adapter_entry *e,
				const char *module, char ab, int64_t rows, int64_t columns)
{
	char *name = moe_format("base_model.model.model.layers.%d.%s.lora_%c.weight", e->layer,
				module, ab);

	*it = (struct moe_st_item){
		.name = name, .dtype = MOE_F32, .ndim = 2, .shape = { rows, columns }
	};
	return name ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory for tensor names");
}

/* gate_up is wrapped first, so PEFT calls it base_layer of the wrapper of down. */
static enum moe_status add_experts(struct moe_st_item *it, struct fill *f)
{
	const struct moe_adapter_entry *e = f->entry;
	int64_t down = e->rank * e->n_experts, gate_up = down * (f->share_a ? 1 : 2);

	MOE_TRY(add_item(&it[0], e, "mlp.experts.base_layer", 'A', gate_up, e->hidden));
	MOE_TRY(add_item(&it[1], e, "mlp.experts.base_layer", 'B', 2 * e->intermediate, gate_up));
	MOE_TRY(add_item(&it[2], e, "mlp.experts", 'A', down, e->intermediate));
	MOE_TRY(add_item(&it[3], e, "mlp.experts", 'B', e->hidden, down));
	if (f->share_a)
		it[0].data = e->gate_a;
	else
		it[0].fill = fill_gate_up_a;
	it[1].fill = fill_gate_up_b;
	it[2].data = e->down_a;
	it[3].fill = fill_down_b;
	for (int i = 0; i < MAX_ITEMS; i++)
		it[i].user = f;
	return MOE_OK;
}

static enum moe_status add_attention(struct moe_st_item *it, const struct moe_adapter_entry *e)
{
	char module[64];

	snprintf(module, sizeof module, "self_attn.%s", moe_adapter_target_name(e->target));
	MOE_TRY(add_item(&it[0], e, module, 'A', e->rank, e->in));
	MOE_TRY(add_item(&it[1], e, module, 'B', e->out, e->rank));
	it[0].data = e->a;
	it[1].data = e->b;
	return MOE_OK;
}

static enum moe_status check_entry(const struct moe_adapter *adapter,
				   const struct moe_adapter_entry *e)
{
	bool complete;

	if (e->layer < 0 || (unsigned)e->target >= MOE_ADAPTER_TARGETS)
		return moe_fail(MOE_ERR_ARG, "adapter entry of layer %d has target %d", e->layer,
				(int)e->target);
	if (e->rank < 1 || !isfinite(e->alpha))
		return moe_fail(MOE_ERR_ARG, "%s of layer %d has rank %lld, alpha %g",
				moe_adapter_target_name(e->target), e->layer, (long long)e->rank,
				e->alpha);
	if (e->target == MOE_ADAPTER_EXPERTS)
		complete = e->gate_a && (adapter->share_a || e->up_a) && e->down_a && e->gate_b &&
			   e->up_b && e->down_b && e->n_experts > 0 && e->hidden > 0 &&
			   e->intermediate > 0;
	else
		complete = e->a && e->b && e->in > 0 && e->out > 0;
	if (!complete)
		return moe_fail(MOE_ERR_ARG, "%s of layer %d lacks an array or a size",
				moe_adapter_target_name(e->target), e->layer);
	return MOE_OK;
}

static enum moe_status collect_use(const struct moe_adapter *adapter, struct target_use *use)
{
	if (adapter->rank < 1 || !isfinite(adapter->alpha) || !adapter->n_entries)
		return moe_fail(MOE_ERR_ARG, "adapter has rank %lld, alpha %g, %zu entries",
				(long long)adapter->rank, adapter->alpha, adapter->n_entries);
	for (size_t i = 0; i < adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &adapter->entries[i];
		struct target_use *u;

		MOE_TRY(check_entry(adapter, e));
		u = &use[e->target];
		if (u->used && (u->rank != e->rank || u->alpha != e->alpha))
			return moe_fail(MOE_ERR_ARG,
					"%s of layer %d has another rank or alpha than "
					"in the layers before",
					moe_adapter_target_name(e->target), e->layer);
		*u = (struct target_use){ true, e->rank, e->alpha };
	}
	return MOE_OK;
}

static enum moe_status write_tensors(const char *path, const struct moe_adapter *adapter)
{
	const struct moe_st_meta meta = { "format", "pt" };
	struct moe_st_item *items = moe_calloc(adapter->n_entries * MAX_ITEMS, sizeof *items);
	struct fill *fills = moe_calloc(adapter->n_entries, sizeof *fills);
	enum moe_status status = MOE_OK;
	size_t n = 0;

	if (!items || !fills) {
		status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
		goto done;
	}
	for (size_t i = 0; i < adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &adapter->entries[i];
		bool experts = e->target == MOE_ADAPTER_EXPERTS;

		fills[i] = (struct fill){ e, adapter->share_a };
		MOE_TRY_GOTO(experts ? add_experts(items + n, &fills[i])
				     : add_attention(items + n, e),
			     status, done);
		n += experts ? 4 : 2;
	}
	status = moe_safetensors_write(path, items, n, &meta, 1);
done:
	for (size_t i = 0; items && i < adapter->n_entries * MAX_ITEMS; i++)
		moe_free((void *)(uintptr_t)items[i].name);
	moe_free(items);
	moe_free(fills);
	return status;
}

/* rank_pattern and alpha_pattern for what differs from r and lora_alpha. */
static bool add_pattern(cJSON *ranks, cJSON *alphas, const struct moe_adapter *adapter,
			const char *key, int64_t rank, double alpha)
{
	if (rank != adapter->rank && !cJSON_AddNumberToObject(ranks, key, (double)rank))
		return false;
	return alpha == adapter->alpha || cJSON_AddNumberToObject(alphas, key, alpha);
}

static bool add_patterns(cJSON *root, const struct moe_adapter *adapter,
			 const struct target_use *use)
{
	cJSON *ranks = cJSON_AddObjectToObject(root, "rank_pattern");
	cJSON *alphas = cJSON_AddObjectToObject(root, "alpha_pattern");
	const struct target_use *x = &use[MOE_ADAPTER_EXPERTS];
	/* twice the rank at the same scaling */
	double grow = adapter->share_a ? 1 : adapter->rslora ? sqrt(2) : 2;

	if (!ranks || !alphas)
		return false;
	for (int t = 0; t < MOE_ADAPTER_EXPERTS; t++)
		if (use[t].used && !add_pattern(ranks, alphas, adapter,
						moe_adapter_target_name((enum moe_adapter_target)t),
						use[t].rank, use[t].alpha))
			return false;
	return !x->used || (add_pattern(ranks, alphas, adapter, GATE_UP,
					x->rank * (adapter->share_a ? 1 : 2), x->alpha * grow) &&
			    add_pattern(ranks, alphas, adapter, DOWN, x->rank, x->alpha));
}

static bool add_text(cJSON *list, const char *text)
{
	return cJSON_AddItemToArray(list, cJSON_CreateString(text));
}

static bool add_targets(cJSON *root, const struct target_use *use)
{
	/* an empty list, not null: PEFT then adds no modules of its own choice */
	cJSON *modules = cJSON_AddArrayToObject(root, "target_modules"), *parameters;

	if (!modules)
		return false;
	for (int t = 0; t < MOE_ADAPTER_EXPERTS; t++)
		if (use[t].used &&
		    !add_text(modules, moe_adapter_target_name((enum moe_adapter_target)t)))
			return false;
	if (!use[MOE_ADAPTER_EXPERTS].used)
		return cJSON_AddNullToObject(root, "target_parameters") != NULL;
	parameters = cJSON_AddArrayToObject(root, "target_parameters");
	return parameters && add_text(parameters, GATE_UP) && add_text(parameters, DOWN);
}

/* What PEFT 0.21.2 needs; absent keys take its defaults. */
static bool fill_config(cJSON *root, const struct moe_adapter *adapter,
			const struct target_use *use)
{
	return cJSON_AddStringToObject(root, "peft_type", "LORA") &&
	       cJSON_AddStringToObject(root, "peft_version", "0.21.2") &&
	       cJSON_AddStringToObject(root, "task_type", "CAUSAL_LM") &&
	       cJSON_AddNullToObject(root, "auto_mapping") &&
	       (adapter->base_model ? cJSON_AddStringToObject(root, "base_model_name_or_path",
							      adapter->base_model)
				    : cJSON_AddNullToObject(root, "base_model_name_or_path")) &&
	       cJSON_AddNullToObject(root, "revision") &&
	       cJSON_AddTrueToObject(root, "inference_mode") &&
	       cJSON_AddNumberToObject(root, "r", (double)adapter->rank) &&
	       cJSON_AddNumberToObject(root, "lora_alpha", adapter->alpha) &&
	       /* PEFT refuses expert adapters with dropout, also for inference */
	       cJSON_AddNumberToObject(root, "lora_dropout", 0.0) &&
	       cJSON_AddStringToObject(root, "bias", "none") &&
	       cJSON_AddFalseToObject(root, "fan_in_fan_out") &&
	       cJSON_AddTrueToObject(root, "init_lora_weights") &&
	       cJSON_AddNullToObject(root, "layers_to_transform") &&
	       cJSON_AddNullToObject(root, "layers_pattern") &&
	       cJSON_AddNullToObject(root, "modules_to_save") &&
	       cJSON_AddFalseToObject(root, "lora_bias") &&
	       cJSON_AddFalseToObject(root, "use_dora") &&
	       cJSON_AddBoolToObject(root, "use_rslora", adapter->rslora) &&
	       add_patterns(root, adapter, use) && add_targets(root, use);
}

static enum moe_status write_config(const char *path, const struct moe_adapter *adapter,
				    const struct target_use *use)
{
	cJSON *root = cJSON_CreateObject();
	enum moe_status status;

	if (!root || !fill_config(root, adapter, use))
		status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
	else
		status = moe_json_write(path, root);
	cJSON_Delete(root);
	return status;
}

enum moe_status moe_peft_write(const char *dir, const struct moe_adapter *adapter)
{
	struct target_use use[MOE_ADAPTER_TARGETS] = { 0 };
	char *tensors = moe_path_join(dir, "adapter_model.safetensors");
	char *config = moe_path_join(dir, "adapter_config.json");
	enum moe_status status;

	if (!tensors || !config) {
		status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
		goto done;
	}
	MOE_TRY_GOTO(collect_use(adapter, use), status, done);
	MOE_TRY_GOTO(moe_dir_make(dir), status, done);
	MOE_TRY_GOTO(write_tensors(tensors, adapter), status, done);
	status = write_config(config, adapter, use);
done:
	moe_free(tensors);
	moe_free(config);
	return status;
}
