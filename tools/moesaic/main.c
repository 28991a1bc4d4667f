/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic COMMAND: finds the command, parses its flags, runs it. Each command is a file of its own. */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/generate_text.h"
#include "tools/standard_files.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

const struct command *const cli_commands[] = {
	&command_train,	   &command_data, &command_eval, &command_generate,
	&command_estimate, &command_merge, &command_convert, &command_inspect,
	&command_doctor,   NULL,
};

/* Run as git runs its subcommands: `trace X` is moesaic-trace X, the others are its subcommands. */
static const char *const external[] = { "trace", "replay", "sweep", NULL };

/* Without a summary: not in this version, so no help names it. */
const struct cli_program cli_programs[] = {
	{ "trace", "SUBCOMMAND FILE...", "where a recorded run's time went" },
	{ "bench", "NAME", "times this machine" },
	{ "replay", NULL, NULL },
	{ "sweep", NULL, NULL },
	{ NULL, NULL, NULL },
};

/* The program beside this one, NULL: cannot be told. */
static const char *beside(const char *name, char *buf, size_t size)
{
	ssize_t n = readlink("/proc/self/exe", buf, size);
	size_t length = strlen(name) + 1;
	char *slash;

	if (n <= 0 || (size_t)n >= size)
		return NULL;
	buf[n] = 0;
	slash = strrchr(buf, '/');
	if (!slash || (size_t)(slash + 1 - buf) + length > size)
		return NULL;
	memcpy(slash + 1, name, length);
	return buf;
}

/*
 * When OpenBLAS is loaded it starts a thread per core, and each asks for 128 MiB until it gets them: where `ulimit -v`
 * leaves no room for all, the end of the program waits for them for ever. They are of no use here (workers are the
 * engine's), and what says so has to be there before loading: the program begins once more.
 */
static void begin_without_blas_threads(char **argv)
{
	char path[4096];
	struct rlimit limit;
	ssize_t n;

	if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY || getenv("OPENBLAS_NUM_THREADS"))
		return;
	n = readlink("/proc/self/exe", path, sizeof path - 1);
	if (n <= 0 || setenv("OPENBLAS_NUM_THREADS", "1", 1))
		return;
	path[n] = 0;
	execv(path, argv); /* where that fails, as if nothing had been tried */
}

static int run_external(char **argv)
{
	char buf[4096];
	const char *path = beside("moesaic-trace", buf, sizeof buf);

	for (int i = 0; external[i]; i++) {
		const char *name = argv[1];

		if (strcmp(name, external[i]))
			continue;
		argv += i == 0;
		argv[0] = "moesaic-trace";
		if (path)
			execv(path, argv);
		execvp(argv[0], argv);
		return cli_fail(
			CLI_USAGE,
			"%s needs moesaic-trace, which is neither beside moesaic nor in PATH",
			name);
	}
	return -1;
}

/* What other programs call it. */
static const char *named_elsewhere(const char *name)
{
	static const char *const names[][2] = {
		{ "chat", "generate" }, { "predict", "generate" }, { "run", "generate" }, { "infer", "generate" },
		{ "finetune", "train" }, { "sft", "train" },	    { "evaluate", "eval" }, { "tokenize", "data" },
		{ "preprocess", "data" }, { "export", "merge" },    { "quantize", "convert" },
	};

	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (!strcmp(name, names[i][0]))
			return names[i][1];
	return NULL;
}

static int unknown_command(const char *name)
{
	const char *names[32], *near = named_elsewhere(name);
	int n = 0;

	for (int i = 0; cli_commands[i]; i++)
		names[n++] = cli_commands[i]->name;
	for (const struct cli_program *p = cli_programs; p->name; p++)
		names[n++] = p->name;
	names[n] = NULL;
	near = near ? near : cli_nearest(name, names);
	if (*name == '-')
		return cli_fail(CLI_USAGE, "unknown flag %s (moesaic --help)", name);
	if (near)
		return cli_fail(CLI_USAGE, "unknown command '%s'; did you mean '%s'?", name, near);
	return cli_fail(CLI_USAGE, "unknown command '%s' (moesaic --help lists them)", name);
}

static void print_log(enum moe_log_level level, const char *text, void *user)
{
	(void)user;
	if (level >= MOE_LOG_WARNING)
		fprintf(stderr, "moesaic: %s: %s\n", level == MOE_LOG_ERROR ? "error" : "warning",
			text);
}

static int run_command(const struct command *c, int argc, char **argv)
{
	struct settings s;
	int rc;

	cli_set_command(c->name);
	rc = settings_parse(&s, c, argc - 2, argv + 2);
	if (rc == 0)
		rc = c->run(&s, argc, argv);
	settings_free(&s);
	return rc == -1 ? CLI_DONE : rc;
}

/* What was printed must have arrived: a full disk is an error, a closed pipe is not. */
static int finish(int rc)
{
	if (fflush(stdout) == 0 && !ferror(stdout))
		return rc;
	if (rc || errno == EPIPE)
		return rc;
	return cli_fail(CLI_USAGE, "standard output cannot be written: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	int rc;

	begin_without_blas_threads(argv);
	standard_files_take();
	setvbuf(stdout, NULL, _IOLBF, 0);
	signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is then an error of write, with a text */
	moe_log_set(print_log, NULL);
	if (argc < 2) {
		cli_usage(NULL, 0);
		return CLI_USAGE;
	}
	if (!strcmp(argv[1], "--version")) {
		printf("moesaic %s\n", moe_version());
		return finish(CLI_DONE);
	}
	if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
		cli_usage(NULL, 0);
		return finish(CLI_DONE);
	}
	if (!strcmp(argv[1], "--help-all")) {
		for (int i = 0; cli_commands[i]; i++) {
			cli_usage(cli_commands[i], 1);
			putchar('\n');
		}
		cli_usage_programs();
		return finish(CLI_DONE);
	}
	if (!strcmp(argv[1], "bench"))
		return finish(bench_exec(argv));
	if (!strcmp(argv[1], "--completion"))
		return finish(cli_completion(argc > 2 ? argv[2] : NULL));
	if (!strcmp(argv[1], "--man")) {
		cli_man();
		return finish(CLI_DONE);
	}
	for (int i = 0; cli_commands[i]; i++)
		if (!strcmp(argv[1], cli_commands[i]->name))
			return finish(run_command(cli_commands[i], argc, argv));
	rc = run_external(argv);
	return rc >= 0 ? rc : unknown_command(argv[1]);
}
