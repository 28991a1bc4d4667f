/* SPDX-License-Identifier: Apache-2.0 */
/* What metrics share, and the summary: one section after the other. */
#include "tools/trace/print.h"
#include "tools/trace/replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_METRICS 64
#define COLUMNS 100

int trace_view_open(const struct trace *t, int first, int last, struct trace_view *v, char *error,
		    size_t size)
{
	memset(v, 0, sizeof *v);
	v->trace = t;
	v->gains =
		(struct replay_gains){ MOE_MXT_NA, MOE_MXT_NA, MOE_MXT_NA, MOE_MXT_NA, MOE_MXT_NA };
	if (trace_choose(t, first, last, &v->window, error, size))
		return -1;
	v->idle = trace_idle_new(t);
	if (v->idle && trace_realised(&v->window, &v->realised) == 0)
		return 0;
	snprintf(error, size, "no memory");
	trace_view_close(v);
	return -1;
}

void trace_view_close(struct trace_view *v)
{
	trace_window_free(&v->window);
	trace_idle_free(v->idle);
	trace_realised_free(&v->realised);
	v->idle = NULL;
}

static int sorted(const struct trace_metric *list[MAX_METRICS])
{
	int n = 0;

	for (; trace_metric_list[n] && n < MAX_METRICS; n++) {
		int i = n;

		for (; i && list[i - 1]->order > trace_metric_list[n]->order; i--)
			list[i] = list[i - 1];
		list[i] = trace_metric_list[n];
	}
	return n;
}

int trace_summary_json(const struct trace_view *v, struct trace_json *out)
{
	const struct trace_metric *list[MAX_METRICS];
	int n = sorted(list);

	trace_json_object(out, NULL);
	for (int i = 0; i < n; i++) {
		trace_json_object(out, list[i]->name);
		if (list[i]->json(v, out))
			return -1;
		trace_json_end(out, '}');
	}
	trace_json_end(out, '}');
	putc('\n', out->out);
	return 0;
}

int trace_summary_text(const struct trace_view *v, FILE *out)
{
	const struct trace_metric *list[MAX_METRICS];
	int n = sorted(list), rc = 0;
	char *text = NULL;
	size_t size = 0;
	FILE *memory = open_memstream(&text, &size);

	for (int i = 0; memory && !rc && i < n; i++)
		rc = list[i]->text ? list[i]->text(v, memory) : 0;
	if (!memory || fclose(memory))
		rc = -1;
	if (!rc)
		print_wrapped(out, text, COLUMNS);
	free(text);
	return rc;
}

int trace_view_replay(struct trace_view *v)
{
	return replay_gains(&v->window, &v->gains);
}
