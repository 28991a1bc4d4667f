/* SPDX-License-Identifier: Apache-2.0 */
/* Help texts, 80 columns wide. */
#include "tools/moesaic/generate_text.h"

#include <stdlib.h>
#include <string.h>

#define INDENT 30
#define WIDTH 79

/* text from column INDENT on, broken at spaces and indented. */
static void wrap(const char *text)
{
	int at = INDENT;

	while (*text) {
		int n = (int)strcspn(text, " ");

		if (at > INDENT && at + 1 + n > WIDTH) {
			printf("\n%*s", INDENT, "");
			at = INDENT;
		} else if (at > INDENT) {
			putchar(' ');
			at++;
		}
		printf("%.*s", n, text);
		at += n;
		text += n + strspn(text + n, " ");
	}
	putchar('\n');
}

/* "" unless this version has less than the flag's other values. */
static char *limits(const struct option *o)
{
	if (!o->only)
		return cli_format("%s", "");
	return *o->only ? cli_format(" [only %s yet]", o->only) : cli_format(" [not yet]");
}

const char *cli_placeholder(const struct option *o)
{
	static const char *const places[] = {
		[OPTION_SWITCH] = "on|off", [OPTION_INT] = "N",	    [OPTION_REAL] = "X",
		[OPTION_SIZE] = "SIZE",	    [OPTION_TEXT] = "TEXT", [OPTION_LIST] = "TEXT...",
		[OPTION_CHOICE] = "NAME",
	};

	return o->type == OPTION_FLAG ? "" : o->arg ? o->arg : places[o->type];
}

/* From column `at` on, choices broken behind a bar; the column where it ends. */
static int show_place(const char *place, int at)
{
	while (*place) {
		int n = (int)strcspn(place, "|");

		n += place[n] == '|';
		if (at + n > WIDTH)
			at = printf("\n      ") - 1;
		at += printf("%.*s", n, place);
		place += n;
	}
	return at;
}

static void show_option(const struct option *o)
{
	const char *place = cli_placeholder(o);
	bool optional = o->traits & OPTION_VALUE_OPTIONAL;
	char *preset = o->preset && o->type != OPTION_FLAG ? cli_format(" (%s)", o->preset)
							   : cli_format("%s", "");
	char *only = limits(o), *text = cli_format("%s%s%s", o->help, preset, only);
	int at = printf("  --%s%s%s", o->name, *place ? " " : "", optional ? "[" : "");

	at = show_place(place, at) + printf("%s", optional ? "]" : "");

	if (at >= INDENT - 1) {
		putchar('\n');
		at = 0;
	}
	printf("%*s", INDENT - at, "");
	wrap(text);
	free(only);
	free(preset);
	free(text);
}

static void show_groups(const struct command *c, int all)
{
	for (const struct option_group *g = c->groups; g && g->title; g++) {
		bool titled = false;

		for (const struct option *o = g->options; o->name; o++) {
			if (!all && !(o->traits & OPTION_COMMON))
				continue;
			if (all && !titled)
				printf("\n%s\n", g->title);
			titled = true;
			show_option(o);
		}
	}
}

void cli_usage_programs(void)
{
	for (const struct cli_program *p = cli_programs; p->name; p++)
		if (p->summary)
			printf("  %-10s %s\n", p->name, p->summary);
}

static void show_commands(void)
{
	printf("usage: moesaic COMMAND [flags]\n\n");
	for (int i = 0; cli_commands[i]; i++)
		printf("  %-10s %s\n", cli_commands[i]->name, cli_commands[i]->summary);
	cli_usage_programs();
	printf("\nThe most used flags of train:\n");
	for (int i = 0; cli_commands[i]; i++)
		if (!strcmp(cli_commands[i]->name, "train"))
			show_groups(cli_commands[i], 0);
	printf("\nmoesaic COMMAND --help, moesaic COMMAND --help-all, moesaic --version\n");
}

void cli_usage(const struct command *c, int all)
{
	if (!c) {
		show_commands();
		return;
	}
	printf("usage: moesaic %s [flags]%s%s\n%s\n", c->name, c->operands ? " " : "",
	       c->operands ? c->operands : "", c->summary);
	if (!all)
		putchar('\n');
	show_groups(c, all);
	if (!all && c->groups)
		printf("\n--help-all lists every flag. In --config FILE (YAML or JSON) the names "
		       "have\n"
		       "underscores. Exit codes: 0 done, 2 bad input or usage, 3 does not fit,\n"
		       "4 diverged, 130 interrupted and saved.\n");
}
