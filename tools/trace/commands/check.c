/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/command.h"
#include "tools/trace/verify.h"

#include <stdlib.h>

static int run(int argc, char **argv);

const struct trace_command trace_command_check = {
	.name = "check",
	.usage = "check FILE",
	.summary = "whether the trace is good: exit status 1 and a list where it is not",
	.help = "  --partial         it may be cut off, and tasks may be missing\n"
		"  --skipped-slots   slots may go to no expert (ids of -1, masked experts)\n"
		"  --most N          lines per rule (10)\n"
		"  --json            counts for programs, without the list\n",
	.run = run,
};

static int run(int argc, char **argv)
{
	struct trace_verify v = { .out = stdout, .most = 10 };
	const char *file, *most = NULL;
	bool json = false;
	const struct trace_flag flags[] = { { .name = "--json", .set = &json },
					    { .name = "--partial", .set = &v.partial },
					    { .name = "--skipped-slots", .set = &v.skipped_slots },
					    { .name = "--most", .text = &most },
					    { 0 } };
	struct trace t;
	int64_t found, n[2];
	int rc = trace_flags(&trace_command_check, argc, argv, flags, &file, 1, 1);

	if (rc)
		return rc < 0 ? TRACE_EXIT_DONE : rc;
	if (most &&
	    (trace_flag_range("--most", most, n) || n[0] != n[1] || n[0] < 0 || n[0] > INT32_MAX))
		return trace_fail("--most: '%s' is no number of lines", most);
	if (most)
		v.most = (int)n[0];
	if (trace_load(&t, file, NULL))
		return TRACE_EXIT_BAD;
	v.out = json ? NULL : stdout;
	found = trace_verify(&t, &v);
	if (found < 0)
		rc = trace_fail("no memory");
	else if (json)
		trace_written(file, (const struct trace_count[]){ { "findings", found },
								  { "tasks", t.n_tasks },
								  { "dependencies", t.n_preds },
								  { "routings", t.n_routing },
								  { NULL, 0 } });
	else if (found)
		printf("%lld findings\n", (long long)found);
	else
		printf("good: %u tasks, %u dependencies, %u routings\n", t.n_tasks, t.n_preds,
		       t.n_routing);
	trace_free(&t);
	return rc ? rc : found ? TRACE_EXIT_FOUND : TRACE_EXIT_DONE;
}
