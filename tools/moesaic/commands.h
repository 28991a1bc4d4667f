/* SPDX-License-Identifier: Apache-2.0 */
/* The commands, and the option tables that several of them share. */
#ifndef MOESAIC_TOOL_COMMANDS_H
#define MOESAIC_TOOL_COMMANDS_H

#include "tools/moesaic/cli.h"

extern const struct command command_train, command_data, command_eval, command_generate,
	command_estimate, command_merge, command_convert, command_inspect, command_doctor;

extern const struct option train_what[], train_method[], train_optimisation[], train_course[],
	train_machine_training[];
/* All that train takes, as groups of its help. */
/* clang-format off */
#define TRAIN_GROUPS                                  \
	{ "What", train_what },                       \
	{ "Data", options_data },                     \
	{ "Method", train_method },                   \
	{ "Optimisation", train_optimisation },       \
	{ "Run", train_course },                      \
	{ "Machine", options_machine },               \
	{ "Schedule", train_machine_training },       \
	{ "General", options_general }
/* clang-format on */
extern const struct option options_dataset[]; /* data by LLaMA-Factory's names */
extern const struct option options_data[];    /* how rows become tokens */
extern const struct option options_machine[]; /* threads, NUMA, memory */
extern const struct option options_general[]; /* config, quiet, json */

/* Defaults that depend on other settings, without those of the data. */
int train_resolve_method(struct settings *s);
/* When to evaluate and save: strategies and numbers of steps agree afterwards. Before datasets are resolved. */
int train_resolve_course(struct settings *s);

#endif
