/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The checksum that moe_safetensors_write leaves in its files: the first entry of __metadata__, 16
 * hexadecimal digits of model/sum.h over the whole file with zeros in their place.
 */
#ifndef MOE_MODEL_READERS_SAFETENSORS_SUM_H
#define MOE_MODEL_READERS_SAFETENSORS_SUM_H

#include "engine/base.h"

#define MOE_ST_SUM_KEY "moesaic_sum"
#define MOE_ST_SUM_BEFORE "{\"__metadata__\":{\"" MOE_ST_SUM_KEY "\":\"" /* behind the length */
#define MOE_ST_SUM_DIGITS 16
#define MOE_ST_SUM_AT (8 + (int64_t)sizeof MOE_ST_SUM_BEFORE - 1)

/*
 * Reads the whole file. MOE_ERR_FORMAT: it is not what was written, or has no sum. MOE_ERR_IO.
 * Texts begin with the path.
 */
enum moe_status moe_safetensors_verify(const char *path);

#endif
