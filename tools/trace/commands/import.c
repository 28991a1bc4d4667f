/* SPDX-License-Identifier: Apache-2.0 */
/* import: StarPU's own records as a trace. */
#include "tools/trace/command.h"
#include "tools/trace/import_rec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int run(int argc, char **argv);

const struct trace_command trace_command_import = {
	.name = "import",
	.usage = "import tasks.rec [-o FILE]",
	.summary = "StarPU's tasks.rec (starpu_fxt_tool) as a trace",
	.help = "-o FILE  to write; default: tasks.mxt beside the input\n"
		"--json   what was written, for programs\n"
		"Tasks of StarPU's own are contracted: what waits for them waits for what they\n"
		"waited for.\n",
	.run = run,
};

static char *default_path(const char *file)
{
	size_t n = strlen(file);
	char *path = malloc(n + 5);

	if (!path)
		return NULL;
	if (n > 4 && !strcmp(file + n - 4, ".rec"))
		n -= 4;
	memcpy(path, file, n);
	strcpy(path + n, ".mxt");
	return path;
}

static int run(int argc, char **argv)
{
	const char *output = NULL, *file;
	bool json = false;
	const struct trace_flag flags[] = { { .name = "-o", .text = &output },
					    { .name = "--json", .set = &json },
					    { .name = NULL } };
	struct trace_import done;
	char *path = NULL, error[600];
	int rc = trace_flags(&trace_command_import, argc, argv, flags, &file, 1, 1);

	if (rc)
		return rc < 0 ? TRACE_EXIT_DONE : rc;
	if (!output)
		output = path = default_path(file);
	if (!output)
		return trace_fail("out of memory");
	if (trace_import_rec(file, output, &done, error, sizeof error))
		rc = trace_fail("%s", error);
	else if (json)
		trace_written(output, (const struct trace_count[]){ { "tasks", done.tasks },
								    { "dependencies", done.deps },
								    { "contracted", done.contracted },
								    { "incomplete", done.incomplete },
								    { "unknown_dependencies", done.unknown_deps },
								    { NULL, 0 } });
	else
		printf("%s: %u tasks, %u dependencies; contracted %u of StarPU's own and %u "
		       "without "
		       "times; %u dependencies on unknown tasks left out\n",
		       output, done.tasks, done.deps, done.contracted, done.incomplete,
		       done.unknown_deps);
	free(path);
	return rc;
}
