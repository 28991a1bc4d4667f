/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers for people. Buffers are the caller's, of PRINT_BYTES; the functions return them. */
#ifndef MOE_TOOLS_TRACE_PRINT_H
#define MOE_TOOLS_TRACE_PRINT_H

#include <stdint.h>
#include <stdio.h>

#define PRINT_BYTES 32

const char *print_time(double ns, char *buf); /* "12.3 ms"; "n/a" where it is not finite */
const char *print_share(double part, double whole, char *buf); /* "12.3 %" */
const char *print_count(double v, char *buf);		       /* "1.23 G"; three digits */
/* A text in `width` columns: control bytes become '?', what has no room is cut. */
void print_cell(FILE *out, const char *text, int width);
/* Lines longer than `width` columns (bytes) go on in the next one, indented by 4. */
void print_wrapped(FILE *out, const char *text, int width);

#endif
