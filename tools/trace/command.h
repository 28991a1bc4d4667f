/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Subcommands of moesaic-trace. One is a file of tools/trace/commands/ that defines
 * `const struct trace_command trace_command_<name>`; CMake makes the list from the file names.
 */
#ifndef MOE_TOOLS_TRACE_COMMAND_H
#define MOE_TOOLS_TRACE_COMMAND_H

#include "tools/trace/trace.h"

enum trace_exit {
	TRACE_EXIT_DONE = 0,
	TRACE_EXIT_FOUND = 1, /* check found something, diff is beyond its limit */
	TRACE_EXIT_BAD = 2    /* bad flags or input */
};

struct trace_command {
	const char *name;
	const char *usage;   /* "summary FILE [--json]" */
	const char *summary; /* one line */
	const char *help;    /* flags, a line each */
	/* argv[0] is the subcommand's name. Returns the exit code. */
	int (*run)(int argc, char **argv);
};
extern const struct trace_command *const trace_command_list[]; /* generated */

/* Prints "moesaic-trace NAME: text" as one line of error; returns TRACE_EXIT_BAD. */
int trace_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void trace_set_command(const char *name); /* for trace_fail */

/* One line of JSON about a file: {"file": PATH, NAME: COUNT, ...}; a NULL name ends. */
struct trace_count {
	const char *name;
	int64_t count;
};
void trace_written(const char *path, const struct trace_count *counts);

/* ---- flags ---- */

/*
 * Flags of a subcommand, beside --help and --quiet, which all have. "--name value" or "--name=value"; positional arguments go to files. An
 * unknown flag, a missing value or a wrong number of files is told by trace_fail.
 */
struct trace_flag {
	const char *name;			    /* "--json"; NULL ends the list */
	const char **text;			    /* value; the last one counts */
	bool *set;				    /* a flag without a value */
	int (*each)(const char *value, void *user); /* for flags that may come again: 0 or -1 after
						       trace_fail */
	void *user;
};
/* 0; TRACE_EXIT_BAD after a text; -1: help was printed, all is done. */
int trace_flags(const struct trace_command *c, int argc, char **argv,
		const struct trace_flag *flags, const char **files, int min_files, int max_files);
/* "5" or "a:b", inclusive. 0 or -1 after trace_fail. */
int trace_flag_range(const char *flag, const char *text, int64_t range[2]);
int trace_flag_steps(const int64_t range[2]); /* 1 and more; 0 or -1 after trace_fail */
int trace_flag_number(const char *flag, const char *text, double *v); /* "3%" is 0.03 */

/* Opens a trace for a subcommand: 0, or TRACE_EXIT_BAD after a text. */
int trace_load(struct trace *t, const char *path, const struct trace_slice *slice);

#endif
