/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Declarative options: one table serves the command line (dashes), --config files (underscores),
 * the help and run.yaml. Values are checked when they are set, so getters cannot fail; a getter
 * with a name that the command does not have is a bug and asserts.
 */
#ifndef MOESAIC_TOOL_OPTIONS_H
#define MOESAIC_TOOL_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum option_type {
	OPTION_FLAG,   /* --overwrite; in files true or false */
	OPTION_SWITCH, /* on or off */
	OPTION_INT,
	OPTION_REAL,
	OPTION_SIZE, /* bytes: 12GB, 1.5TiB */
	OPTION_TEXT,
	OPTION_LIST,   /* one or more; may be repeated */
	OPTION_CHOICE, /* one of arg's a|b|c */
};

enum {
	OPTION_COMMON = 1, /* among the most used: shown by --help */
	OPTION_REQUIRED = 2,
	OPTION_VALUE_OPTIONAL = 4, /* --resume [DIR] */
	OPTION_TRANSIENT = 8,	   /* not part of run.yaml */
	OPTION_ABOVE_ZERO = 16,	   /* INT and REAL */
};

struct option {
	const char *name;
	enum option_type type;
	unsigned traits;
	const char *arg;    /* place holder, or the choices */
	const char *preset; /* default; NULL: unset */
	const char *help;
	double min, max;     /* of INT and REAL; max 0: no upper limit, both 0: any */
	const char *aliases; /* separated by spaces */
	const char *only;    /* accepted in this version, as a|b; anything else is "not yet" */
};

struct option_group {
	const char *title;
	const struct option *options; /* ends with a NULL name */
};

struct command;
enum option_source { SOURCE_PRESET = 0, SOURCE_FILE, SOURCE_FLAG };

struct option_value {
	char **items;
	int count;
	enum option_source source;
};

struct settings {
	const struct command *command;
	struct option_value *values; /* in table order over all groups */
	enum option_source source;   /* of what is being set now */
	char **operands;
	int n_operands;
};

/*
 * Parses everything behind the command's name. Returns 0, an exit code after an error line, or -1
 * when help was printed.
 */
int settings_parse(struct settings *s, const struct command *command, int argc, char **argv);
void settings_free(struct settings *s);

/* One value as text from any source; name may be an alias, in dashes or underscores. */
int settings_set(struct settings *s, const char *name, const char *const *items, int count);
/* One more entry of a list, beside those from the same source. */
int settings_add(struct settings *s, const char *name, const char *item);
/* NULL if the command has no such option. */
const struct option *settings_option(const struct settings *s, const char *name);

void settings_unset(struct settings *s, const char *name);
bool settings_given(const struct settings *s, const char *name); /* not by default */
/*
 * Of two settings that exclude each other drops the one of the weaker source (flags override
 * files); an exit code after an error line if both were given alike.
 */
int settings_exclusive(struct settings *s, const char *a, const char *b);
bool settings_flagged(const struct settings *s, const char *name); /* on the command line */
bool settings_has(const struct settings *s, const char *name);	   /* a value, default included */
const char *settings_text(const struct settings *s, const char *name); /* NULL: unset */
int64_t settings_int(const struct settings *s, const char *name);      /* 0: unset */
double settings_real(const struct settings *s, const char *name);
bool settings_on(const struct settings *s, const char *name);
/* Entries of a list. */
int settings_list(const struct settings *s, const char *name, char ***items);
/* The list as one text with commas; free it. */
char *settings_joined(const struct settings *s, const char *name);

/* --config: config.c. */
int settings_load(struct settings *s, const char *path);
/* All values but transient ones as YAML, with the command line as a comment. */
void settings_write(const struct settings *s, int argc, char **argv, FILE *to);

#endif
