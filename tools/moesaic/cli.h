/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every file of the command shares: exit codes, one-line errors, the command table.
 * The command is one process with one command in it: the name in error lines is set once.
 */
#ifndef MOESAIC_TOOL_CLI_H
#define MOESAIC_TOOL_CLI_H

#include "tools/moesaic/options.h"

#include <moesaic.h>

enum {
	CLI_DONE = 0,
	CLI_FAILED = 1,
	CLI_USAGE = 2, /* bad input or usage */
	CLI_NOFIT = 3,
	CLI_DIVERGED = 4,
	CLI_INTERRUPTED = 130,
};

struct command {
	const char *name, *summary;
	const char *operands;		   /* as in the usage line; NULL: takes none */
	const struct option_group *groups; /* ends with a NULL title; NULL: no options */
	int (*run)(struct settings *s, int argc, char **argv);
};

extern const struct command *const cli_commands[]; /* NULL ends */

/* Commands that are programs of their own, with their own flags and --help. */
struct cli_program {
	const char *name, *operands, *summary; /* summary NULL: not in this version */
};
extern const struct cli_program cli_programs[]; /* a NULL name ends */

/* "moesaic COMMAND: text" on stderr; returns code. */
int cli_fail(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The exit code for a library status, with moe_last_error() as the text; 0 for MOE_OK. */
int cli_status(enum moe_status status);
/* One line on stderr unless --quiet. */
void cli_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void cli_set_command(const char *name);
bool cli_missing(const char *path); /* it is not there; one that may not be looked at counts as there */
/* Where what is read stands, in front of the text of every line; NULL: nowhere. */
void cli_set_place(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void cli_set_quiet(int quiet);

/* Never NULL: without memory the process ends with a message. */
void *cli_alloc(size_t bytes);
/* The folder with a model's tokenizer: a model that is a GGUF file has the one it lies in. free() it. */
char *cli_model_folder(const char *model);
char *cli_format(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* The known name nearest to `name`, or NULL if none is near; names end with NULL. */
const char *cli_nearest(const char *name, const char *const *names);

/* moesaic bench ...: an exit code where nothing could be started. */
int bench_exec(char **argv);

void cli_usage(const struct command *c, int all);
void cli_usage_programs(void); /* their lines of the help */

#endif
