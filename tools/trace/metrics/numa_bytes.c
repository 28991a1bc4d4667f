/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes of the worker's node and of others. */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <stdlib.h>
#include <string.h>

static void add(struct trace_numa *x, const struct trace *t, uint32_t i)
{
	const struct trace_task *k = &t->task[i];
	size_t layer = k->layer < 0 ? (size_t)t->n_layers : (size_t)k->layer;
	int64_t local = k->local == MOE_MXT_NA ? 0 : k->local;
	int64_t remote = k->remote == MOE_MXT_NA ? 0 : k->remote, all;
	int here = t->worker[k->worker].node, home = remote ? trace_home(t, i) : here;
	int64_t *row = x->matrix + (size_t)here * (size_t)(t->n_nodes + 1);

	if (k->local == MOE_MXT_NA && k->remote == MOE_MXT_NA)
		return;
	x->known = true;
	all = (k->read == MOE_MXT_NA ? 0 : k->read) + (k->written == MOE_MXT_NA ? 0 : k->written);
	x->local += local;
	x->remote += remote;
	x->unplaced += all > local + remote ? all - local - remote : 0;
	x->kind[k->kind][0] += local;
	x->kind[k->kind][1] += remote;
	x->layer[layer][0] += local;
	x->layer[layer][1] += remote;
	row[here] += local;
	row[home < 0 ? t->n_nodes : home] += remote;
}

int trace_numa(const struct trace_window *w, struct trace_numa *x)
{
	const struct trace *t = w->trace;

	memset(x, 0, sizeof *x);
	x->kind = calloc((size_t)t->n_kinds + 1, sizeof *x->kind);
	x->layer = calloc((size_t)t->n_layers + 1, sizeof *x->layer);
	x->matrix = calloc((size_t)t->n_nodes * (size_t)(t->n_nodes + 1), sizeof *x->matrix);
	if (!x->kind || !x->layer || !x->matrix) {
		trace_numa_free(x);
		return -1;
	}
	for (uint32_t i = 0; i < w->n; i++)
		add(x, t, w->task[i]);
	return 0;
}

void trace_numa_free(struct trace_numa *x)
{
	free(x->kind), free(x->layer), free(x->matrix);
	memset(x, 0, sizeof *x);
}

/* ---- the section ---- */

/* The kind with most remote bytes, -1: none has any. */
static int most_remote(const struct trace *t, const struct trace_numa *x)
{
	int best = -1;

	for (int k = 0; k < t->n_kinds; k++)
		if (x->kind[k][1] > 0 && (best < 0 || x->kind[k][1] > x->kind[best][1]))
			best = k;
	return best;
}

static int text(const struct trace_view *v, FILE *out)
{
	const struct trace *t = v->trace;
	struct trace_numa x;
	char a[PRINT_BYTES], b[PRINT_BYTES], c[PRINT_BYTES];
	int kind;

	if (trace_numa(&v->window, &x))
		return -1;
	kind = most_remote(t, &x);
	if (!x.known)
		fprintf(out, "\nNUMA: n/a, the trace has no placed bytes\n");
	else if (t->n_nodes < 2 && !x.remote)
		fprintf(out, "\nNUMA: one node, %sB of placed bytes\n",
			print_count((double)x.local, a));
	else
		fprintf(out, "\nNUMA (estimate): %sB local, %sB remote (%s of placed bytes)",
			print_count((double)x.local, a), print_count((double)x.remote, b),
			print_share((double)x.remote, (double)(x.local + x.remote), c));
	if (kind >= 0) {
		fprintf(out, "; most by ");
		print_cell(out, t->kind[kind], (int)strnlen(t->kind[kind], 20));
		fprintf(out, " (%s)", print_share((double)x.kind[kind][1], (double)x.remote, a));
	}
	if (x.known && (t->n_nodes > 1 || x.remote))
		fprintf(out, "\n");
	trace_numa_free(&x);
	return 0;
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	const struct trace *t = v->trace;
	struct trace_numa x;

	if (trace_numa(&v->window, &x))
		return -1;
	trace_json_bool(out, "known", x.known);
	trace_json_integer(out, "local", x.known ? x.local : MOE_MXT_NA);
	trace_json_integer(out, "remote", x.known ? x.remote : MOE_MXT_NA);
	trace_json_integer(out, "unplaced", x.known ? x.unplaced : MOE_MXT_NA);
	trace_json_object(out, "kinds");
	for (int k = 0; k < t->n_kinds; k++)
		if (x.kind[k][0] || x.kind[k][1]) {
			trace_json_array(out, t->kind[k]);
			trace_json_integer(out, NULL, x.kind[k][0]);
			trace_json_integer(out, NULL, x.kind[k][1]);
			trace_json_end(out, ']');
		}
	trace_json_end(out, '}');
	trace_json_array(out, "layers");
	for (int l = 0; l <= t->n_layers; l++) {
		trace_json_array(out, NULL);
		trace_json_integer(out, NULL, x.layer[l][0]);
		trace_json_integer(out, NULL, x.layer[l][1]);
		trace_json_end(out, ']');
	}
	trace_json_end(out, ']');
	trace_json_array(out, "matrix");
	for (int n = 0; n < t->n_nodes; n++) {
		trace_json_array(out, NULL);
		for (int m = 0; m <= t->n_nodes; m++)
			trace_json_integer(out, NULL, x.matrix[n * (t->n_nodes + 1) + m]);
		trace_json_end(out, ']');
	}
	trace_json_end(out, ']');
	trace_numa_free(&x);
	return 0;
}

const struct trace_metric trace_metric_numa_bytes = {
	.name = "numa", .order = 80, .text = text, .json = json
};
