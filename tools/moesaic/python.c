/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/python.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

void arguments_add(struct arguments *a, const char *text)
{
	a->items = realloc(a->items, (size_t)(a->count + 2) * sizeof *a->items);
	if (!a->items)
		abort();
	a->items[a->count++] = cli_format("%s", text);
	a->items[a->count] = NULL;
}

void arguments_free(struct arguments *a)
{
	for (int i = 0; i < a->count; i++)
		free(a->items[i]);
	free(a->items);
	*a = (struct arguments){ 0 };
}

void arguments_options(struct arguments *a, const struct settings *s, const struct option *table)
{
	for (const struct option *o = table; o->name; o++) {
		char **items, *flag;
		int n = settings_list(s, o->name, &items);

		if (!n || (o->type == OPTION_FLAG && !settings_on(s, o->name)))
			continue;
		flag = cli_format("--%s", o->name);
		if (o->type == OPTION_LIST) {
			arguments_add(a, flag);
			for (int i = 0; i < n; i++)
				arguments_add(a, items[i]);
		} else if (o->type == OPTION_FLAG) {
			arguments_add(a, flag);
		} else {
			/* in one word: a value may begin with a dash */
			char *both = cli_format("%s=%s", flag, items[0]);

			arguments_add(a, both);
			free(both);
		}
		free(flag);
	}
}

char *above_program(int levels, const char *relative)
{
	char exe[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
	char *path;

	if (n < 0)
		return NULL;
	exe[n] = 0;
	for (int up = 0; up <= levels; up++) {
		char *slash = strrchr(exe, '/');

		if (!slash)
			return NULL;
		*slash = 0;
	}
	path = cli_format("%s/%s", exe, relative);
	if (access(path, R_OK) == 0)
		return path;
	free(path);
	return NULL;
}

/* In a checkout (build/NAME/moesaic), and installed (bin/moesaic), nothing needs to be set. */
static char *find(const char *in_checkout, const char *installed)
{
	char *path = above_program(2, in_checkout);

	return path ? path : above_program(1, installed);
}

static char *interpreter(void)
{
	const char *set = getenv("MOESAIC_PYTHON");
	char *path = set && *set ? cli_format("%s", set)
				 : find("build/venv/bin/python", "share/moesaic/venv/bin/python");

	return path ? path : cli_format("python3");
}

static void add_package_path(void)
{
	char *folder = find("python/moesaic/data.py", "share/moesaic/python/moesaic/data.py");
	char *joined;
	const char *old = getenv("PYTHONPATH");

	if (!folder)
		return;
	*strstr(folder, "/moesaic/data.py") = 0;
	joined = old && *old ? cli_format("%s:%s", old, folder) : cli_format("%s", folder);
	setenv("PYTHONPATH", joined, 1);
	setenv("PYTHONDONTWRITEBYTECODE", "1", 0);
	setenv("PYTHONUTF8", "1", 1); /* data, answers and what is printed are UTF-8 in every locale */
	unsetenv("PYTHONIOENCODING");
	free(joined);
	free(folder);
}

int python_exec(const char *module, const struct arguments *a)
{
	struct arguments all = { 0 };
	sigset_t interrupt;
	char *python = interpreter(), *name = cli_format("moesaic.%s", module);
	int rc;

	add_package_path();
	arguments_add(&all, python);
	arguments_add(&all, "-m");
	arguments_add(&all, name);
	for (int i = 0; i < a->count; i++)
		arguments_add(&all, a->items[i]);
	fflush(NULL);
	/* Ctrl-C while Python starts is kept until it can say what became of it: run_main takes it */
	sigemptyset(&interrupt);
	sigaddset(&interrupt, SIGINT);
	sigprocmask(SIG_BLOCK, &interrupt, NULL);
	execvp(python, all.items);
	sigprocmask(SIG_UNBLOCK, &interrupt, NULL);
	rc = cli_fail(CLI_USAGE, "%s: %s; MOESAIC_PYTHON names another Python", python,
		      strerror(errno));
	arguments_free(&all);
	free(python);
	free(name);
	return rc;
}

static int wait_for(pid_t pid)
{
	int status;

	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return CLI_FAILED;
	if (WIFSIGNALED(status))
		return WTERMSIG(status) == SIGINT ? CLI_INTERRUPTED : CLI_FAILED;
	return WEXITSTATUS(status);
}

/* Its exit codes 2 and 130 come with a line of its own; anything else is a Python that cannot run it. */
static int python_verdict(const char *module, int rc)
{
	char *python;

	if (rc == 0 || rc == CLI_USAGE || rc == CLI_INTERRUPTED)
		return rc;
	python = interpreter();
	cli_fail(CLI_USAGE,
		 "%s -m moesaic.%s failed; MOESAIC_PYTHON and PYTHONPATH say where Python "
		 "and the package are",
		 python, module);
	free(python);
	return CLI_USAGE;
}

int python_run(const char *module, const struct arguments *a, bool to_stderr)
{
	void (*old)(int);
	pid_t pid;
	int rc;

	fflush(NULL);
	pid = fork();
	if (pid < 0)
		return cli_fail(CLI_FAILED, "fork: %s", strerror(errno));
	if (pid == 0) {
		if (to_stderr)
			dup2(STDERR_FILENO, STDOUT_FILENO);
		_exit(python_exec(module, a));
	}
	/* a Ctrl-C reaches both; Python says what became of it */
	old = signal(SIGINT, SIG_IGN);
	rc = wait_for(pid);
	signal(SIGINT, old);
	return python_verdict(module, rc);
}

static void close_pair(int fd[2])
{
	if (fd[0] >= 0)
		close(fd[0]);
	if (fd[1] >= 0)
		close(fd[1]);
}

int python_start(const char *module, const struct arguments *a, struct python_child *child)
{
	int in[2] = { -1, -1 }, out[2] = { -1, -1 };

	*child = (struct python_child){ .pid = -1 };
	fflush(NULL);
	if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC)) {
		close_pair(in);
		return cli_fail(CLI_FAILED, "pipe: %s", strerror(errno));
	}
	child->pid = fork();
	if (child->pid == 0) {
		dup2(in[0], STDIN_FILENO);
		dup2(out[1], STDOUT_FILENO);
		_exit(python_exec(module, a));
	}
	if (child->pid < 0) {
		close_pair(in);
		close_pair(out);
		return cli_fail(CLI_FAILED, "fork: %s", strerror(errno));
	}
	close(in[0]);
	close(out[1]);
	child->to = fdopen(in[1], "w");
	child->from = fdopen(out[0], "r");
	if (!child->to || !child->from)
		return cli_fail(CLI_FAILED, "fdopen: %s", strerror(errno));
	signal(SIGPIPE, SIG_IGN); /* a child that died shows at its next answer */
	return 0;
}

int python_stop(const char *module, struct python_child *child)
{
	int rc;

	if (child->pid < 0)
		return 0;
	if (child->to)
		fclose(child->to);
	if (child->from)
		fclose(child->from);
	rc = python_verdict(module, wait_for(child->pid));
	*child = (struct python_child){ .pid = -1 };
	return rc;
}

bool python_ready(char **path)
{
	pid_t pid;

	*path = interpreter();
	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		int null = open("/dev/null", O_RDWR);

		dup2(null, STDIN_FILENO);
		dup2(null, STDOUT_FILENO);
		dup2(null, STDERR_FILENO);
		execlp(*path, *path, "-c", "import numpy, tokenizers, jinja2", (char *)NULL);
		_exit(127);
	}
	return pid > 0 && wait_for(pid) == 0;
}
