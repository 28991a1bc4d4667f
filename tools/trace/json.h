/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes JSON to a stream. Commas and quotes are its business; nesting is the caller's. A number
 * that is not finite, and MOE_MXT_NA, are null.
 */
#ifndef MOE_TOOLS_TRACE_JSON_H
#define MOE_TOOLS_TRACE_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct trace_json {
	FILE *out;
	int depth;
	bool started; /* something stands before on this level */
	bool lines;   /* a line per member of the outermost object */
};

/* name: NULL inside an array and for the outermost value. */
void trace_json_object(struct trace_json *j, const char *name);
void trace_json_array(struct trace_json *j, const char *name);
void trace_json_end(struct trace_json *j, char bracket);			/* '}' or ']' */
void trace_json_text(struct trace_json *j, const char *name, const char *text); /* NULL: null */
void trace_json_integer(struct trace_json *j, const char *name, int64_t v);
void trace_json_number(struct trace_json *j, const char *name, double v);
void trace_json_bool(struct trace_json *j, const char *name, bool v);
/* A text with its quotes, escaped; bytes that are no UTF-8 become U+FFFD. */
void trace_json_quote(FILE *out, const char *text);

#endif
