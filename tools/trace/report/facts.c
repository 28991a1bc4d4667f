/* SPDX-License-Identifier: Apache-2.0 */
/* What the page says about the whole trace. */
#include "tools/trace/exporter.h"
#include "tools/trace/report/report.h"

#include <stdlib.h>
#include <string.h>

#define MEMORY_BINS 600

static int put_header(const struct trace *t, struct trace_json *j)
{
	char *copy = strdup(t->header ? t->header : ""), *rest = copy, *line;

	if (!copy)
		return -1;
	trace_json_object(j, "header");
	while ((line = strsep(&rest, "\n"))) {
		char *equals = strchr(line, '=');

		/* Kinds and workers are there as lists. */
		if (!equals || !strncmp(line, "kind.", 5) || !strncmp(line, "worker.", 7))
			continue;
		*equals = '\0';
		trace_json_text(j, line, equals + 1);
	}
	trace_json_end(j, '}');
	free(copy);
	return 0;
}

static void put_workers(const struct trace *t, struct trace_json *j)
{
	trace_json_array(j, "workers");
	for (int w = 0; w < t->n_workers; w++) {
		trace_json_object(j, NULL);
		trace_json_integer(j, "node", t->worker[w].node);
		trace_json_integer(j, "cpu", t->worker[w].cpu);
		trace_json_integer(j, "tasks", t->worker_first[w + 1] - t->worker_first[w]);
		trace_json_end(j, '}');
	}
	trace_json_end(j, ']');
	trace_json_array(j, "kinds");
	for (int k = 0; k < t->n_kinds; k++)
		trace_json_text(j, NULL, t->kind[k]);
	trace_json_end(j, ']');
	trace_json_array(j, "causes");
	for (int c = 0; c < TRACE_CAUSES; c++)
		trace_json_text(j, NULL, trace_cause_name[c]);
	trace_json_end(j, ']');
	trace_json_array(j, "links");
	for (int i = 0; i < TRACE_LINKS; i++)
		trace_json_text(j, NULL, trace_link_name[i]);
	trace_json_end(j, ']');
	trace_json_array(j, "phases");
	for (int p = 0; p < MOE_MXT_PHASES; p++)
		trace_json_text(j, NULL, moe_mxt_phase_name(p));
	trace_json_end(j, ']');
}

static void put_steps(const struct trace *t, struct trace_json *j)
{
	trace_json_array(j, "steps");
	for (int i = 0; i < t->n_steps; i++) {
		int64_t begin, end;

		trace_step_time(t, i, &begin, &end);
		trace_json_array(j, NULL);
		trace_json_integer(j, NULL, t->step[i].step);
		trace_json_integer(j, NULL, begin);
		trace_json_integer(j, NULL, end);
		trace_json_integer(j, NULL, t->step[i].tokens);
		trace_json_end(j, ']');
	}
	trace_json_end(j, ']');
}

static void put_interval(const char *name, const struct trace_interval *x, struct trace_json *j)
{
	trace_json_array(j, name);
	trace_json_number(j, NULL, x->median);
	trace_json_number(j, NULL, x->low);
	trace_json_number(j, NULL, x->high);
	trace_json_end(j, ']');
}

static int put_rates(const struct trace *t, struct trace_json *j)
{
	struct trace_rates r;

	if (trace_rates(t, &r))
		return -1;
	trace_json_object(j, "rates");
	trace_json_integer(j, "steps", r.n);
	put_interval("seconds", &r.seconds, j);
	put_interval("tokens", &r.tokens, j);
	put_interval("trained", &r.trained, j);
	put_interval("gflops", &r.gflops, j);
	put_interval("gbps", &r.gbps, j);
	trace_json_end(j, '}');
	trace_rates_free(&r);
	return 0;
}

/* The highest value of each bin, for drawing; where nothing changes, the last one stays. */
static int put_memory(const struct trace *t, struct trace_json *j)
{
	uint32_t n;
	struct trace_change *change = trace_memory_changes(t, &n);
	int64_t first = t->first, last = t->last > t->first ? t->last : t->first + 1;
	int64_t highest[MEMORY_BINS];

	if (!change)
		return -1;
	for (uint32_t i = 0; i < n; i++) {
		first = change[i].time < first ? change[i].time : first;
		last = change[i].time >= last ? change[i].time + 1 : last;
	}
	trace_json_object(j, "memory");
	trace_json_integer(j, "begin", first);
	trace_json_integer(j, "end", last);
	trace_json_array(j, "purposes");
	for (int p = 0; p < t->n_purposes; p++) {
		int64_t now = 0;
		uint32_t at = 0;

		for (int b = 0; b < MEMORY_BINS; b++) {
			double end = (double)first + (double)(last - first) / MEMORY_BINS * (b + 1);

			highest[b] = now;
			for (; at < n && (double)change[at].time < end; at++)
				if (change[at].what == p) {
					now = change[at].value;
					highest[b] = now > highest[b] ? now : highest[b];
				}
		}
		trace_json_object(j, NULL);
		trace_json_text(j, "name", t->purpose[p]);
		trace_json_array(j, "bytes");
		for (int b = 0; b < MEMORY_BINS; b++)
			trace_json_integer(j, NULL, highest[b]);
		trace_json_end(j, ']');
		trace_json_end(j, '}');
	}
	trace_json_end(j, ']');
	trace_json_end(j, '}');
	free(change);
	return 0;
}

int report_facts(const struct trace *t, const char *name, struct trace_json *j)
{
	trace_json_text(j, "name", name);
	trace_json_integer(j, "tasks", t->n_tasks);
	trace_json_integer(j, "deps", t->n_preds);
	trace_json_integer(j, "layers", t->n_layers);
	trace_json_integer(j, "nodes", t->n_nodes);
	trace_json_integer(j, "first", t->first);
	trace_json_integer(j, "last", t->last);
	trace_json_bool(j, "ended", t->ended);
	trace_json_integer(j, "lost_bytes", t->lost_bytes);
	trace_json_integer(j, "not_run", t->not_run);
	trace_json_integer(j, "bad_rows", t->bad_rows);
	put_workers(t, j);
	put_steps(t, j);
	return put_header(t, j) || put_rates(t, j) || put_memory(t, j) ? -1 : 0;
}
