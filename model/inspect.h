/* SPDX-License-Identifier: Apache-2.0 */
/* What a file or folder holds, as JSON. */
#ifndef MOE_MODEL_INSPECT_H
#define MOE_MODEL_INSPECT_H

#include "model/json.h"

/*
 * *out is the caller's (cJSON_Delete), an object whose "kind" is model, adapter, tokens, state,
 * trace or tensors. MOE_ERR_IO; MOE_ERR_FORMAT: damaged, or none of these; the text names the path.
 */
enum moe_status moe_inspect_path(const char *path, cJSON **out);

/* ---- one kind each; fill o, whose kind is set ---- */
enum moe_status moe_inspect_model(const char *path, cJSON *o);
enum moe_status moe_inspect_adapter(const char *path, cJSON *o);
enum moe_status moe_inspect_tokens(const char *path, cJSON *o);
enum moe_status moe_inspect_state(const char *path, cJSON *o);
enum moe_status moe_inspect_trace(const char *path, cJSON *o);
enum moe_status moe_inspect_tensors(const char *path, cJSON *o);

/* "dtypes", "tensors", "bytes" of a checkpoint into o. false: no memory. */
struct moe_safetensors;
bool moe_inspect_dtypes(const struct moe_safetensors *st, cJSON *o);
static inline bool moe_inspect_number(cJSON *o, const char *key, int64_t value)
{
	return cJSON_AddNumberToObject(o, key, (double)value) != NULL;
}

#endif
