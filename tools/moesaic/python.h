/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The Python side: $MOESAIC_PYTHON, else the build tree's own environment, else python3, with -m
 * moesaic.MODULE.
 */
#ifndef MOESAIC_TOOL_PYTHON_H
#define MOESAIC_TOOL_PYTHON_H

#include "tools/moesaic/cli.h"

#include <sys/types.h>

/* A growing argument list, NULL at the end. */
struct arguments {
	char **items;
	int count;
};
void arguments_add(struct arguments *a, const char *text);
void arguments_free(struct arguments *a);
/* "--NAME VALUE" for every flag of the table that has a value. */
void arguments_options(struct arguments *a, const struct settings *s, const struct option *table);

/* Replaces this process; returns an exit code only if that fails. */
int python_exec(const char *module, const struct arguments *a);
/* Runs it and waits; its stdout goes to stderr if to_stderr. The exit code; its error lines are its
 * own. */
int python_run(const char *module, const struct arguments *a, bool to_stderr);
/* Starts it with its stdin and stdout as streams. */
struct python_child {
	pid_t pid;
	FILE *to, *from;
};
int python_start(const char *module, const struct arguments *a, struct python_child *child);
/* Closes the streams and waits; the exit code. */
int python_stop(const char *module, struct python_child *child);

/* A file that lies so many folders above the program, NULL if it is not there; free it. */
char *above_program(int levels, const char *relative);
/* Has that Python what moesaic.data needs? *path: which one it is; free it. */
bool python_ready(char **path);

/* Is --data one token file, that nothing tokenises? */
bool token_file_given(const struct settings *s, const char *flag);
enum token_report { REPORT_NONE, REPORT_STDOUT, REPORT_STDERR };
/*
 * --data or --eval-data as a token file: given as one, or made from json by moesaic.data into
 * folder, where an earlier one of the same inputs is used again. *made: it is new. *path: free it.
 */
int token_file(const struct settings *s, const char *flag, const char *folder,
	       enum token_report report, char **path, bool *made);
/* Refuses a token file that was made for another tokenizer, template or other settings. */
int token_check(const struct settings *s, const char *flag, const char *path);
/* The JSON header of a safetensors file, or NULL; cJSON_Delete it. */
struct cJSON *token_header(const char *path);
/* Tokens of that data: a token file says, json files are tokenised once. */
int token_count(const struct settings *s, const char *flag, int64_t *count);

#endif
