/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints with weights in another format: every matrix is read as f32, perhaps changed, and
 * written as the target has it; codes that fit as they are are taken over. Needs no engine.
 */
#ifndef MOE_MODEL_CONVERT_H
#define MOE_MODEL_CONVERT_H

#include "model/convert_plan.h"

/*
 * moe_convert_model: see moesaic.h; "keep" is allowed too: what is not changed stays as it is.
 * change: what is added to weights, or NULL; note: what it comes from, so that another call goes on
 * only with the same.
 */
enum moe_status moe_convert_model_run(const struct moe_convert_model_params *p,
				      const struct moe_convert_change *change, const char *note,
				      struct moe_convert_model_result *result);

#endif
