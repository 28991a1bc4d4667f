/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapters/pattern.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_TEXT 512
#define MAX_COUNT 64
#define MAX_COUNTS 2

/* Python's text becoming POSIX's. */
struct translation {
	const char *at, *what, *whole;
	char out[8 * MAX_TEXT];
	size_t n;
	int counts;
};

static enum moe_status refuse(const struct translation *t, const char *why)
{
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"%s: '%.100s': %s in a regular expression: not "
			"implemented",
			t->what, t->whole, why);
}

static void put(struct translation *t, const char *text)
{
	size_t n = strlen(text);

	memcpy(t->out + t->n, text, n + 1);
	t->n += n;
}

static enum moe_status put_escape(struct translation *t, bool in_set)
{
	static const struct {
		char name;
		const char *alone, *in_set;
	} classes[] = {
		{ 'd', "[0-9]", "0-9" },
		{ 'w', "[[:alnum:]_]", "[:alnum:]_" },
		{ 's', "[[:space:]]", "[:space:]" },
	};
	char c = t->at[1], text[3] = { '\\', c, 0 };

	for (size_t i = 0; i < MOE_COUNT(classes); i++)
		if (c == classes[i].name) {
			put(t, in_set ? classes[i].in_set : classes[i].alone);
			t->at += 2;
			return MOE_OK;
		}
	if (!c || isalnum((unsigned char)c) || (in_set && (c == ']' || c == '-' || c == '^')))
		return refuse(t, "this use of a backslash");
	put(t, in_set || !strchr(".[]{}()*+?|^$\\", c) ? text + 1 : text);
	t->at += 2;
	return MOE_OK;
}

static enum moe_status put_set(struct translation *t)
{
	char one[2] = "";

	put(t, "[");
	t->at++;
	for (bool first = true; *t->at && (first || *t->at != ']'); first = false) {
		if (*t->at == '\\') {
			MOE_TRY(put_escape(t, true));
			continue;
		}
		if (*t->at == '[')
			return refuse(t, "'[' in a set");
		one[0] = *t->at++;
		put(t, one);
		if (one[0] == '^' && first && *t->at == ']') {
			put(t, "]");
			t->at++;
		}
	}
	if (!*t->at)
		return moe_fail(MOE_ERR_FORMAT, "%s: '%.100s': '[' without ']'", t->what, t->whole);
	put(t, "]");
	t->at++;
	return MOE_OK;
}

static enum moe_status put_count(struct translation *t)
{
	char *end;
	long low = strtol(t->at + 1, &end, 10), high = low;
	char text[48];

	if (end == t->at + 1)
		return refuse(t, "'{' without a number");
	if (*end == ',') {
		const char *from = end + 1;

		high = strtol(from, &end, 10);
		if (end == from)
			return refuse(t, "an open repetition count");
	}
	if (*end != '}' || low < 0 || high < low || high > MAX_COUNT || ++t->counts > MAX_COUNTS)
		return refuse(t, "this repetition count");
	snprintf(text, sizeof text, "{%ld,%ld}", low, high);
	put(t, text);
	t->at = end + 1;
	return MOE_OK;
}

static enum moe_status translate(struct translation *t)
{
	while (*t->at) {
		char one[2] = { *t->at, 0 };

		if (*t->at == '\\') {
			MOE_TRY(put_escape(t, false));
			continue;
		}
		if (*t->at == '[') {
			MOE_TRY(put_set(t));
			continue;
		}
		if (*t->at == '{')
			MOE_TRY(put_count(t));
		else if (!strncmp(t->at, "(?:", 3))
			put(t, "("), t->at += 3;
		else if (!strncmp(t->at, "(?", 2))
			return refuse(t, "'(?'");
		else
			put(t, one), t->at++;
		if (strchr("*+?", one[0]) || one[0] == '{')
			if (*t->at == '?' || *t->at == '+' || *t->at == '*')
				return refuse(t, "lazy or doubled repetition");
	}
	return MOE_OK;
}

enum moe_status moe_pattern_compile(const char *text, bool suffix, const char *what, regex_t *out)
{
	struct translation *t;
	enum moe_status status;
	char reason[96];
	int code;

	if (strlen(text) > MAX_TEXT)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%s: '%.60s...' has more than %d characters",
				what, text, MAX_TEXT);
	t = moe_calloc(1, sizeof *t);
	if (!t)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", what);
	t->at = t->whole = text;
	t->what = what;
	put(t, suffix ? "^(.*\\.)?(" : "^(");
	status = translate(t);
	if (status == MOE_OK) {
		put(t, ")$");
		code = regcomp(out, t->out, REG_EXTENDED | REG_NOSUB);
		if (code) {
			regerror(code, out, reason, sizeof reason);
			status = moe_fail(code == REG_ESPACE ? MOE_ERR_NOMEM : MOE_ERR_FORMAT,
					  "%s: '%.100s': %s", what, text, reason);
		}
	}
	moe_free(t);
	return status;
}

bool moe_pattern_matches(const regex_t *re, const char *name)
{
	return regexec(re, name, 0, NULL, 0) == 0;
}

bool moe_pattern_is_expression(const char *text)
{
	return strpbrk(text, "*+?|()[]{}^$\\") != NULL;
}
