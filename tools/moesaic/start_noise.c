/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/start_noise.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NOISE "_perf_model_add_dir"

static int real_stderr = -1, kept = -1;

/* Only what a signal handler may call. */
static void on_abort(int sig)
{
	char buf[512];
	ssize_t n;

	lseek(kept, 0, SEEK_SET);
	while ((n = read(kept, buf, sizeof buf)) > 0)
		if (write(real_stderr, buf, (size_t)n) < 0)
			break;
	signal(sig, SIG_DFL);
	raise(sig);
}

void start_noise_begin(void)
{
	fflush(stderr);
	kept = memfd_create("stderr", MFD_CLOEXEC);
	real_stderr = kept < 0 ? -1 : fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
	if (real_stderr < 0)
		return;
	signal(SIGABRT, on_abort);
	dup2(kept, STDERR_FILENO);
}

void start_noise_end(void)
{
	char line[1024];
	FILE *f;

	fflush(stderr);
	if (real_stderr >= 0) {
		dup2(real_stderr, STDERR_FILENO);
		close(real_stderr);
		signal(SIGABRT, SIG_DFL);
	}
	real_stderr = -1;
	if (kept < 0)
		return;
	lseek(kept, 0, SEEK_SET);
	f = fdopen(kept, "r");
	while (f && fgets(line, sizeof line, f))
		if (!strstr(line, NOISE))
			fputs(line, stderr);
	if (f)
		fclose(f);
	else
		close(kept);
	kept = -1;
}
