/* SPDX-License-Identifier: Apache-2.0 */
/* The commands, and the option tables that several of them share. */
#ifndef MOESAIC_TOOL_COMMANDS_H
#define MOESAIC_TOOL_COMMANDS_H

#include "tools/moesaic/cli.h"

extern const struct command command_train, command_data, command_eval, command_generate,
	command_estimate;

extern const struct option_group train_groups[];
extern const struct option options_data[];    /* how rows become tokens */
extern const struct option options_machine[]; /* threads, NUMA, memory */
extern const struct option options_general[]; /* config, quiet, json */

int train_resolve(struct settings *s); /* defaults that depend on other settings */

#endif
