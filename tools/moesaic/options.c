/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/cli.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_NAMES 256

/* ---- finding ---- */

/* true if word is one of the words of list, which sep separates; '-' and '_' are the same. */
static bool among(const char *word, const char *list, char sep)
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

static const struct option *find(const struct settings *s, const char *name, int *index)
{
	*index = 0;
	for (const struct option_group *g = s->command->groups; g && g->title; g++)
		for (const struct option *o = g->options; o->name; o++, (*index)++)
			if (among(name, o->name, ' ') || among(name, o->aliases, ' '))
				return o;
	return NULL;
}

const struct option *settings_option(const struct settings *s, const char *name)
{
	int index;

	return find(s, name, &index);
}

static const struct option_value *value_of(const struct settings *s, const char *name)
{
	int index;
	const struct option *o = find(s, name, &index);

	assert(o);
	(void)o;
	return &s->values[index];
}

static int unknown_flag(const struct settings *s, const char *flag)
{
	const char *names[MAX_NAMES + 1];
	const char *near;
	int n = 0;

	for (const struct option_group *g = s->command->groups; g && g->title; g++)
		for (const struct option *o = g->options; o->name && n < MAX_NAMES; o++)
			names[n++] = o->name;
	names[n] = NULL;
	near = cli_nearest(flag, names);
	if (near)
		return cli_fail(CLI_USAGE, "unknown flag --%s; did you mean --%s?", flag, near);
	return cli_fail(CLI_USAGE, "unknown flag --%s (--help-all lists them)", flag);
}

/* ---- checking ---- */

static bool truth(const char *text, bool *out)
{
	*out = among(text, "true on yes 1 True TRUE On ON Yes", ' ');
	return *out || among(text, "false off no 0 False FALSE Off OFF No", ' ');
}

static bool parse_int(const char *text, int64_t *out)
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

static bool parse_real(const char *text, double *out)
{
	char *end;

	if (strpbrk(text, "xX"))
		return false;
	*out = strtod(text, &end);
	return end != text && !*end && isfinite(*out);
}

/* Bytes: a number, then nothing, K/M/G/T with B (powers of 1000) or iB, or alone (powers of 1024). */
static bool parse_size(const char *text, double *out)
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
		return cli_fail(CLI_USAGE, "--%s %s: must be at least %.15g", o->name, text, o->min);
	if (o->max != 0 && value > o->max)
		return cli_fail(CLI_USAGE, "--%s %s: must be at most %.15g", o->name, text, o->max);
	return 0;
}

static int check_one(const struct option *o, const char *text)
{
	int64_t whole;
	double real;
	bool on;

	switch (o->type) {
	case OPTION_FLAG:
	case OPTION_SWITCH:
		if (!truth(text, &on))
			return cli_fail(CLI_USAGE, "--%s %s: expected on or off", o->name, text);
		return 0;
	case OPTION_INT:
		if (!parse_int(text, &whole))
			return cli_fail(CLI_USAGE, "--%s %s is not a whole number", o->name, text);
		return check_range(o, (double)whole, text);
	case OPTION_REAL:
		if (!parse_real(text, &real))
			return cli_fail(CLI_USAGE, "--%s %s is not a number", o->name, text);
		return check_range(o, real, text);
	case OPTION_SIZE:
		if (!parse_size(text, &real))
			return cli_fail(CLI_USAGE, "--%s %s is not a size such as 12GB or 1.5TiB",
					o->name, text);
		return 0;
	case OPTION_CHOICE:
		if (!among(text, o->arg, '|'))
			return cli_fail(CLI_USAGE, "--%s %s: expected %s", o->name, text, o->arg);
		return 0;
	default:
		return 0;
	}
}

/* Values that cli.md names and this version does not have. Numbers compare as numbers. */
static int check_supported(const struct option *o, const char *text)
{
	double wanted, have;

	if (!o->only || among(text, o->only, '|'))
		return 0;
	if (o->type == OPTION_FLAG || o->type == OPTION_SWITCH) {
		bool on;

		truth(text, &on);
		if (!on)
			return 0;
		return cli_fail(CLI_USAGE, "--%s is not in this version yet", o->name);
	}
	if (parse_real(text, &wanted) && parse_real(o->only, &have) && wanted == have)
		return 0;
	if (!*o->only)
		return cli_fail(CLI_USAGE, "--%s is not in this version yet", o->name);
	return cli_fail(CLI_USAGE, "--%s %s is not in this version yet (it has %s)", o->name, text,
			o->only);
}

static void clear(struct option_value *v)
{
	for (int i = 0; i < v->count; i++)
		free(v->items[i]);
	free(v->items);
	*v = (struct option_value){ 0 };
}

/* Normal forms, so that run.yaml and getters see one spelling. */
static char *normal(const struct option *o, const char *text)
{
	bool on;

	if (o->type == OPTION_FLAG || o->type == OPTION_SWITCH) {
		truth(text, &on);
		return cli_format("%s", o->type == OPTION_FLAG ? (on ? "true" : "false")
							       : (on ? "on" : "off"));
	}
	if (o->type == OPTION_INT) {
		int64_t whole;

		parse_int(text, &whole);
		return cli_format("%lld", (long long)whole);
	}
	return cli_format("%s", text);
}

static int put(const struct option *o, struct option_value *v, enum option_source source,
	       const char *const *items, int count, bool append)
{
	for (int i = 0; i < count; i++) {
		int rc = check_one(o, items[i]);

		rc = rc ? rc : check_supported(o, items[i]);
		if (rc)
			return rc;
	}
	if (count > 1 && o->type != OPTION_LIST)
		return cli_fail(CLI_USAGE, "--%s takes one value, not a list of %d", o->name, count);
	if (count == 0 && o->type == OPTION_LIST)
		return cli_fail(CLI_USAGE, "--%s: an empty list", o->name);
	if (!append)
		clear(v);
	v->items = realloc(v->items, (size_t)(v->count + count + 1) * sizeof *v->items);
	if (!v->items)
		abort();
	for (int i = 0; i < count; i++)
		v->items[v->count++] = normal(o, items[i]);
	v->items[v->count] = NULL;
	v->source = source;
	return 0;
}

int settings_set(struct settings *s, const char *name, const char *const *items, int count)
{
	int index;
	const struct option *o = find(s, name, &index);

	assert(o);
	return put(o, &s->values[index], s->source, items, count, false);
}

void settings_unset(struct settings *s, const char *name)
{
	int index;

	if (find(s, name, &index))
		clear(&s->values[index]);
}

int settings_exclusive(struct settings *s, const char *a, const char *b)
{
	int i, j;

	find(s, a, &i);
	find(s, b, &j);
	if (!s->values[i].count || !s->values[j].count)
		return 0;
	if (s->values[i].source == s->values[j].source)
		return cli_fail(CLI_USAGE, "--%s and --%s exclude each other", a, b);
	settings_unset(s, s->values[i].source < s->values[j].source ? a : b);
	return 0;
}

/* ---- parsing ---- */

static int apply_presets(struct settings *s)
{
	int total = 0, i = 0;

	for (const struct option_group *g = s->command->groups; g && g->title; g++)
		for (const struct option *o = g->options; o->name; o++)
			total++;
	s->values = cli_alloc((size_t)(total + 1) * sizeof *s->values);
	for (const struct option_group *g = s->command->groups; g && g->title; g++)
		for (const struct option *o = g->options; o->name; o++, i++)
			if (o->preset) {
				int rc = put(o, &s->values[i], SOURCE_PRESET, &o->preset, 1, false);

				if (rc)
					return rc;
			}
	return 0;
}

static bool looks_like_flag(const char *text)
{
	return text[0] == '-' && text[1] == '-' && text[2];
}

/* How many of argv belong to the option's value. */
static int value_count(const struct option *o, int argc, char **argv)
{
	int n = 0;

	if (o->type == OPTION_FLAG)
		return 0;
	while (n < argc && !looks_like_flag(argv[n]) && (n == 0 || o->type == OPTION_LIST))
		n++;
	return n;
}

/* One flag at argv[0]; *used: how many arguments it took. seen: lists that flags have set. */
static int parse_flag(struct settings *s, int argc, char **argv, bool *seen, int *used)
{
	char name[128];
	const char *equals = strchr(argv[0], '='), *value = equals ? equals + 1 : NULL;
	const struct option *o;
	int index, n;

	snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - argv[0] - 2) : 120, argv[0] + 2);
	o = find(s, name, &index);
	if (!o)
		return unknown_flag(s, name);
	*used = 1;
	if (value) {
		n = 1;
	} else {
		n = value_count(o, argc - 1, argv + 1);
		*used += n;
		if (n)
			value = argv[1];
		else if (o->type == OPTION_FLAG)
			value = "true";
		else if (o->traits & OPTION_VALUE_OPTIONAL)
			value = "";
		else
			return cli_fail(CLI_USAGE, "--%s needs a value (%s)", o->name,
					o->arg ? o->arg : "VALUE");
	}
	if (n > 1) {
		int rc = put(o, &s->values[index], SOURCE_FLAG, (const char *const *)argv + 1, n,
			     seen[index]);

		seen[index] = true;
		return rc;
	}
	n = put(o, &s->values[index], SOURCE_FLAG, &value, 1, o->type == OPTION_LIST && seen[index]);
	seen[index] = true;
	return n;
}

static int parse_arguments(struct settings *s, int argc, char **argv)
{
	bool seen[MAX_NAMES] = { false };
	bool only_operands = false;

	for (int i = 0; i < argc;) {
		int used = 1, rc;

		if (!only_operands && !strcmp(argv[i], "--")) {
			only_operands = true;
		} else if (!only_operands && looks_like_flag(argv[i])) {
			rc = parse_flag(s, argc - i, argv + i, seen, &used);
			if (rc)
				return rc;
		} else if (s->command->operands) {
			s->operands[s->n_operands++] = argv[i];
		} else {
			return cli_fail(CLI_USAGE, "unexpected argument '%s'", argv[i]);
		}
		i += used;
	}
	return 0;
}

static int check_required(const struct settings *s)
{
	int i = 0;

	for (const struct option_group *g = s->command->groups; g && g->title; g++)
		for (const struct option *o = g->options; o->name; o++, i++)
			if ((o->traits & OPTION_REQUIRED) && !s->values[i].count)
				return cli_fail(CLI_USAGE, "--%s %s is missing", o->name,
						o->arg ? o->arg : "");
	return 0;
}

static bool quiet_flag(int argc, char **argv)
{
	for (int i = 0; i < argc && strcmp(argv[i], "--"); i++)
		if (!strcmp(argv[i], "--quiet"))
			return true;
	return false;
}

static const char *config_path(int argc, char **argv)
{
	for (int i = 0; i < argc && strcmp(argv[i], "--"); i++) {
		if (!strncmp(argv[i], "--config=", 9))
			return argv[i] + 9;
		if (!strcmp(argv[i], "--config") && i + 1 < argc)
			return argv[i + 1];
	}
	return NULL;
}

int settings_parse(struct settings *s, const struct command *command, int argc, char **argv)
{
	const char *config = config_path(argc, argv);
	int rc;

	*s = (struct settings){ .command = command };
	for (int i = 0; i < argc && strcmp(argv[i], "--"); i++)
		if (!strcmp(argv[i], "-h") || !strcmp(argv[i], "--help") ||
		    !strcmp(argv[i], "--help-all")) {
			cli_usage(command, !strcmp(argv[i], "--help-all"));
			return -1;
		}
	cli_set_quiet(quiet_flag(argc, argv));
	s->operands = cli_alloc((size_t)(argc + 1) * sizeof *s->operands);
	rc = apply_presets(s);
	s->source = SOURCE_FILE;
	if (!rc && config && settings_option(s, "config"))
		rc = settings_load(s, config);
	rc = rc ? rc : parse_arguments(s, argc, argv);
	s->source = SOURCE_PRESET; /* what is derived from now on */
	rc = rc ? rc : check_required(s);
	if (!rc && settings_option(s, "quiet"))
		cli_set_quiet(settings_on(s, "quiet"));
	return rc;
}

void settings_free(struct settings *s)
{
	int i = 0;

	if (s->values)
		for (const struct option_group *g = s->command->groups; g && g->title; g++)
			for (const struct option *o = g->options; o->name; o++, i++)
				clear(&s->values[i]);
	free(s->values);
	free(s->operands);
	*s = (struct settings){ 0 };
}

/* ---- reading ---- */

bool settings_given(const struct settings *s, const char *name)
{
	return value_of(s, name)->source != SOURCE_PRESET;
}

bool settings_has(const struct settings *s, const char *name)
{
	return value_of(s, name)->count > 0;
}

const char *settings_text(const struct settings *s, const char *name)
{
	const struct option_value *v = value_of(s, name);

	return v->count ? v->items[0] : NULL;
}

int64_t settings_int(const struct settings *s, const char *name)
{
	const char *text = settings_text(s, name);
	double bytes = 0;
	int64_t whole = 0;

	if (text && settings_option(s, name)->type == OPTION_SIZE) {
		parse_size(text, &bytes);
		return (int64_t)bytes;
	}
	if (text)
		parse_int(text, &whole);
	return whole;
}

double settings_real(const struct settings *s, const char *name)
{
	const char *text = settings_text(s, name);
	double real = 0;

	if (text)
		parse_real(text, &real);
	return real;
}

bool settings_on(const struct settings *s, const char *name)
{
	const char *text = settings_text(s, name);
	bool on = false;

	if (text)
		truth(text, &on);
	return on;
}

int settings_list(const struct settings *s, const char *name, char ***items)
{
	const struct option_value *v = value_of(s, name);

	*items = v->items;
	return v->count;
}

char *settings_joined(const struct settings *s, const char *name)
{
	char **items, *text = cli_format("%s", "");
	int n = settings_list(s, name, &items);

	for (int i = 0; i < n; i++) {
		char *longer = cli_format("%s%s%s", text, i ? "," : "", items[i]);

		free(text);
		text = longer;
	}
	return text;
}
