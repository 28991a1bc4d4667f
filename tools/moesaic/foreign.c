/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/foreign.h"
#include "tools/moesaic/cli.h"
#include "tools/moesaic/option_values.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_WORD 128

static char *left_out; /* names ignored so far, for the note */

/* ---- matching ---- */

/* The word of list at index, words separated by sep; false past the last. */
static bool word_at(const char *list, char sep, int index, char *buf, size_t size)
{
	for (; index; index--) {
		list = strchr(list, sep);
		if (!list)
			return false;
		list++;
	}
	snprintf(buf, size, "%.*s", (int)strcspn(list, (char[]){ sep, 0 }), list);
	return true;
}

/* A pattern is a text, or the beginning of one and a star. */
static bool text_fits(const char *text, const char *pattern)
{
	size_t n = strlen(pattern);

	if (n && pattern[n - 1] == '*')
		return !strncmp(text, pattern, n - 1);
	return !strcmp(text, pattern);
}

/* True and True, 0 and 0.0 are the same value. */
static bool one_value_fits(const char *text, const char *pattern)
{
	double a, b;
	bool x, y;

	if (text_fits(text, pattern))
		return true;
	if (option_real(text, &a) && option_real(pattern, &b))
		return a == b;
	return option_truth(text, &x) && option_truth(pattern, &y) && x == y;
}

static bool value_fits(const char *text, const char *patterns)
{
	char word[MAX_WORD];

	for (int i = 0; patterns && word_at(patterns, '|', i, word, sizeof word); i++)
		if (one_value_fits(text, word))
			return true;
	return !patterns;
}

static bool key_fits(const char *key, const char *keys)
{
	char word[MAX_WORD];

	for (int i = 0; word_at(keys, ' ', i, word, sizeof word); i++)
		if (text_fits(key, word))
			return true;
	return false;
}

bool foreign_known(const char *key)
{
	for (const struct foreign_rule *r = foreign_rules; r->keys; r++)
		if (key_fits(key, r->keys))
			return true;
	return false;
}

bool foreign_name(int index, char *buf, size_t size)
{
	for (const struct foreign_rule *r = foreign_rules; r->keys; r++)
		for (int i = 0; word_at(r->keys, ' ', i, buf, size); i++) {
			if (strchr(buf, '*'))
				continue;
			if (!index--)
				return true;
		}
	return false;
}

/* ---- actions ---- */

static void ignore(const char *key)
{
	char *longer = cli_format("%s%s%s", left_out ? left_out : "", left_out ? ", " : "", key);

	free(left_out);
	left_out = longer;
}

static int refuse(const struct settings *s, const struct foreign_rule *r, const char *key, const char *text)
{
	if (r->as && !settings_option(s, r->as))
		return 0;
	return cli_fail(CLI_USAGE, "%s%s%s: %s", key, *text ? ": " : "", text, r->ours);
}

/* Such files are carried from machine to machine: more threads than CPUs are as many as there are. */
static int set_threads(struct settings *s, const char *flag, const char *key, const char *text)
{
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	char *most = cli_format("%ld", cpus);
	int64_t n;
	int rc;

	if (option_int(text, &n) && cpus > 0 && n > cpus) {
		cli_note("%s: %s: this machine has %s CPUs, which are used", key, text, most);
		text = most;
	}
	rc = settings_set(s, flag, &text, 1);
	free(most);
	return rc;
}

/* `as` with the value in the place of its %s. */
static char *filled(const char *as, const char *text)
{
	const char *place = as ? strstr(as, "%s") : NULL;

	if (!place)
		return cli_format("%s", as ? as : text);
	return cli_format("%.*s%s%s", (int)(place - as), as, text, place + 2);
}

static int set(struct settings *s, const struct foreign_rule *r, const char *text)
{
	char *value = filled(r->as, text);
	int rc = r->action == FOREIGN_ADD ? settings_add(s, r->ours, value)
					  : settings_set(s, r->ours, (const char *const *)&value, 1);

	free(value);
	return rc;
}

static int apply(struct settings *s, const struct foreign_rule *r, const char *key, const char *text)
{
	switch (r->action) {
	case FOREIGN_ACCEPT:
		return 0;
	case FOREIGN_REFUSE:
		return refuse(s, r, key, text);
	case FOREIGN_MAP:
	case FOREIGN_ADD: /* of another command, the file serves that too */
		return settings_option(s, r->ours) ? set(s, r, text) : 0;
	case FOREIGN_THREADS:
		return settings_option(s, r->ours) ? set_threads(s, r->ours, key, text) : 0;
	case FOREIGN_IGNORE:
		ignore(key);
		break;
	}
	return 0;
}

int foreign_set(struct settings *s, const char *key, const char *text)
{
	for (const struct foreign_rule *r = foreign_rules; r->keys; r++)
		if (key_fits(key, r->keys) && value_fits(text, r->value))
			return apply(s, r, key, text);
	return -1;
}

void foreign_finish(const char *path)
{
	if (left_out)
		cli_note("--config %s: ignored, without meaning here: %s", path, left_out);
	free(left_out);
	left_out = NULL;
}
