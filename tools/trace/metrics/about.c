/* SPDX-License-Identifier: Apache-2.0 */
/* What ran, where, and what may be wrong with the trace. */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <stdlib.h>
#include <string.h>

struct pinning {
	int pinned;
	bool shared; /* two workers on one CPU */
};

static struct pinning pinning(const struct trace *t)
{
	struct pinning p = { 0 };

	for (int i = 0; i < t->n_workers; i++) {
		p.pinned += t->worker[i].cpu >= 0;
		for (int k = 0; k < i && t->n_workers <= 4096; k++)
			p.shared = p.shared ||
				   (t->worker[i].cpu >= 0 && t->worker[i].cpu == t->worker[k].cpu);
	}
	return p;
}

static const char *value(const struct trace *t, const char *key, char *buf, size_t size)
{
	const char *v = trace_value(t, key, buf, size);

	for (char *c = buf; v && *c; c++)
		if ((unsigned char)*c < 0x20 || *c == 0x7f)
			*c = '?';
	return v && *v ? v : "unknown";
}

void trace_note_not_whole(const struct trace *t, FILE *out)
{
	if (t->ended && !t->lost_bytes && !t->not_run && !t->bad_rows)
		return;
	fprintf(out,
		"  note: the trace is not whole (%s; %lld bytes lost, %lld tasks did not run, %lld rows left out); "
		"moesaic trace check says more\n",
		t->ended ? "it was stopped in order" : "it was cut off", (long long)t->lost_bytes,
		(long long)t->not_run, (long long)t->bad_rows);
}

static void warnings(const struct trace *t, FILE *out)
{
	struct pinning p = pinning(t);
	double load = trace_number(t, "host.load", -1);
	char a[64];

	if (load > .5 * t->n_workers)
		fprintf(out,
			"  note: load average %.2f when the trace began: other programs took the "
			"cores\n",
			load);
	if (p.pinned < t->n_workers || p.shared)
		fprintf(out, "  note: %s\n",
			p.shared ? "workers share CPUs" : "not every worker is bound to a CPU");
	if (trace_value(t, "host.governor", a, sizeof a) && strcmp(a, "performance"))
		fprintf(out, "  note: frequency governor is %s\n", a);
	trace_note_not_whole(t, out);
}

static int text(const struct trace_view *v, FILE *out)
{
	const struct trace *t = v->trace;
	const struct trace_window *w = &v->window;
	char a[128], b[128], c[128], d[PRINT_BYTES];

	fprintf(out, "moesaic %s (%s), StarPU %s on %s\n", value(t, "moesaic.version", a, sizeof a),
		value(t, "moesaic.revision", b, sizeof b), value(t, "starpu.version", c, sizeof c),
		value(t, "host.name", d, sizeof d));
	fprintf(out, "%s, %d workers, %d nodes, %d parts, policy %s, %s placement, kernels %s\n",
		value(t, "host.cpu", a, sizeof a), t->n_workers, t->n_nodes, t->n_parts,
		value(t, "policy", b, sizeof b), t->strict ? "strict" : "soft",
		value(t, "rates.isa", c, sizeof c));
	fprintf(out, "load average %s, governor %s, %d of %d workers bound\n",
		value(t, "host.load", a, sizeof a), value(t, "host.governor", b, sizeof b),
		pinning(t).pinned, t->n_workers);
	warnings(t, out);
	fprintf(out, "%u tasks, %u dependencies, %d steps, %d layers, %s; ", t->n_tasks, t->n_preds,
		t->n_steps, t->n_layers, print_time((double)(t->last - t->first), d));
	if (w->first_step)
		fprintf(out, "here: steps %d to %d\n", w->first_step, w->last_step);
	else
		fprintf(out, "here: all of it, it has no steps\n");
	return 0;
}

/* All of the header, for who wants more. */
static void header(const struct trace *t, struct trace_json *out)
{
	const char *line = t->header ? t->header : "";

	trace_json_object(out, "header");
	while (*line) {
		size_t n = strcspn(line, "\n");
		char *copy = strndup(line, n), *equals = copy ? strchr(copy, '=') : NULL;

		if (equals && strncmp(copy, "kind.", 5) && strncmp(copy, "worker.", 7)) {
			*equals = 0;
			trace_json_text(out, copy, equals + 1);
		}
		free(copy);
		line += n + (line[n] == '\n');
	}
	trace_json_end(out, '}');
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	const struct trace *t = v->trace;
	struct pinning p = pinning(t);

	header(t, out);
	trace_json_integer(out, "workers", t->n_workers);
	trace_json_integer(out, "workers_bound", p.pinned);
	trace_json_bool(out, "cpus_shared", p.shared);
	trace_json_integer(out, "nodes", t->n_nodes);
	trace_json_integer(out, "parts", t->n_parts);
	trace_json_integer(out, "tasks", t->n_tasks);
	trace_json_integer(out, "dependencies", t->n_preds);
	trace_json_integer(out, "steps", t->n_steps);
	trace_json_integer(out, "layers", t->n_layers);
	trace_json_bool(out, "ended", t->ended);
	trace_json_integer(out, "lost_bytes", t->lost_bytes);
	trace_json_integer(out, "not_run", t->not_run);
	trace_json_integer(out, "bad_rows", t->bad_rows);
	trace_json_integer(out, "first_step", v->window.first_step);
	trace_json_integer(out, "last_step", v->window.last_step);
	trace_json_integer(out, "begin_ns", v->window.begin);
	trace_json_integer(out, "end_ns", v->window.end);
	return 0;
}

const struct trace_metric trace_metric_about = {
	.name = "about", .order = 10, .text = text, .json = json
};
