/* SPDX-License-Identifier: Apache-2.0 */
/* Learning-rate schedules with the names, arguments and values of transformers' get_scheduler. */
#ifndef MOE_TRAIN_SCHEDULE_H
#define MOE_TRAIN_SCHEDULE_H

#include "engine/base.h"

struct moe_schedule {
	int kind; /* index of the table in schedule.c */
	int64_t total, warmup, stable, decay;
	/* min: lowest factor; warmup_rate: the factor of step 1, negative: by the warm-up alone */
	double cycles, power, min, timescale, warmup_rate;
	int warmup_shape, decay_shape;
};

/*
 * name NULL or "": cosine. args: "key=value,..." or NULL, the keys of lr_scheduler_kwargs. peak:
 * the highest learning rate, which lr_end and min_lr are divided by. total >= 1 steps, the first
 * `warmup` of which rise. MOE_ERR_ARG lists the names or keys.
 */
enum moe_status moe_schedule_create(const char *name, const char *args, double peak, int64_t total,
				    int64_t warmup, struct moe_schedule *out);
/* What multiplies the highest rate in step 1..total. */
double moe_schedule_factor(const struct moe_schedule *s, int64_t step);
/* Steps of warm-up: `steps` where it is 1 or more, else the share `ratio` of total, rounded up. */
int64_t moe_schedule_warmup(double ratio, int64_t steps, int64_t total);

#endif
