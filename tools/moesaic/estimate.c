/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic estimate: memory and time of a run that is not started. */
#include "tools/moesaic/commands.h"

const struct command command_estimate = {
	.name = "estimate",
	.summary = "memory and time without loading",
	.groups = train_groups,
	.run = NULL,
};
