/* SPDX-License-Identifier: Apache-2.0 */
#include "train/schedule.h"

#include <math.h>

static const char *const names[] = { "cosine", "linear", "constant", "constant_with_warmup" };

enum moe_status moe_schedule_parse(const char *name, enum moe_schedule *out)
{
	*out = MOE_COSINE;
	if (!name || !*name)
		return MOE_OK;
	for (size_t i = 0; i < MOE_COUNT(names); i++)
		if (!strcmp(name, names[i])) {
			*out = (enum moe_schedule)i;
			return MOE_OK;
		}
	return moe_fail(MOE_ERR_ARG,
			"learning-rate schedule \"%s\"; known: cosine linear constant "
			"constant_with_warmup",
			name);
}

double moe_schedule_factor(enum moe_schedule s, int64_t step, int64_t total, int64_t warmup)
{
	double done = (double)(step - 1), progress;

	if (s == MOE_CONSTANT)
		return 1;
	if (step - 1 < warmup)
		return done / (double)MOE_MAX(warmup, 1);
	if (s == MOE_CONSTANT_WARMUP)
		return 1;
	progress = (done - (double)warmup) / (double)MOE_MAX(total - warmup, 1);
	if (s == MOE_LINEAR)
		return MOE_MAX(0.0, 1 - progress);
	return MOE_MAX(0.0, 0.5 * (1 + cos(M_PI * progress)));
}
