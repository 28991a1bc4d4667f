/* SPDX-License-Identifier: Apache-2.0 */
/* What a converted checkpoint says of itself. Private to model/convert*.c. */
#ifndef MOE_MODEL_CONVERT_CONFIG_H
#define MOE_MODEL_CONVERT_CONFIG_H

#include "model/convert_plan.h"
#include "model/json.h"

/*
 * config: the input's config.json, changed in place: quantization_config as transformers and vLLM
 * expect it, or none, and the dtype of plain weights.
 */
enum moe_status moe_convert_config(const struct moe_convert_plan *p, cJSON *config);

#endif
