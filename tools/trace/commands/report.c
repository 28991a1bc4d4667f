/* SPDX-License-Identifier: Apache-2.0 */
/* report: the trace as one HTML page. */
#include "tools/trace/command.h"
#include "tools/trace/metrics.h"
#include "tools/trace/report/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int run(int argc, char **argv);

const struct trace_command trace_command_report = {
	.name = "report",
	.usage = "report FILE [-o PAGE.html]",
	.summary = "one HTML page: what limits a step, time line, experts, memory",
	.help = "-o PAGE.html  to write; default: FILE with .html\n"
		"--step a:b    only tasks of these steps\n"
		"--json        what was written, for programs\n"
		"The page needs no network. Traces of more than a few million tasks are better\n"
		"cut with --step.\n",
	.run = run,
};

static char *default_path(const char *file)
{
	size_t n = strlen(file);
	char *path = malloc(n + 6);

	if (!path)
		return NULL;
	if (n > 4 && !strcmp(file + n - 4, ".mxt"))
		n -= 4;
	memcpy(path, file, n);
	strcpy(path + n, ".html");
	return path;
}

static int run(int argc, char **argv)
{
	const char *output = NULL, *step = NULL, *file, *slash;
	bool json = false;
	const struct trace_flag flags[] = { { .name = "-o", .text = &output },
					    { .name = "--step", .text = &step },
					    { .name = "--json", .set = &json },
					    { .name = NULL } };
	struct trace_slice slice = { 0 };
	char *path = NULL, error[600];
	struct trace t;
	int rc = trace_flags(&trace_command_report, argc, argv, flags, &file, 1, 1);

	if (rc)
		return rc < 0 ? TRACE_EXIT_DONE : rc;
	slice.steps = step != NULL;
	if ((step && trace_flag_range("--step", step, slice.step)) || trace_load(&t, file, &slice))
		return TRACE_EXIT_BAD;
	if (!output)
		output = path = default_path(file);
	slash = strrchr(file, '/');
	if (!output)
		rc = trace_fail("out of memory");
	else if (!t.n_tasks)
		rc = trace_fail("%s: no task has run in what was asked for", file);
	else if (trace_report(&t, slash ? slash + 1 : file, output, error, sizeof error))
		rc = trace_fail("%s", error);
	else if (json)
		trace_written(output, (const struct trace_count[]){ { "tasks", t.n_tasks }, { NULL, 0 } });
	else {
		printf("%s: open it in a browser\n", output);
		trace_note_not_whole(&t, stdout);
	}
	free(path);
	trace_free(&t);
	return rc;
}
