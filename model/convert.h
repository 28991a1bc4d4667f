/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints with weights in another format: every matrix is read as f32, perhaps changed, and
 * written as the target has it; codes that fit as they are are taken over. Needs no engine.
 */
#ifndef MOE_MODEL_CONVERT_H
#define MOE_MODEL_CONVERT_H

#include "model/convert_plan.h"

/* moe_convert_model: see moesaic.h. result is not NULL. */
enum moe_status moe_convert_model_run(const struct moe_convert_model_params *p,
				      struct moe_convert_model_result *result);

#endif
