/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapters/adapter_config.h"
#include "model/adapters/pattern.h"

#include <strings.h>

/* ---- reading ---- */

static enum moe_status refuse_true(const cJSON *config, const char *key)
{
	bool set = false;

	MOE_TRY(moe_json_opt_bool(config, key, &set));
	return set ? moe_fail(MOE_ERR_UNSUPPORTED, "%s is not implemented", key) : MOE_OK;
}

/* PEFT saves every module whose name ends so: only routers can be had whole. */
static enum moe_status check_saved(const cJSON *saved)
{
	const cJSON *c;

	if (saved && !cJSON_IsArray(saved))
		return moe_fail(MOE_ERR_FORMAT, "modules_to_save is not a list");
	cJSON_ArrayForEach(c, saved)
	{
		const char *text = cJSON_IsString(c) ? c->valuestring : "";
		size_t n = strlen(text);

		if (strcmp(text, "gate") && (n < 5 || strcmp(text + n - 5, ".gate")))
			return moe_fail(MOE_ERR_UNSUPPORTED,
					"modules_to_save names '%.64s': only routers (mlp.gate) are implemented",
					text);
	}
	return MOE_OK;
}

/* What changes the arithmetic, and is not done here. */
static enum moe_status refuse_variants(const cJSON *c)
{
	static const char *const flags[] = { "use_dora", "lora_bias", "fan_in_fan_out",
					     "use_qalora", "use_bdlora" };
	static const char *const objects[] = { "layer_replication",
					       "trainable_token_indices",
					       "alora_invocation_tokens",
					       "arrow_config",
					       "kasa_config",
					       "velora_config" };
	const char *bias = "none";

	MOE_TRY(moe_json_opt_text(c, "bias", &bias));
	if (strcmp(bias, "none") != 0)
		return moe_fail(MOE_ERR_UNSUPPORTED, "bias '%.64s' is not implemented", bias);
	for (size_t i = 0; i < MOE_COUNT(flags); i++)
		MOE_TRY(refuse_true(c, flags[i]));
	MOE_TRY(check_saved(moe_json_get(c, "modules_to_save")));
	for (size_t i = 0; i < MOE_COUNT(objects); i++)
		if (moe_json_get(c, objects[i]))
			return moe_fail(MOE_ERR_UNSUPPORTED, "%s is not implemented", objects[i]);
	return MOE_OK;
}

/* The keys are expressions: none may be one that cannot be matched. */
static enum moe_status check_patterns(const cJSON *config, const char *pattern)
{
	const cJSON *v = moe_json_get(config, pattern), *c;
	regex_t re;

	if (v && !cJSON_IsObject(v))
		return moe_fail(MOE_ERR_FORMAT, "%s is not an object", pattern);
	cJSON_ArrayForEach(c, v)
	{
		MOE_TRY(moe_pattern_compile(c->string, true, pattern, &re));
		regfree(&re);
	}
	return MOE_OK;
}

static bool is_mixtral(const cJSON *config)
{
	const cJSON *v = moe_json_get(moe_json_get(config, "auto_mapping"), "base_model_class");

	return cJSON_IsString(v) && !strncmp(v->valuestring, "Mixtral", 7);
}

enum moe_status moe_adapter_config_read(const char *path, struct moe_adapter_config *config,
					struct moe_adapter *adapter)
{
	const char *type = NULL, *base = NULL;
	const cJSON *c;

	config->adapter = adapter;
	MOE_TRY(moe_json_read(path, &config->root));
	c = config->root;
	MOE_TRY(moe_json_opt_text(c, "peft_type", &type));
	if (!type || strcmp(type, "LORA") != 0)
		return moe_fail(MOE_ERR_UNSUPPORTED, "peft_type '%.64s' is not LORA",
				type ? type : "");
	MOE_TRY(moe_json_int(c, "r", 1, INT32_MAX, &adapter->rank));
	if (!moe_json_get(c, "lora_alpha"))
		return moe_fail(MOE_ERR_FORMAT, "lora_alpha is missing");
	MOE_TRY(moe_json_opt_real(c, "lora_alpha", &adapter->alpha));
	MOE_TRY(moe_json_opt_bool(c, "use_rslora", &adapter->rslora));
	MOE_TRY(check_patterns(c, "rank_pattern"));
	MOE_TRY(check_patterns(c, "alpha_pattern"));
	MOE_TRY(refuse_variants(c));
	MOE_TRY(moe_json_opt_text(c, "base_model_name_or_path", &base));
	adapter->mixtral = is_mixtral(c);
	adapter->base_model = base ? moe_strdup(base) : NULL;
	if (base && !adapter->base_model)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	return MOE_OK;
}

/* PEFT: re.match(rf"(.*\.)?({key})$", name); the first key of the pattern that matches counts. */
static enum moe_status pattern_value(const cJSON *config, const char *pattern, const char *name,
				     const cJSON **out)
{
	const cJSON *c;

	*out = NULL;
	cJSON_ArrayForEach(c, moe_json_get(config, pattern))
	{
		bool matches;
		regex_t re;

		MOE_TRY(moe_pattern_compile(c->string, true, pattern, &re));
		matches = moe_pattern_matches(&re, name);
		regfree(&re);
		if (matches) {
			*out = c;
			break;
		}
	}
	return MOE_OK;
}

enum moe_status moe_adapter_config_setting(const struct moe_adapter_config *config,
					   const char *name, int64_t *rank, double *alpha)
{
	const cJSON *r, *a;

	*rank = config->adapter->rank;
	*alpha = config->adapter->alpha;
	MOE_TRY(pattern_value(config->root, "rank_pattern", name, &r));
	MOE_TRY(pattern_value(config->root, "alpha_pattern", name, &a));
	if (r)
		MOE_TRY(moe_json_as_int(r, "rank_pattern", 1, INT32_MAX, rank));
	if (a && !cJSON_IsNumber(a))
		return moe_fail(MOE_ERR_FORMAT, "alpha_pattern of %s is not a number", name);
	if (a)
		*alpha = a->valuedouble;
	return MOE_OK;
}

static bool ends_with_name(const char *text, const char *name)
{
	size_t n = strlen(text), m = strlen(name);

	return n >= m && !strcmp(text + n - m, name) && (n == m || text[n - m - 1] == '.');
}

bool moe_adapter_config_names(const struct moe_adapter_config *config, const char *name)
{
	static const char *const lists[] = { "target_modules", "target_parameters" };
	const cJSON *c;

	for (size_t i = 0; i < MOE_COUNT(lists); i++)
		cJSON_ArrayForEach(c, moe_json_get(config->root,
						   lists[i])) if (cJSON_IsString(c) &&
								  ends_with_name(c->valuestring,
										 name)) return true;
	return false;
}

/* A target that the module's name ends with, in whatever layer. */
static bool targets_all(const cJSON *list, const char *module)
{
	const cJSON *c;

	cJSON_ArrayForEach(c, list) if (cJSON_IsString(c) &&
					ends_with_name(module, c->valuestring)) return true;
	return false;
}

bool moe_adapter_config_partial(const struct moe_adapter_config *config, const char *const *modules)
{
	const cJSON *list = moe_json_get(config->root, "target_modules");
	const cJSON *parameters = moe_json_get(config->root, "target_parameters");
	bool some_layers = moe_json_get(config->root, "layers_to_transform") != NULL;

	if (cJSON_IsString(list) && !strcasecmp(list->valuestring, "all-linear"))
		return some_layers;
	for (; *modules; modules++)
		if ((!some_layers && targets_all(list, *modules)) ||
		    targets_all(parameters, *modules))
			return false;
	return true;
}

/* ---- making ---- */

static enum moe_status done(bool complete)
{
	return complete ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory");
}

/* PEFT refuses expert adapters with dropout, also for inference. */
static double dropout_of(const struct moe_adapter *adapter)
{
	for (size_t i = 0; i < adapter->n_entries; i++)
		if (adapter->entries[i].target == MOE_ADAPTER_EXPERTS)
			return 0;
	return adapter->dropout;
}

/* What PEFT 0.21.2 needs; absent keys take its defaults. */
static bool fill(cJSON *root, const struct moe_adapter *adapter, int64_t rank, double alpha,
		 bool rslora)
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
	       cJSON_AddNumberToObject(root, "r", (double)rank) &&
	       cJSON_AddNumberToObject(root, "lora_alpha", alpha) &&
	       cJSON_AddNumberToObject(root, "lora_dropout", dropout_of(adapter)) &&
	       cJSON_AddStringToObject(root, "bias", "none") &&
	       cJSON_AddFalseToObject(root, "fan_in_fan_out") &&
	       cJSON_AddTrueToObject(root, "init_lora_weights") &&
	       cJSON_AddNullToObject(root, "layers_to_transform") &&
	       cJSON_AddNullToObject(root, "layers_pattern") &&
	       cJSON_AddNullToObject(root, "modules_to_save") &&
	       cJSON_AddFalseToObject(root, "lora_bias") &&
	       cJSON_AddFalseToObject(root, "use_dora") &&
	       cJSON_AddBoolToObject(root, "use_rslora", rslora) &&
	       cJSON_AddObjectToObject(root, "rank_pattern") &&
	       cJSON_AddObjectToObject(root, "alpha_pattern") &&
	       /* an empty list, not null: PEFT then adds no modules of its own choice */
	       cJSON_AddArrayToObject(root, "target_modules") &&
	       cJSON_AddArrayToObject(root, "target_parameters");
}

enum moe_status moe_adapter_config_new(const struct moe_adapter *adapter, int64_t rank,
				       double alpha, bool rslora, cJSON **out)
{
	*out = cJSON_CreateObject();
	return done(*out && fill(*out, adapter, rank, alpha, rslora));
}

enum moe_status moe_adapter_config_pattern(cJSON *root, const char *key, int64_t rank, double alpha)
{
	cJSON *ranks = cJSON_GetObjectItem(root, "rank_pattern");
	cJSON *alphas = cJSON_GetObjectItem(root, "alpha_pattern");

	if ((double)rank != cJSON_GetObjectItem(root, "r")->valuedouble &&
	    !cJSON_GetObjectItemCaseSensitive(ranks, key) &&
	    !cJSON_AddNumberToObject(ranks, key, (double)rank))
		return done(false);
	return done(alpha == cJSON_GetObjectItem(root, "lora_alpha")->valuedouble ||
		    cJSON_GetObjectItemCaseSensitive(alphas, key) ||
		    cJSON_AddNumberToObject(alphas, key, alpha));
}

enum moe_status moe_adapter_config_target(cJSON *root, const char *list, const char *name)
{
	cJSON *at = cJSON_GetObjectItem(root, list), *item;
	const cJSON *c;

	if (cJSON_IsNull(at)) { /* PEFT has no modules_to_save, or some */
		at = cJSON_CreateArray();
		if (!at || !cJSON_ReplaceItemInObject(root, list, at)) {
			cJSON_Delete(at);
			return done(false);
		}
	}

	cJSON_ArrayForEach(c, at) if (!strcmp(c->valuestring, name)) return MOE_OK;
	item = cJSON_CreateString(name);
	if (!item)
		return done(false);
	return done(cJSON_AddItemToArray(at, item));
}
