/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic --completion bash|zsh. */
#include "tools/moesaic/generate_text.h"

#include <string.h>

#define EACH_OPTION(c, o)                                                                          \
	for (const struct option_group *g = (c)->groups; g && g->title; g++)                       \
		for (const struct option *o = g->options; o->name; o++)

static bool is_folder(const struct option *o)
{
	return o->arg && !strcmp(o->arg, "DIR");
}

static bool takes_path(const struct option *o)
{
	return o->arg && (is_folder(o) || !strncmp(o->arg, "FILE", 4));
}

static void print_choices(const struct option *o, char between)
{
	for (const char *c = o->type == OPTION_SWITCH ? "on|off" : o->arg; *c; c++)
		putchar(*c == '|' ? between : *c);
}

static bool has_choices(const struct option *o)
{
	return o->type == OPTION_SWITCH || o->type == OPTION_CHOICE;
}

/* ---- bash ---- */

static void bash_values(const struct command *c)
{
	printf("\t\tcase $prev in\n");
	EACH_OPTION(c, o)
	{
		if (has_choices(o)) {
			printf("\t\t--%s) words=\"", o->name);
			print_choices(o, ' ');
			printf("\" ;;\n");
		} else if (is_folder(o)) {
			printf("\t\t--%s) folders=1 ;;\n", o->name);
		} else if (o->type != OPTION_FLAG) {
			printf("\t\t--%s) files=1 ;;\n", o->name);
		}
	}
	printf("\t\tesac\n");
}

static void bash_command(const struct command *c)
{
	printf("\t%s)\n\t\tflags=\"--help --help-all", c->name);
	EACH_OPTION(c, o) printf(" --%s", o->name);
	printf("\"\n");
	bash_values(c);
	printf("\t\t;;\n");
}

/* Programs of their own are asked what they take. */
#define NAMES_OF "sed -n 's/^  \\([a-z][a-z]*\\) .*/\\1/p'"
#define FLAGS_OF "grep -oE '^ *--[a-z-]+'"

static void bash_program(const struct cli_program *p)
{
	printf("\t%s)\n"
	       "\t\tif [ \"$COMP_CWORD\" = 2 ]; then words=$(${COMP_WORDS[0]} %s --help 2>/dev/null | " NAMES_OF ")\n"
	       "\t\telse flags=\"--help $(${COMP_WORDS[0]} %s ${COMP_WORDS[2]} --help 2>/dev/null | " FLAGS_OF ")\"; fi\n"
	       "\t\t;;\n",
	       p->name, p->name, p->name);
}

static void bash(void)
{
	printf("# bash completion for moesaic, made by moesaic --completion bash\n"
	       "_moesaic()\n{\n"
	       "\tlocal cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
	       "\tlocal flags= words= files= folders=\n\tCOMPREPLY=()\n"
	       "\tif [ \"$COMP_CWORD\" = 1 ]; then\n\t\tCOMPREPLY=($(compgen -W \"");
	for (int i = 0; cli_commands[i]; i++)
		printf("%s ", cli_commands[i]->name);
	for (const struct cli_program *p = cli_programs; p->name; p++)
		if (p->summary)
			printf("%s ", p->name);
	printf("--help --help-all --version\" -- \"$cur\"))\n\t\treturn\n\tfi\n"
	       "\tcase ${COMP_WORDS[1]} in\n");
	for (int i = 0; cli_commands[i]; i++)
		bash_command(cli_commands[i]);
	for (const struct cli_program *p = cli_programs; p->name; p++)
		if (p->summary)
			bash_program(p);
	printf("\tesac\n"
	       "\tif [ -n \"$words\" ]; then COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
	       "\telif [ -n \"$folders\" ]; then compopt -o filenames 2>/dev/null; "
	       "COMPREPLY=($(compgen -d -- \"$cur\"))\n"
	       "\telif [[ $cur == -* ]]; then COMPREPLY=($(compgen -W \"$flags\" -- \"$cur\"))\n"
	       "\telse compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- \"$cur\")); "
	       "fi\n"
	       "}\ncomplete -F _moesaic moesaic\n");
}

/* ---- zsh ---- */

/* Inside '...[...]:' of _arguments. */
static void zsh_text(const char *text)
{
	for (; *text; text++) {
		if (*text == '\'')
			printf("'\\''");
		else if (strchr("[]:\\", *text))
			printf("\\%c", *text);
		else
			putchar(*text);
	}
}

static void zsh_option(const struct option *o)
{
	const char *place = cli_placeholder(o);

	printf("\t\t\t'%s--%s[", o->type == OPTION_LIST ? "*" : "", o->name);
	zsh_text(o->help);
	putchar(']');
	if (*place) {
		printf("%s", o->traits & OPTION_VALUE_OPTIONAL ? "::" : ":");
		zsh_text(place);
		putchar(':');
		if (has_choices(o)) {
			putchar('(');
			print_choices(o, ' ');
			putchar(')');
		} else if (takes_path(o)) {
			printf("%s", is_folder(o) ? "_files -/" : "_files");
		}
	}
	printf("' \\\n");
}

static void zsh_name(const char *name, const char *summary)
{
	printf("\t\t'%s:", name);
	zsh_text(summary);
	printf("'\n");
}

static void zsh(void)
{
	printf("#compdef moesaic\n# made by moesaic --completion zsh\n_moesaic() {\n"
	       "\tlocal -a commands\n\tcommands=(\n");
	for (int i = 0; cli_commands[i]; i++)
		zsh_name(cli_commands[i]->name, cli_commands[i]->summary);
	for (const struct cli_program *p = cli_programs; p->name; p++)
		if (p->summary)
			zsh_name(p->name, p->summary);
	printf("\t)\n\tif ((CURRENT == 2)); then\n\t\t_describe command "
	       "commands\n\t\treturn\n\tfi\n"
	       "\tlocal command=$words[2] program=$words[1]\n\tshift words\n\t((CURRENT--))\n\tcase $command in\n");
	for (int i = 0; cli_commands[i]; i++) {
		printf("\t%s)\n\t\t_arguments -S \\\n", cli_commands[i]->name);
		EACH_OPTION(cli_commands[i], o) zsh_option(o);
		printf("\t\t\t'--help[most used flags]' '--help-all[all flags]'%s\n\t\t;;\n",
		       cli_commands[i]->operands ? " '*:file:_files'" : "");
	}
	for (const struct cli_program *p = cli_programs; p->name; p++)
		if (p->summary)
			printf("\t%s)\n\t\tif ((CURRENT == 2)); then compadd -- ${(f)\"$($program %s --help 2>/dev/null | " NAMES_OF ")\"}\n"
			       "\t\telse compadd -- --help ${(f)\"$($program %s $words[2] --help 2>/dev/null | " FLAGS_OF
			       " | tr -d ' ')\"}; _files; fi\n\t\t;;\n",
			       p->name, p->name, p->name);
	printf("\tesac\n}\n_moesaic \"$@\"\n");
}

int cli_completion(const char *shell)
{
	if (shell && !strcmp(shell, "bash")) {
		bash();
		return 0;
	}
	if (shell && !strcmp(shell, "zsh")) {
		zsh();
		return 0;
	}
	return cli_fail(CLI_USAGE, "--completion %s: expected bash or zsh", shell ? shell : "");
}
