/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/command.h"
#include "tools/trace/metrics.h"

static int run(int argc, char **argv);

const struct trace_command trace_command_summary = {
	.name = "summary",
	.usage = "summary FILE",
	.summary = "where the time goes",
	.help = "  --step A[:B]   these steps; else all steady ones (without the first)\n"
		"  --no-replay    without the replays: exposure and imbalance by intervals only\n"
		"  --json         numbers for programs, times in ns\n",
	.run = run,
};

static int show(const struct trace *t, const int64_t step[2], bool replay, bool json)
{
	struct trace_json out = { .out = stdout, .lines = true };
	struct trace_view v;
	char error[200];
	int rc;

	if (trace_view_open(t, (int)step[0], (int)step[1], &v, error, sizeof error))
		return trace_fail("%s", error);
	rc = replay ? trace_view_replay(&v) : 0;
	if (!rc)
		rc = json ? trace_summary_json(&v, &out) : trace_summary_text(&v, stdout);
	trace_view_close(&v);
	return rc ? trace_fail("no memory") : TRACE_EXIT_DONE;
}

static int run(int argc, char **argv)
{
	bool json = false, no_replay = false;
	const char *file, *steps = NULL;
	const struct trace_flag flags[] = { { .name = "--step", .text = &steps },
					    { .name = "--no-replay", .set = &no_replay },
					    { .name = "--json", .set = &json },
					    { 0 } };
	int64_t step[2] = { 0, 0 };
	struct trace t;
	int rc = trace_flags(&trace_command_summary, argc, argv, flags, &file, 1, 1);

	if (rc)
		return rc < 0 ? TRACE_EXIT_DONE : rc;
	if (steps && (trace_flag_range("--step", steps, step) || trace_flag_steps(step)))
		return TRACE_EXIT_BAD;
	if (trace_load(&t, file, NULL))
		return TRACE_EXIT_BAD;
	if (!t.n_tasks)
		rc = trace_fail("%s: no task has run", file);
	else
		rc = show(&t, step, !no_replay, json);
	trace_free(&t);
	return rc;
}
