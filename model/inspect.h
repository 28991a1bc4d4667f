/* SPDX-License-Identifier: Apache-2.0 */
/* What a file or folder holds, as JSON. */
#ifndef MOE_MODEL_INSPECT_H
#define MOE_MODEL_INSPECT_H

#include "model/json.h"

/*
 * p: see moesaic.h, or NULL. *out is the caller's (cJSON_Delete), an object whose "kind" is model, adapter, tokens, state,
 * trace or tensors. MOE_ERR_IO; MOE_ERR_FORMAT: damaged, or none of these; the text names the path.
 */
enum moe_status moe_inspect_path(const char *path, const struct moe_inspect_params *p, cJSON **out);

/* Kinds with a file of their own; fill o, whose kind is set. */
enum moe_status moe_inspect_model(const char *path, cJSON *o);
enum moe_status moe_inspect_adapter(const char *path, cJSON *o);

/*
 * "quantised" of the safetensors at path: a row for all weights that are coded alike, none if no
 * weight is. values: their ranges too; base: a plain checkpoint (or NULL) that they are compared
 * with. Absent where nothing is quantised.
 */
enum moe_status moe_inspect_quantised(const char *path, const char *base, bool values, cJSON *o);

/* "dtypes", "tensors", "bytes" of a checkpoint into o. false: no memory. */
struct moe_safetensors;
bool moe_inspect_dtypes(const struct moe_safetensors *st, cJSON *o);
static inline bool moe_inspect_number(cJSON *o, const char *key, int64_t value)
{
	return cJSON_AddNumberToObject(o, key, (double)value) != NULL;
}

#endif
