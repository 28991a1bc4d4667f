/* SPDX-License-Identifier: Apache-2.0 */
/* export: a trace, or a slice of it, in another tool's format. */
#include "tools/trace/command.h"
#include "tools/trace/exporter.h"
#include "tools/trace/metrics.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int run(int argc, char **argv);

const struct trace_command trace_command_export = {
	.name = "export",
	.usage = "export FILE --to FORMAT [-o PATH]",
	.summary = "the trace in another tool's format",
	.help = "--to FORMAT     perfetto, chrome, paje, sqlite, csv or starpu-rec\n"
		"-o PATH         file or folder to write; default: beside FILE, by format\n"
		"--step a:b      only tasks of these steps\n"
		"--layer a:b     only tasks of these layers\n"
		"--time a:b      only tasks that run between a and b, ms since the trace began\n"
		"--dep WHICH     dependencies drawn as arrows: none, path (the realised critical\n"
		"                path), all (that no other implies), or task ids a,b,...;\n"
		"                default: all for perfetto, else none. Tables always have all\n"
		"--json          what was written, for programs\n",
	.run = run,
};

struct choice {
	const struct trace_exporter *exporter;
	enum trace_arrows arrows;
	const char *ids;
	bool json;
};

static const struct trace_exporter *find(const char *name)
{
	char known[200] = "";
	size_t n = 0;

	for (int i = 0; trace_exporter_list[i]; i++) {
		if (!strcmp(trace_exporter_list[i]->name, name))
			return trace_exporter_list[i];
		n += (size_t)snprintf(known + n, n < sizeof known ? sizeof known - n : 0, "%s%s",
				      i ? ", " : "", trace_exporter_list[i]->name);
	}
	trace_fail("--to: unknown format '%s'; there are %s", name, known);
	return NULL;
}

static int choose(struct choice *c, const char *to, const char *dep)
{
	if (!to)
		return trace_fail(
			"--to is missing: perfetto, chrome, paje, sqlite, csv or starpu-rec");
	c->exporter = find(to);
	if (!c->exporter)
		return TRACE_EXIT_BAD;
	if (c->exporter->missing)
		return trace_fail("%s", c->exporter->missing);
	c->arrows = c->exporter->arrows;
	if (!dep)
		return 0;
	c->arrows = !strcmp(dep, "none")   ? TRACE_ARROWS_NONE
		    : !strcmp(dep, "path") ? TRACE_ARROWS_PATH
		    : !strcmp(dep, "all")  ? TRACE_ARROWS_ALL
					   : TRACE_ARROWS_TASKS;
	c->ids = dep;
	return 0;
}

/* ---- arrows ---- */

static int pick_named(const struct trace *t, const char *ids, uint8_t *picked)
{
	while (*ids) {
		char *end;
		int64_t id;
		uint32_t task;

		errno = 0;
		id = strtoll(ids, &end, 10);
		if (end == ids || (*end && *end != ',') || errno)
			return trace_fail(
				"--dep: '%s' is none of none, path, all, and no task ids a,b", ids);
		task = trace_find(t, id);
		if (task == TRACE_NO_TASK)
			return trace_fail("--dep: task %lld is not in what is exported",
					  (long long)id);
		picked[task] = 1;
		ids = *end ? end + 1 : end;
	}
	return 0;
}

static int pick_path(const struct trace *t, uint8_t *picked)
{
	struct trace_realised r;
	struct trace_window w;

	if (trace_window(t, t->first, t->last, &w))
		return trace_fail("out of memory");
	if (trace_realised(&w, &r)) {
		trace_window_free(&w);
		return trace_fail("out of memory");
	}
	for (uint32_t i = 0; i < r.n; i++)
		picked[r.task[i]] = 1;
	trace_realised_free(&r);
	trace_window_free(&w);
	return 0;
}

/* Fills arrow, and n_arrows, by the choice. */
static int choose_arrows(const struct choice *c, struct trace_export *x, uint8_t *arrow)
{
	const struct trace *t = x->trace;
	uint8_t *picked = calloc((size_t)t->n_tasks + 1, 1);
	int rc = picked ? 0 : trace_fail("out of memory");

	if (rc == 0 && c->arrows == TRACE_ARROWS_PATH)
		rc = pick_path(t, picked);
	if (rc == 0 && c->arrows == TRACE_ARROWS_TASKS)
		rc = pick_named(t, c->ids, picked);
	for (uint32_t i = 0; rc == 0 && i < t->n_tasks; i++)
		for (uint32_t e = t->task[i].first_pred;
		     e < t->task[i].first_pred + t->task[i].n_pred; e++) {
			bool from = picked[t->pred[e]], to = picked[i];

			arrow[e] = c->arrows == TRACE_ARROWS_ALL    ? x->needed[e]
				   : c->arrows == TRACE_ARROWS_PATH ? from && to && x->needed[e]
								    : (from || to) && x->needed[e];
			x->n_arrows += arrow[e];
		}
	free(picked);
	return rc;
}

/* ---- running ---- */

/* FILE without its ".mxt", and the format's suffix. */
static char *default_path(const char *file, const char *suffix)
{
	size_t n = strlen(file);
	char *path = malloc(n + strlen(suffix) + 1);

	if (!path)
		return NULL;
	if (n > 4 && !strcmp(file + n - 4, ".mxt"))
		n -= 4;
	memcpy(path, file, n);
	strcpy(path + n, suffix);
	return path;
}

static int export_trace(const struct trace *t, const struct choice *c, const char *path)
{
	struct trace_export x = { .trace = t };
	uint8_t *needed = trace_reduce(t), *arrow = calloc((size_t)t->n_preds + 1, 1);
	char error[600];
	int rc = needed && arrow ? 0 : trace_fail("out of memory");

	x.needed = needed;
	x.arrow = arrow;
	if (rc == 0)
		rc = choose_arrows(c, &x, arrow);
	if (rc == 0 && c->exporter->write(&x, path, error, sizeof error))
		rc = trace_fail("%s", error);
	if (rc == 0 && c->json)
		trace_written(path, (const struct trace_count[]){ { "tasks", t->n_tasks },
								  { "dependencies", t->n_preds },
								  { "arrows", x.n_arrows },
								  { NULL, 0 } });
	else if (rc == 0)
		printf("%s: %u tasks, %u dependencies, %u arrows\n", path, t->n_tasks, t->n_preds,
		       x.n_arrows);
	free(needed);
	free(arrow);
	return rc;
}

/* a:b in ms is ns from the beginning of the first to the end of the last. */
static int parse_slice(const char *step, const char *layer, const char *time, struct trace_slice *s)
{
	if (step && trace_flag_range("--step", step, s->step))
		return -1;
	if (layer && trace_flag_range("--layer", layer, s->layer))
		return -1;
	if (time && trace_flag_range("--time", time, s->time))
		return -1;
	if (time && (s->time[0] < 0 || s->time[1] > INT64_MAX / 1000000)) {
		trace_fail("--time: '%s' is out of range", time);
		return -1;
	}
	s->time[0] *= 1000000;
	s->time[1] *= 1000000;
	s->steps = step != NULL;
	s->layers = layer != NULL;
	s->times = time != NULL;
	return 0;
}

static int run(int argc, char **argv)
{
	const char *to = NULL, *output = NULL, *step = NULL, *layer = NULL, *time = NULL,
		   *dep = NULL;
	struct choice c = { 0 };
	const struct trace_flag flags[] = {
		{ .name = "--to", .text = &to },
		{ .name = "-o", .text = &output },
		{ .name = "--step", .text = &step },
		{ .name = "--layer", .text = &layer },
		{ .name = "--time", .text = &time },
		{ .name = "--dep", .text = &dep },
		{ .name = "--json", .set = &c.json },
		{ .name = NULL },
	};
	struct trace_slice slice = { 0 };
	const char *file;
	char *path = NULL;
	struct trace t;
	int rc = trace_flags(&trace_command_export, argc, argv, flags, &file, 1, 1);

	if (rc)
		return rc < 0 ? TRACE_EXIT_DONE : rc;
	if (choose(&c, to, dep) || parse_slice(step, layer, time, &slice) ||
	    trace_load(&t, file, &slice))
		return TRACE_EXIT_BAD;
	if (!output)
		output = path = default_path(file, c.exporter->suffix);
	rc = !output	  ? trace_fail("out of memory")
	     : !t.n_tasks ? trace_fail("%s: no task has run in what was asked for", file)
			  : export_trace(&t, &c, output);
	free(path);
	trace_free(&t);
	return rc;
}
