/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/child.h"
#include "tests/tables.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

static bool is_child;
static int child_failures;

#ifdef __SANITIZE_ADDRESS__
/* hwloc's PCI plugin leaks at each load of a topology and is unloaded before the check */
static void __attribute__((constructor)) without_plugins(void)
{
	setenv("HWLOC_PLUGINS_PATH", "/nonexistent", 0);
}

/* StarPU forgets the name of its policy when it cannot start */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
	return "leak:starpu_initialize\n";
}
#endif

bool check_at(bool good, const char *what, const char *file, int line)
{
	if (!is_child) {
		CU_assertImplementation(good, (unsigned)line, what, file, "", CU_FALSE);
		if (!good)
			printf("\n  %s:%d: %s (last error: %s)\n", file, line, what,
			       moe_last_error());
		return good;
	}
	if (!good) {
		child_failures++;
		fprintf(stderr, "\n  %s:%d: %s (last error: %s)\n", file, line, what,
			moe_last_error());
	}
	return good;
}

int check_failures(void)
{
	return child_failures;
}

bool check_error_at(enum moe_status got, enum moe_status want, const char *text, const char *what,
		    const char *file, int line)
{
	char full[400];

	snprintf(full, sizeof full, "%s gives \"%s\", \"%s\" wanted", what, moe_status_text(got),
		 moe_status_text(want));
	if (!check_at(got == want, full, file, line))
		return false;
	snprintf(full, sizeof full, "%s: the text has \"%s\"", what, text);
	return check_at(strstr(moe_last_error(), text) != NULL && moe_last_error()[0], full, file,
			line);
}

bool child_ended(pid_t pid, const char *name)
{
	int status = 0;
	char text[200];

	while (waitpid(pid, &status, 0) < 0)
		;
	if (WIFSIGNALED(status))
		snprintf(text, sizeof text, "child \"%s\" dies of signal %d%s", name,
			 WTERMSIG(status), WTERMSIG(status) == SIGALRM ? " (it hangs)" : "");
	else
		snprintf(text, sizeof text, "child \"%s\" exits with %d", name,
			 WEXITSTATUS(status));
	return check_at(WIFEXITED(status) && !WEXITSTATUS(status), text, __FILE__, __LINE__);
}

bool in_child(const char *name, void (*run)(const void *arg), const void *arg)
{
	pid_t pid;

	moe_test_dir(); /* the parent owns it */
	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		is_child = true;
		alarm((moe_test_full() ? 300 : 120) * SLOW); /* what hangs never ends; a busy machine is slow */
		run(arg);
		fflush(NULL);
		exit(child_failures != 0);
	}
	return check_at(pid > 0, "fork", __FILE__, __LINE__) && child_ended(pid, name);
}

void use_starpu_home(const char *name)
{
	char path[4096];

	snprintf(path, sizeof path, "%s/starpu-%s", moe_test_dir(), name);
	mkdir(path, 0700);
	setenv("STARPU_HOME", path, 1);
}

double cpu_seconds(void)
{
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
	       1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

struct moe_engine *open_with(int workers, int parts, const char *policy)
{
	struct moe_engine_params p = {
		.struct_size = sizeof p, .workers = workers, .parts = parts, .policy = policy,
		.isa = table_isa()
	};
	struct moe_engine *e = NULL;

	CHECK_OK(moe_engine_open(&p, &e));
	return e;
}

struct moe_engine *open_isa(const char *isa, int workers, int parts)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = workers, .parts = parts, .isa = isa };
	struct moe_engine *e = NULL;

	CHECK_OK(moe_engine_open(&p, &e));
	return e;
}

struct moe_engine_info info_of(struct moe_engine *e)
{
	struct moe_engine_info info = { .struct_size = sizeof info };

	CHECK_OK(moe_engine_get_info(e, &info));
	return info;
}
