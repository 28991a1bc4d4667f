/* SPDX-License-Identifier: Apache-2.0 */
/* adapter_config.json, PEFT's, which all forms of adapters have: reading it and making one. */
#ifndef MOE_MODEL_ADAPTERS_ADAPTER_CONFIG_H
#define MOE_MODEL_ADAPTERS_ADAPTER_CONFIG_H

#include "model/adapters/adapter.h"
#include "model/json.h"

struct moe_adapter_config {
	cJSON *root;
	const struct moe_adapter *adapter; /* its defaults */
};

/*
 * Reads path: defaults, base model, rslora into adapter. cJSON_Delete config->root, also after an
 * error. MOE_ERR_UNSUPPORTED: DoRA, biases, saved modules and the like; MOE_ERR_FORMAT.
 */
enum moe_status moe_adapter_config_read(const char *path, struct moe_adapter_config *config,
					struct moe_adapter *adapter);
/*
 * Rank and alpha of the module called name in full: rank_pattern and alpha_pattern, whose first
 * matching key counts, else the defaults.
 */
enum moe_status moe_adapter_config_setting(const struct moe_adapter_config *config,
					   const char *name, int64_t *rank, double *alpha);
/* true if target_modules or target_parameters has name, or something that ends with .name. */
bool moe_adapter_config_names(const struct moe_adapter_config *config, const char *name);
/*
 * true unless one of the modules of a layer (NULL ends, "self_attn.q_proj") is targeted in every
 * layer: not by an expression, not with a layer's number, not with layers_to_transform.
 */
bool moe_adapter_config_partial(const struct moe_adapter_config *config,
				const char *const *modules);

/* ---- making one; cJSON has no memory: MOE_ERR_NOMEM ---- */

/*
 * A configuration with the given defaults and the keys that PEFT 0.21.2 needs, without targets and
 * patterns. cJSON_Delete it.
 */
enum moe_status moe_adapter_config_new(const struct moe_adapter *adapter, int64_t rank,
				       double alpha, bool rslora, cJSON **out);
/* rank_pattern and alpha_pattern for key, as far as they differ from the defaults. */
enum moe_status moe_adapter_config_pattern(cJSON *root, const char *key, int64_t rank,
					   double alpha);
/* Adds to the list "target_modules", "target_parameters" or "modules_to_save". */
enum moe_status moe_adapter_config_target(cJSON *root, const char *list, const char *name);

#endif
