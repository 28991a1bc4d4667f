/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/option_values.h"
#include "tools/moesaic/cli.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* true if word is one of the words of list, which sep separates; '-' and '_' are the same. */
bool option_word_among(const char *word, const char *list, char sep)
{
	size_t n = strlen(word);

	for (const char *at = list; at && *at; at = strchr(at, sep) ? strchr(at, sep) + 1 : NULL) {
		const char *end = strchr(at, sep);
		size_t length = end ? (size_t)(end - at) : strlen(at), i = 0;

		while (i < n && i < length &&
		       (word[i] == '_' ? '-' : word[i]) == (at[i] == '_' ? '-' : at[i]))
			i++;
		if (i == n && i == length)
			return true;
	}
	return false;
}

bool option_truth(const char *text, bool *out)
{
	*out = option_word_among(text, "true on yes 1 True TRUE On ON Yes", ' ');
	return *out || option_word_among(text, "false off no 0 False FALSE Off OFF No", ' ');
}

bool option_int(const char *text, int64_t *out)
{
	char *end;
	double real;

	errno = 0;
	*out = strtoll(text, &end, 10);
	if (end != text && !*end)
		return !errno;
	real = strtod(text, &end); /* 1e5 and 3.0 are whole numbers too */
	if (end == text || *end || !(fabs(real) < 9e15) || real != floor(real))
		return false;
	*out = (int64_t)real;
	return true;
}

bool option_real(const char *text, double *out)
{
	char *end;

	if (strpbrk(text, "xX"))
		return false;
	*out = strtod(text, &end);
	return end != text && !*end && isfinite(*out);
}

/* Bytes: a number, then nothing, K/M/G/T with B (powers of 1000) or iB, or alone (powers of 1024). */
bool option_size(const char *text, double *out)
{
	static const char units[] = "KMGT";
	char *end;
	const char *unit;

	if (strpbrk(text, "xX"))
		return false;
	*out = strtod(text, &end);
	if (end == text || !isfinite(*out) || *out <= 0)
		return false;
	while (*end == ' ')
		end++;
	unit = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
	if (unit) {
		bool decimal = !strcasecmp(end + 1, "B");

		if (!decimal && end[1] && strcasecmp(end + 1, "iB"))
			return false;
		*out *= pow(decimal ? 1000 : 1024, (double)(unit - units + 1));
		return *out < 9e18;
	}
	return (!*end || !strcasecmp(end, "B")) && *out < 9e18;
}

static int check_range(const struct option *o, double value, const char *text)
{
	if ((o->traits & OPTION_ABOVE_ZERO) && !(value > 0))
		return cli_fail(CLI_USAGE, "--%s %s: must be above 0", o->name, text);
	if (o->min == 0 && o->max == 0)
		return 0;
	if (value < o->min)
		return cli_fail(CLI_USAGE, "--%s %s: must be at least %.15g", o->name, text,
				o->min);
	if (o->max != 0 && value > o->max)
		return cli_fail(CLI_USAGE, "--%s %s: must be at most %.15g", o->name, text, o->max);
	return 0;
}

/* YAML's `no` is the truth value false for some readers and writers. */
static bool says_no(const struct option *o, const char *text)
{
	bool on;

	return o->type == OPTION_CHOICE && option_word_among("no", o->arg, '|') && option_truth(text, &on) && !on;
}

static int check_one(const struct option *o, const char *text)
{
	int64_t whole;
	double real;
	bool on;

	switch (o->type) {
	case OPTION_FLAG:
	case OPTION_SWITCH:
		if (!option_truth(text, &on))
			return cli_fail(CLI_USAGE, "--%s %s: expected on or off", o->name, text);
		return 0;
	case OPTION_INT:
		if (!option_int(text, &whole))
			return cli_fail(CLI_USAGE, "--%s %s is not a whole number", o->name, text);
		return check_range(o, (double)whole, text);
	case OPTION_REAL:
		if (!option_real(text, &real))
			return cli_fail(CLI_USAGE, "--%s %s is not a number", o->name, text);
		return check_range(o, real, text);
	case OPTION_SIZE:
		if (!option_size(text, &real))
			return cli_fail(CLI_USAGE, "--%s %s is not a size such as 12GB or 1.5TiB",
					o->name, text);
		return 0;
	case OPTION_CHOICE:
		if (!option_word_among(text, o->arg, '|') && !says_no(o, text))
			return cli_fail(CLI_USAGE, "--%s %s: expected %s", o->name, text, o->arg);
		return 0;
	default:
		return 0;
	}
}

/* Values that are known and that this version does not have. Numbers compare as numbers. */
static int check_supported(const struct option *o, const char *text)
{
	double wanted, have;

	if (!o->only || option_word_among(text, o->only, '|'))
		return 0;
	if (option_real(text, &wanted) && option_real(o->only, &have) && wanted == have)
		return 0;
	return cli_fail(CLI_USAGE, "--%s %s is not in this version yet (it has %s)", o->name, text,
			o->only);
}

char *option_normal(const struct option *o, const char *text)
{
	bool on;

	if (o->type == OPTION_FLAG || o->type == OPTION_SWITCH) {
		option_truth(text, &on);
		return cli_format("%s", o->type == OPTION_FLAG ? (on ? "true" : "false")
							       : (on ? "on" : "off"));
	}
	if (o->type == OPTION_INT) {
		int64_t whole;

		option_int(text, &whole);
		return cli_format("%lld", (long long)whole);
	}
	return cli_format("%s", says_no(o, text) ? "no" : text);
}

int option_check(const struct option *o, const char *text)
{
	int rc = check_one(o, text);

	return rc ? rc : check_supported(o, text);
}
