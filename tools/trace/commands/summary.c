/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/command.h"

#include <stdio.h>

static int run(int argc, char **argv);

const struct trace_command trace_command_summary = {
	.name = "summary",
	.usage = "summary FILE",
	.summary = "where the time goes",
	.run = run,
};

static int run(int argc, char **argv)
{
	const struct trace_flag flags[] = { { 0 } };
	const char *file;
	struct trace t;
	int rc = trace_flags(&trace_command_summary, argc, argv, flags, &file, 1, 1);

	if (rc)
		return rc < 0 ? TRACE_EXIT_DONE : rc;
	if (trace_load(&t, file, NULL))
		return TRACE_EXIT_BAD;
	printf("%u tasks, %u dependencies, %d steps, %d layers, %d workers, %.6f s\n", t.n_tasks,
	       t.n_preds, t.n_steps, t.n_layers, t.n_workers, 1e-9 * (double)(t.last - t.first));
	trace_free(&t);
	return TRACE_EXIT_DONE;
}
