/* SPDX-License-Identifier: Apache-2.0 */
/* Learning-rate schedules with the meaning they have in transformers' get_scheduler. */
#ifndef MOE_TRAIN_SCHEDULE_H
#define MOE_TRAIN_SCHEDULE_H

#include "engine/base.h"

enum moe_schedule { MOE_COSINE, MOE_LINEAR, MOE_CONSTANT, MOE_CONSTANT_WARMUP };

/* NULL or "": cosine. MOE_ERR_ARG lists the names. */
enum moe_status moe_schedule_parse(const char *name, enum moe_schedule *out);
/* Factor on the learning rate in step 1..total, with the first `warmup` steps rising from 0. */
double moe_schedule_factor(enum moe_schedule s, int64_t step, int64_t total, int64_t warmup);

#endif
