/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench pipeline: full fine-tuning of a chain of layers' experts through moe_experts_* and
 * moe_optimizer_*, with each step submitted whole (overlap) and call by call (sequential), with and
 * without clipping, and on one worker. Every run is traced; figures are moesaic-trace's. Prints a
 * table, and PASS or NOT per bar (exit status 1 where one does not hold). bench_pipeline --help
 * lists the options.
 */
#include "bench/drawn.h"
#include "bench/measure.h"
#include "bench/pipeline/pipeline_bench.h"

#include "engine/base.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static const char usage[] = "usage: bench_pipeline [options]\n"
			    "  --layers N --experts E --top K --hidden H --intermediate I   "
			    "default 4, 16, 8, 2048, 768\n"
			    "  --tokens T           of a micro-batch, default 512\n"
			    "  --micro-batches M    default 4\n"
			    "  --workers W          default 2\n"
			    "  --steps N            counted steps, default 3\n"
			    "  --warm-up N          steps before the trace, default 1\n"
			    "  --max-grad-norm V    of the runs with clipping, default 1\n"
			    "  --only A,B           of overlap, overlap-clip, one, one-clip, "
			    "sequential, sequential-clip; default: all\n"
			    "  --group-size N       experts per task, default: chosen\n"
			    "  --backward M         direct, shared:N, resident or auto (default)\n"
			    "  --policy P           StarPU's scheduling policy\n"
			    "  --traces DIR         keep the traces there\n"
			    "  --read DIR           run nothing: read those traces (of the same "
			    "--steps and --warm-up)\n"
			    "  --json               one line of JSON\n";

static bool take_option(int c, const char *text, struct pipeline_options *o)
{
	char *end;

	switch (c) {
	case 'l':
		return take_number(text, 1, &o->layers);
	case 'e':
		return take_number(text, 1, &o->experts);
	case 'k':
		return take_number(text, 1, &o->top) && o->top <= DRAWN_MAX_TOP;
	case 'd':
		return take_number(text, 1, &o->hidden);
	case 'i':
		return take_number(text, 1, &o->intermediate);
	case 't':
		return take_number(text, 1, &o->tokens);
	case 'm':
		return take_number(text, 1, &o->micro_batches);
	case 'w':
		return take_number(text, 1, &o->workers);
	case 's':
		return take_number(text, 1, &o->steps);
	case 'u':
		return take_number(text, 0, &o->warm_up);
	case 'c':
		o->clip = strtod(text, &end);
		return *text && !*end && o->clip > 0;
	case 'o':
		o->only = text;
		return true;
	case 'g':
		return take_number(text, 1, &o->group_size);
	case 'b':
		o->backward = text;
		return true;
	case 'p':
		o->policy = text;
		return true;
	case 'r':
		o->trace_dir = text;
		return true;
	case 'R':
		o->read_dir = o->trace_dir = text;
		return true;
	case 'j':
		return o->json = true;
	default:
		return false;
	}
}

static const struct option options[] = {
	{ "layers", required_argument, NULL, 'l' },
	{ "experts", required_argument, NULL, 'e' },
	{ "top", required_argument, NULL, 'k' },
	{ "hidden", required_argument, NULL, 'd' },
	{ "intermediate", required_argument, NULL, 'i' },
	{ "tokens", required_argument, NULL, 't' },
	{ "micro-batches", required_argument, NULL, 'm' },
	{ "workers", required_argument, NULL, 'w' },
	{ "steps", required_argument, NULL, 's' },
	{ "warm-up", required_argument, NULL, 'u' },
	{ "max-grad-norm", required_argument, NULL, 'c' },
	{ "only", required_argument, NULL, 'o' },
	{ "group-size", required_argument, NULL, 'g' },
	{ "backward", required_argument, NULL, 'b' },
	{ "policy", required_argument, NULL, 'p' },
	{ "traces", required_argument, NULL, 'r' },
	{ "read", required_argument, NULL, 'R' },
	{ "json", no_argument, NULL, 'j' },
	{ "help", no_argument, NULL, 'h' },
	{ NULL, 0, NULL, 0 },
};

/* Whether a name is in the list a,b,c. */
static bool is_in(const char *list, const char *name)
{
	size_t n = strlen(name);

	for (const char *p = list; p; p = strchr(p, ',')) {
		p += *p == ',';
		if (!strncmp(p, name, n) && (p[n] == ',' || !p[n]))
			return true;
	}
	return false;
}

static bool wanted(const struct pipeline_options *o, const char *name)
{
	return !o->only || is_in(o->only, name);
}

/* Every name of the list is a run's. */
static bool check_only(const char *list, const struct pipeline_run *runs, int n)
{
	for (const char *p = list; p; p = strchr(p, ',')) {
		size_t length;
		bool found = false;

		p += *p == ',';
		length = strcspn(p, ",");
		for (int i = 0; i < n; i++)
			found |=
				strlen(runs[i].name) == length && !strncmp(p, runs[i].name, length);
		if (!found)
			return false;
	}
	return true;
}

static enum moe_status run_all(const struct pipeline_options *o, struct pipeline_run *runs, int n)
{
	char own[] = "/tmp/bench_pipeline.XXXXXX";
	const char *dir = o->trace_dir ? o->trace_dir : mkdtemp(own);
	struct pipeline_data data;
	enum moe_status st = MOE_OK;

	if (!dir)
		return moe_fail(MOE_ERR_IO, "/tmp: no folder for traces: %s", strerror(errno));
	memset(&data, 0, sizeof data);
	st = o->read_dir ? MOE_OK : pipeline_data_make(o, &data);
	for (int i = 0; i < n && st == MOE_OK; i++) {
		char *trace = moe_format("%s/%s.mxt", dir, runs[i].name);

		if (!trace)
			st = moe_fail(MOE_ERR_NOMEM, "no memory for a file name");
		else if (wanted(o, runs[i].name) && !o->read_dir)
			st = pipeline_run(o, &data, &runs[i], trace);
		if (st == MOE_OK && wanted(o, runs[i].name))
			st = pipeline_read(&runs[i], trace);
		if (trace && !o->trace_dir)
			unlink(trace);
		moe_free(trace);
	}
	if (!o->trace_dir)
		rmdir(own);
	pipeline_data_free(o, &data);
	return st;
}

int main(int argc, char **argv)
{
	struct pipeline_options o = { .layers = 4,
				      .experts = 16,
				      .top = 8,
				      .hidden = 2048,
				      .intermediate = 768,
				      .tokens = 512,
				      .micro_batches = 4,
				      .workers = 2,
				      .steps = 3,
				      .warm_up = 1,
				      .clip = 1 };
	struct pipeline_run runs[6] = {
		{ .name = "overlap", .overlap = true },
		{ .name = "overlap-clip", .overlap = true },
		{ .name = "sequential" },
		{ .name = "sequential-clip" },
		{ .name = "one", .overlap = true },
		{ .name = "one-clip", .overlap = true },
	};
	int c, index = 0, n = (int)MOE_COUNT(runs);

	while ((c = getopt_long(argc, argv, "", options, &index)) != -1) {
		if (c == 'h')
			return fputs(usage, stdout) < 0;
		if (c == '?')
			return 2;
		if (!take_option(c, optarg, &o)) {
			fprintf(stderr, "bench_pipeline: --%s: \"%s\" is not possible\n",
				options[index].name, optarg);
			return 2;
		}
	}
	if (optind < argc || o.top > o.experts) {
		if (optind >= argc)
			fprintf(stderr, "bench_pipeline: --top %d of %d experts is not possible\n",
				o.top, o.experts);
		else
			fputs(usage, stderr);
		return 2;
	}
	if (!check_only(o.only, runs, n)) {
		fprintf(stderr,
			"bench_pipeline: --only: \"%s\" is not possible; --help lists the runs\n",
			o.only);
		return 2;
	}
	for (int i = 0; i < n; i++) {
		runs[i].workers = i < 4 ? o.workers : 1;
		runs[i].clip = i % 2 ? o.clip : 0;
		runs[i].load = runs[i].norm = NAN;
		runs[i].steps = o.steps;
		runs[i].first_step = o.warm_up + 2;
	}
	if (run_all(&o, runs, n) != MOE_OK) {
		fprintf(stderr, "bench_pipeline: %s\n", moe_last_error());
		return 1;
	}
	return !pipeline_print(&o, runs, n);
}
