/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/cli.h"
#include "tools/moesaic/option_values.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAMES 256

/* ---- finding ---- */

static const struct option *find(const struct settings *s, const char *name, int *index)
{
	*index = 0;
	for (const struct option_group *g = s->command->groups; g && g->title; g++)
		for (const struct option *o = g->options; o->name; o++, (*index)++)
			if (option_word_among(name, o->name, ' ') ||
			    option_word_among(name, o->aliases, ' '))
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

/* ---- setting ---- */

static void clear(struct option_value *v)
{
	for (int i = 0; i < v->count; i++)
		free(v->items[i]);
	free(v->items);
	*v = (struct option_value){ 0 };
}

static int put(const struct option *o, struct option_value *v, enum option_source source,
	       const char *const *items, int count, bool append)
{
	for (int i = 0; i < count; i++) {
		int rc = option_check(o, items[i]);

		if (rc)
			return rc;
	}
	if (count > 1 && o->type != OPTION_LIST)
		return cli_fail(CLI_USAGE, "--%s takes one value, not a list of %d", o->name,
				count);
	if (count == 0 && o->type == OPTION_LIST)
		return cli_fail(CLI_USAGE, "--%s: an empty list", o->name);
	if (!append)
		clear(v);
	v->items = realloc(v->items, (size_t)(v->count + count + 1) * sizeof *v->items);
	if (!v->items)
		abort();
	for (int i = 0; i < count; i++)
		v->items[v->count++] = option_normal(o, items[i]);
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

int settings_add(struct settings *s, const char *name, const char *item)
{
	int index;
	const struct option *o = find(s, name, &index);
	struct option_value *v = &s->values[index];

	assert(o && o->type == OPTION_LIST);
	return put(o, v, s->source, &item, 1, v->source == s->source);
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
	int index, n, rc;

	snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - argv[0] - 2) : 120,
		 argv[0] + 2);
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
	rc = put(o, &s->values[index], SOURCE_FLAG, n > 1 ? (const char *const *)argv + 1 : &value, n > 1 ? n : 1,
		 o->type == OPTION_LIST && seen[index]);
	seen[index] = true;
	return rc;
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

bool settings_flagged(const struct settings *s, const char *name)
{
	return value_of(s, name)->source == SOURCE_FLAG;
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
		option_size(text, &bytes);
		return (int64_t)bytes;
	}
	if (text)
		option_int(text, &whole);
	return whole;
}

double settings_real(const struct settings *s, const char *name)
{
	const char *text = settings_text(s, name);
	double real = 0;

	if (text)
		option_real(text, &real);
	return real;
}

bool settings_on(const struct settings *s, const char *name)
{
	const char *text = settings_text(s, name);
	bool on = false;

	if (text)
		option_truth(text, &on);
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
