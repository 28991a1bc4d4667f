/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of LLaMA-Factory, transformers' Trainer and ktransformers that are no aliases of a flag of ours. */
#ifndef MOESAIC_TOOL_FOREIGN_H
#define MOESAIC_TOOL_FOREIGN_H

#include "tools/moesaic/options.h"

enum foreign_action {
	FOREIGN_IGNORE,	 /* changes nothing that any command does: named in the note */
	FOREIGN_ACCEPT,	 /* what is done here anyway: not named */
	FOREIGN_MAP,	 /* sets the flag `ours` to `as`, where %s is the value; NULL: the value */
	FOREIGN_ADD,	 /* the same, to the entries of a list */
	FOREIGN_THREADS, /* as MAP; more than there are CPUs are as many as there are */
	FOREIGN_REFUSE,	 /* `ours` says why and what to do; `as`: only for commands that have this flag */
};

struct foreign_rule {
	const char *keys;  /* separated by spaces; a * at a key's end: all that begin so */
	const char *value; /* alternatives separated by |, a * as above; NULL: any */
	enum foreign_action action;
	const char *ours, *as;
};

/* foreign_keys.c: the first rule that key and value fit holds. A NULL key ends. */
extern const struct foreign_rule foreign_rules[];

bool foreign_known(const char *key);
/* Whole keys one by one, for suggestions, into buf; false past the last. */
bool foreign_name(int index, char *buf, size_t size);
/* text "" for a list or a map. 0, an exit code, or -1: not a known key. */
int foreign_set(struct settings *s, const char *key, const char *text);
/* After the last key: one note that names what was ignored. What another command uses is left out without one. */
void foreign_finish(const char *path);

#endif
