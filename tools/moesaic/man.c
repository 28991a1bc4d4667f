/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic --man: moesaic(1). */
#include "tools/moesaic/generate_text.h"

#include <string.h>

/* Text of a line: backslashes and dashes as troff wants them, no control line by accident. */
static void text(const char *s)
{
	if (*s == '.' || *s == '\'')
		printf("\\&");
	for (; *s; s++) {
		if (*s == '\\')
			printf("\\e");
		else if (*s == '-')
			printf("\\-");
		else
			putchar(*s);
	}
}

static void option(const struct option *o)
{
	const char *place = cli_placeholder(o);
	bool optional = o->traits & OPTION_VALUE_OPTIONAL;

	printf(".TP\n.BR \\-\\-");
	text(o->name);
	if (*place) {
		printf(" \" \\fI%s", optional ? "[" : "");
		text(place);
		printf("%s\\fR\"", optional ? "]" : "");
	}
	printf("\n");
	text(o->help);
	if (o->preset && o->type != OPTION_FLAG) {
		printf(" (");
		text(o->preset);
		printf(")");
	}
	if (o->only) {
		printf(" [");
		text("only ");
		text(o->only);
		printf(" in this version]");
	}
	if (o->aliases && *o->aliases) {
		printf("; also ");
		text(o->aliases);
	}
	putchar('\n');
}

static void command(const struct command *c)
{
	printf(".SS \"moesaic %s", c->name);
	text(c->operands ? " " : "");
	text(c->operands ? c->operands : "");
	printf("\"\n");
	text(c->summary);
	printf(".\n");
	for (const struct option_group *g = c->groups; g && g->title; g++) {
		printf(".PP\n\\fI");
		text(g->title);
		printf("\\fR\n");
		for (const struct option *o = g->options; o->name; o++)
			option(o);
	}
}

static void program(const struct cli_program *p)
{
	printf(".SS \"moesaic %s ", p->name);
	text(p->operands);
	printf("\"\n");
	text(p->summary);
	printf("; moesaic %s \\-\\-help lists what there is, moesaic %s NAME \\-\\-help its flags.\n", p->name, p->name);
}

void cli_man(void)
{
	printf(".TH MOESAIC 1 \"\" \"moesaic %s\" \"User Commands\"\n", moe_version());
	puts(".ad l"); /* choices are long words: lines with them cannot be justified */
	printf(".SH NAME\nmoesaic \\- fine-tune mixture-of-experts language models on CPUs\n"
	       ".SH SYNOPSIS\n.B moesaic\n.I COMMAND\n[flags]\n.SH DESCRIPTION\n"
	       "Each command takes the flags listed with it. With\n.BI \\-\\-config \" FILE\"\n"
	       "(YAML or JSON) the same names are keys, with underscores in place of dashes; flags "
	       "override them.\nThe names of LLaMA\\-Factory and of ktransformers are understood "
	       "too.\n"
	       ".SH COMMANDS\n");
	for (int i = 0; cli_commands[i]; i++)
		command(cli_commands[i]);
	for (const struct cli_program *p = cli_programs; p->name; p++)
		if (p->summary)
			program(p);
	printf(".SH EXIT STATUS\n");
	printf(".TP\n0\ndone\n.TP\n1\nsomething else went wrong\n.TP\n2\nbad input or usage\n"
	       ".TP\n3\nit does not fit into memory\n.TP\n4\ntraining diverged\n"
	       ".TP\n130\ninterrupted, and saved\n");
	printf(".SH ENVIRONMENT\n");
	printf(".TP\n.B MOESAIC_ISA\nkernels to use: see moesaic doctor\n"
	       ".TP\n.B MOESAIC_MACHINE\nfile of measured rates; empty: none\n"
	       ".TP\n.B MOESAIC_PYTHON\nPython that reads text and chats\n");
	printf(".SH SEE ALSO\nmoesaic \\-\\-help, moesaic COMMAND \\-\\-help\\-all\n");
}
