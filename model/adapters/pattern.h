/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regular expressions over module names, as PEFT's users write them: Python's syntax without
 * look-around, back references and lazy repetition. Repetition counts are at most 64, and two of
 * them, as the text may come from a file that somebody else wrote.
 */
#ifndef MOE_MODEL_ADAPTERS_PATTERN_H
#define MOE_MODEL_ADAPTERS_PATTERN_H

#include "engine/base.h"

#include <regex.h>

/*
 * Compiles text so that it must match a whole name; with suffix any prefix that ends in a dot may
 * stand before the match. regfree it. MOE_ERR_UNSUPPORTED, MOE_ERR_FORMAT: the text names what is
 * wrong, prefixed by what.
 */
enum moe_status moe_pattern_compile(const char *text, bool suffix, const char *what, regex_t *out);
bool moe_pattern_matches(const regex_t *re, const char *name);
/* true if text is more than a name: has characters that only expressions have. */
bool moe_pattern_is_expression(const char *text);

#endif
