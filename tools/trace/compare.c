/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct trace_series *add(struct trace_series_list *l, enum trace_group group,
				const char *format, const char *name, int number)
{
	struct trace_series *s = &l->series[l->n_series];

	memset(s, 0, sizeof *s);
	s->group = group;
	if (name)
		snprintf(s->name, sizeof s->name, format, name);
	else
		snprintf(s->name, sizeof s->name, "layer.%d", number);
	s->value = calloc((size_t)l->n + 1, sizeof *s->value);
	l->n_series++;
	return s->value ? s : NULL;
}

static int name_series(const struct trace *t, struct trace_series_list *l)
{
	if (!add(l, TRACE_GROUP_STEP, "%s", "step", 0))
		return -1;
	for (int i = 0; i < TRACE_CAUSES; i++)
		if (!add(l, TRACE_GROUP_CAUSE, "idle.%s", trace_cause_name[i], 0))
			return -1;
	for (int k = 0; k < t->n_kinds; k++)
		if (!add(l, TRACE_GROUP_KIND, "%.60s", t->kind[k], 0))
			return -1;
	for (int i = 0; i < t->n_layers; i++)
		if (!add(l, TRACE_GROUP_LAYER, NULL, NULL, i))
			return -1;
	return 0;
}

static void fill(const struct trace_window *w, const struct trace_idle *idle,
		 const struct trace_series_list *l, int at, double divisor)
{
	const struct trace *t = w->trace;
	struct trace_series *cause = l->series + 1, *kind = cause + TRACE_CAUSES;
	struct trace_series *layer = kind + t->n_kinds;
	int64_t idle_time[TRACE_CAUSES];

	l->series[0].value[at] = (double)(w->end - w->begin) / divisor;
	trace_idle_within(idle, -1, w->begin, w->end, idle_time);
	for (int i = 0; i < TRACE_CAUSES; i++)
		cause[i].value[at] = (double)idle_time[i] / divisor;
	for (uint32_t i = 0; i < w->n; i++) {
		const struct trace_task *k = &t->task[w->task[i]];
		double time = (double)trace_inside(w, w->task[i]) / divisor;

		kind[k->kind].value[at] += time;
		if (k->layer >= 0)
			layer[k->layer].value[at] += time;
	}
}

static int fill_all(const struct trace *t, bool per_token, const struct trace_idle *idle,
		    const struct trace_series_list *l, double *tokens)
{
	int first = trace_steady(t);

	for (int i = 0; i < l->n; i++) {
		struct trace_window w;
		double divisor = 1;

		if (first < 0 ? trace_window(t, t->first, t->last, &w)
			      : trace_window_steps(t, first + i, first + i, &w))
			return -1;
		tokens[i] = w.tokens == MOE_MXT_NA ? NAN : (double)w.tokens;
		if (per_token)
			divisor = tokens[i] > 0 ? tokens[i] : NAN;
		fill(&w, idle, l, i, divisor);
		trace_window_free(&w);
	}
	return 0;
}

int trace_series(const struct trace *t, bool per_token, struct trace_series_list *l)
{
	int first = trace_steady(t), series = 1 + TRACE_CAUSES + t->n_kinds + t->n_layers;
	struct trace_idle *idle = trace_idle_new(t);
	double *tokens;
	int rc;

	memset(l, 0, sizeof *l);
	l->n = first < 0 ? 1 : t->n_steps - first;
	l->series = calloc((size_t)series, sizeof *l->series);
	tokens = malloc(((size_t)l->n + 1) * sizeof *tokens);
	rc = !idle || !l->series || !tokens || name_series(t, l) ||
	     fill_all(t, per_token, idle, l, tokens);
	if (!rc)
		l->tokens = trace_bootstrap(tokens, l->n).median;
	trace_idle_free(idle);
	free(tokens);
	if (!rc)
		return 0;
	trace_series_free(l);
	return -1;
}

void trace_series_free(struct trace_series_list *l)
{
	for (int i = 0; l->series && i < l->n_series; i++)
		free(l->series[i].value);
	free(l->series);
	memset(l, 0, sizeof *l);
}
