/* SPDX-License-Identifier: Apache-2.0 */
/* Texts as values of options. */
#ifndef MOESAIC_TOOL_OPTION_VALUES_H
#define MOESAIC_TOOL_OPTION_VALUES_H

#include "tools/moesaic/options.h"

/* true if word is one of the words of list (may be NULL), which sep separates; '-' and '_' are the
 * same. */
bool option_word_among(const char *word, const char *list, char sep);
/* false: not such a value */
bool option_truth(const char *text, bool *out);
bool option_int(const char *text, int64_t *out);
bool option_real(const char *text, double *out);
bool option_size(const char *text, double *out);
/* An exit code after an error line: malformed, out of range, or not in this version. */
int option_check(const struct option *o, const char *text);
/* One spelling per value, for run.yaml and getters; free it. text passed option_check. */
char *option_normal(const struct option *o, const char *text);

#endif
