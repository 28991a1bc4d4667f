/* SPDX-License-Identifier: Apache-2.0 */
/* The longest path through a window, and the path that its execution took. */
#include "tools/trace/metrics.h"

#include <stdlib.h>
#include <string.h>

const char *const trace_link_name[TRACE_LINKS] = { "first", "dependency", "worker", "submission" };

/* Positions in a window's list by index of the task. */
struct local {
	const struct trace_window *w;
	uint32_t low, n;
	uint32_t *at; /* [n] of task low + i; TRACE_NO_TASK: not in the window */
};

static int open_local(struct local *l, const struct trace_window *w)
{
	uint32_t high = 0;

	memset(l, 0, sizeof *l);
	l->w = w;
	l->low = UINT32_MAX;
	for (uint32_t i = 0; i < w->n; i++) {
		l->low = w->task[i] < l->low ? w->task[i] : l->low;
		high = w->task[i] > high ? w->task[i] : high;
	}
	l->n = w->n ? high - l->low + 1 : 0;
	l->at = malloc(((size_t)l->n + 1) * sizeof *l->at);
	if (!l->at)
		return -1;
	memset(l->at, 0xff, (size_t)l->n * sizeof *l->at);
	for (uint32_t i = 0; i < w->n; i++)
		l->at[w->task[i] - l->low] = i;
	return 0;
}

static uint32_t position(const struct local *l, uint32_t task)
{
	return task < l->low || task - l->low >= l->n ? TRACE_NO_TASK : l->at[task - l->low];
}

static size_t layer_of(const struct trace *t, uint32_t task)
{
	return t->task[task].layer < 0 ? (size_t)t->n_layers : (size_t)t->task[task].layer;
}

/* ---- the longest path ---- */

/* head[i]: longest path that ends with task i of the window, which is included. */
static void heads(const struct local *l, int64_t *head, uint32_t *from)
{
	const struct trace *t = l->w->trace;

	for (uint32_t k = 0; k < l->n; k++) {
		const struct trace_task *task = &t->task[l->low + k];
		int64_t best = 0;
		uint32_t at = l->at[k];

		if (at == TRACE_NO_TASK)
			continue;
		from[at] = TRACE_NO_TASK;
		for (uint32_t p = 0; p < task->n_pred; p++) {
			uint32_t pred = position(l, t->pred[task->first_pred + p]);

			if (pred != TRACE_NO_TASK && head[pred] > best) {
				best = head[pred];
				from[at] = pred;
			}
		}
		head[at] = best + trace_inside(l->w, l->low + k);
	}
}

/* slack[i] = length - longest path through task i; tail: longest path after it. */
static int slacks(const struct local *l, const int64_t *head, struct trace_path *p)
{
	const struct trace *t = l->w->trace;
	int64_t *tail = calloc((size_t)l->w->n + 1, sizeof *tail);

	p->slack = malloc(((size_t)l->w->n + 1) * sizeof *p->slack);
	if (!tail || !p->slack) {
		free(tail);
		return -1;
	}
	for (uint32_t k = l->n; k-- > 0;) {
		const struct trace_task *task = &t->task[l->low + k];
		int64_t through;
		uint32_t at = l->at[k];

		if (at == TRACE_NO_TASK)
			continue;
		p->slack[at] = p->length - head[at] - tail[at];
		through = tail[at] + trace_inside(l->w, l->low + k);
		for (uint32_t i = 0; i < task->n_pred; i++) {
			uint32_t pred = position(l, t->pred[task->first_pred + i]);

			if (pred != TRACE_NO_TASK && through > tail[pred])
				tail[pred] = through;
		}
	}
	free(tail);
	return 0;
}

static int follow(const struct local *l, const int64_t *head, const uint32_t *from,
		  struct trace_path *p)
{
	const struct trace_window *w = l->w;
	uint32_t last = TRACE_NO_TASK, n = 0;

	for (uint32_t i = 0; i < w->n; i++)
		if (last == TRACE_NO_TASK || head[i] > head[last])
			last = i;
	for (uint32_t i = last; i != TRACE_NO_TASK; i = from[i])
		n++;
	p->task = malloc(((size_t)n + 1) * sizeof *p->task);
	if (!p->task)
		return -1;
	p->n = n;
	p->length = n ? head[last] : 0;
	for (uint32_t i = last; i != TRACE_NO_TASK; i = from[i]) {
		uint32_t task = w->task[i];

		p->task[--n] = task;
		p->by_kind[w->trace->task[task].kind] += trace_inside(w, task);
		p->by_layer[layer_of(w->trace, task)] += trace_inside(w, task);
	}
	return 0;
}

int trace_critical_path(const struct trace_window *w, bool slack, struct trace_path *p)
{
	const struct trace *t = w->trace;
	int64_t *head = malloc(((size_t)w->n + 1) * sizeof *head);
	uint32_t *from = malloc(((size_t)w->n + 1) * sizeof *from);
	struct local l;
	int rc;

	memset(p, 0, sizeof *p);
	p->by_kind = calloc((size_t)t->n_kinds + 1, sizeof *p->by_kind);
	p->by_layer = calloc((size_t)t->n_layers + 1, sizeof *p->by_layer);
	rc = open_local(&l, w) || !head || !from || !p->by_kind || !p->by_layer;
	if (!rc) {
		heads(&l, head, from);
		rc = follow(&l, head, from, p) || (slack && slacks(&l, head, p));
	}
	free(l.at), free(head), free(from);
	if (!rc)
		return 0;
	trace_path_free(p);
	return -1;
}

void trace_path_free(struct trace_path *p)
{
	free(p->task), free(p->by_kind), free(p->by_layer), free(p->slack);
	memset(p, 0, sizeof *p);
}

/* ---- the path that was taken ---- */

/* The last task that ended in the window; where none did, the one that began last. */
static uint32_t last_task(const struct trace_window *w)
{
	const struct trace_task *task = w->trace->task;
	uint32_t last = TRACE_NO_TASK;

	for (uint32_t i = 0; i < w->n; i++)
		if (task[w->task[i]].stop <= w->end &&
		    (last == TRACE_NO_TASK || task[w->task[i]].stop >= task[last].stop))
			last = w->task[i];
	return last == TRACE_NO_TASK && w->n ? w->task[w->n - 1] : last;
}

static bool earlier(const struct trace *t, uint32_t a, uint32_t b)
{
	return t->task[a].start < t->task[b].start ||
	       (t->task[a].start == t->task[b].start && a < b);
}

/* What kept it from starting before; link says in which way. Always an earlier task. */
static uint32_t cause_of(const struct trace *t, uint32_t i, uint8_t *link)
{
	const struct trace_task *k = &t->task[i];
	uint32_t best = TRACE_NO_TASK;

	*link = TRACE_LINK_FIRST;
	if (k->prev != TRACE_NO_TASK && earlier(t, k->prev, i)) {
		best = k->prev;
		*link = TRACE_LINK_WORKER;
	}
	for (uint32_t p = 0; p < k->n_pred; p++) {
		uint32_t pred = t->pred[k->first_pred + p];

		if (!earlier(t, pred, i))
			continue;
		if (best == TRACE_NO_TASK || t->task[pred].stop > t->task[best].stop ||
		    (*link == TRACE_LINK_WORKER && t->task[pred].stop == t->task[best].stop)) {
			best = pred;
			*link = TRACE_LINK_DEPENDENCY;
		}
	}
	if (best != TRACE_NO_TASK && k->submit != MOE_MXT_NA && k->submit > t->task[best].stop)
		*link = TRACE_LINK_SUBMISSION;
	return best;
}

static void account(const struct trace_window *w, struct trace_realised *r, uint32_t i,
		    uint32_t before, uint8_t link)
{
	const struct trace *t = w->trace;
	int64_t gap;

	r->busy += trace_inside(w, i);
	r->by_kind[t->task[i].kind] += trace_inside(w, i);
	r->by_layer[layer_of(t, i)] += trace_inside(w, i);
	r->links[link]++;
	if (before == TRACE_NO_TASK)
		return;
	gap = t->task[i].start -
	      (t->task[before].stop > w->begin ? t->task[before].stop : w->begin);
	if (gap > 0) {
		r->gaps += gap;
		r->gap_after[link] += gap;
	}
}

static void reverse(struct trace_realised *r)
{
	for (uint32_t i = 0, k = r->n; i + 1 < k--; i++) {
		uint32_t task = r->task[i];
		uint8_t link = r->link[i];

		r->task[i] = r->task[k];
		r->link[i] = r->link[k];
		r->task[k] = task;
		r->link[k] = link;
	}
}

static int walk(const struct trace_window *w, struct trace_realised *r)
{
	const struct trace *t = w->trace;
	uint32_t cap = 0, i = last_task(w);

	while (i != TRACE_NO_TASK) {
		uint8_t link;
		uint32_t before = cause_of(t, i, &link);

		if (r->n == cap) {
			uint32_t *task;
			uint8_t *links;

			cap = cap ? 2 * cap : 256;
			task = realloc(r->task, cap * sizeof *task);
			r->task = task ? task : r->task;
			links = realloc(r->link, cap * sizeof *links);
			r->link = links ? links : r->link;
			if (!task || !links)
				return -1;
		}
		if (before != TRACE_NO_TASK && t->task[before].stop <= w->begin &&
		    t->task[i].start <= w->begin)
			before = TRACE_NO_TASK;
		if (before == TRACE_NO_TASK)
			link = TRACE_LINK_FIRST;
		r->task[r->n] = i;
		r->link[r->n++] = link;
		account(w, r, i, before, link);
		if (before == TRACE_NO_TASK || t->task[before].stop <= w->begin)
			break;
		i = before;
	}
	reverse(r);
	return 0;
}

int trace_realised(const struct trace_window *w, struct trace_realised *r)
{
	memset(r, 0, sizeof *r);
	r->by_kind = calloc((size_t)w->trace->n_kinds + 1, sizeof *r->by_kind);
	r->by_layer = calloc((size_t)w->trace->n_layers + 1, sizeof *r->by_layer);
	if (r->by_kind && r->by_layer && walk(w, r) == 0)
		return 0;
	trace_realised_free(r);
	return -1;
}

void trace_realised_free(struct trace_realised *r)
{
	free(r->task), free(r->link), free(r->by_kind), free(r->by_layer);
	memset(r, 0, sizeof *r);
}
