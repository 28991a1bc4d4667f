/* SPDX-License-Identifier: Apache-2.0 */
/* A trace as tables: what csv and sqlite write. */
#include "tools/trace/exporter.h"
#include "tools/trace/metrics.h"

#include <string.h>

static void integer(struct trace_cell **c, int64_t v)
{
	*(*c)++ = (struct trace_cell){ v, NULL };
}

static void text(struct trace_cell **c, const char *v)
{
	*(*c)++ = (struct trace_cell){ 0, v ? v : "" };
}

/* A line of the header; key and value are cut apart in a buffer of the module's own. */
static bool next_header(const struct trace_export *x, struct trace_cursor *at,
			struct trace_cell *cell)
{
	static char line[4096];
	const char *from = x->trace->header + at->outer, *end, *equals;
	size_t n;

	while (*from == '\n')
		from++;
	if (!*from)
		return false;
	end = strchr(from, '\n');
	n = end ? (size_t)(end - from) : strlen(from);
	at->outer = (uint32_t)(from - x->trace->header + (ptrdiff_t)n);
	n = n < sizeof line ? n : sizeof line - 1;
	memcpy(line, from, n);
	line[n] = '\0';
	equals = strchr(line, '=');
	if (equals)
		line[equals - line] = '\0';
	text(&cell, line);
	text(&cell, equals ? equals + 1 : "");
	return true;
}

static bool next_worker(const struct trace_export *x, struct trace_cursor *at,
			struct trace_cell *cell)
{
	const struct trace *t = x->trace;
	int w = (int)at->outer++;

	if (w >= t->n_workers)
		return false;
	integer(&cell, w);
	integer(&cell, t->worker[w].node);
	integer(&cell, t->worker[w].cpu);
	return true;
}

static bool next_step(const struct trace_export *x, struct trace_cursor *at,
		      struct trace_cell *cell)
{
	const struct trace *t = x->trace;
	int i = (int)at->outer++;
	const struct trace_step *s = t->step + i;

	if (i >= t->n_steps)
		return false;
	integer(&cell, s->step);
	integer(&cell, s->begin);
	integer(&cell, s->submitted);
	integer(&cell, s->end);
	integer(&cell, s->tokens);
	integer(&cell, s->trained);
	integer(&cell, s->n);
	return true;
}

static bool next_task(const struct trace_export *x, struct trace_cursor *at,
		      struct trace_cell *cell)
{
	const struct trace *t = x->trace;
	const struct trace_task *k = t->task + at->outer;

	if (at->outer >= t->n_tasks)
		return false;
	at->outer++;
	integer(&cell, k->id);
	text(&cell, t->kind[k->kind]);
	text(&cell, moe_mxt_phase_name(k->phase));
	{
		const int64_t v[] = { k->step,	 k->micro,	  k->layer,	k->group,
				      k->slice,	 k->part,	  k->worker,	k->core,
				      k->submit, k->ready,	  k->pop,	k->start,
				      k->stop,	 k->cpu,	  k->rows,	k->flops,
				      k->read,	 k->written,	  k->local,	k->remote,
				      k->cycles, k->instructions, k->llc_misses };

		for (size_t i = 0; i < sizeof v / sizeof *v; i++)
			integer(&cell, v[i]);
	}
	return true;
}

static bool next_dep(const struct trace_export *x, struct trace_cursor *at, struct trace_cell *cell)
{
	const struct trace *t = x->trace;
	uint32_t edge;

	while (at->outer < t->n_tasks && at->inner >= t->task[at->outer].n_pred) {
		at->outer++;
		at->inner = 0;
	}
	if (at->outer >= t->n_tasks)
		return false;
	edge = t->task[at->outer].first_pred + at->inner++;
	integer(&cell, t->task[at->outer].id);
	integer(&cell, t->task[t->pred[edge]].id);
	integer(&cell, x->needed[edge]);
	return true;
}

static bool next_routing(const struct trace_export *x, struct trace_cursor *at,
			 struct trace_cell *cell)
{
	const struct trace *t = x->trace;
	const struct trace_routing *r;

	while (at->outer < t->n_routing && (int64_t)at->inner >= t->routing[at->outer].experts) {
		at->outer++;
		at->inner = 0;
	}
	if (at->outer >= t->n_routing)
		return false;
	r = t->routing + at->outer;
	integer(&cell, r->task);
	integer(&cell, at->inner);
	integer(&cell, r->step);
	integer(&cell, r->layer);
	integer(&cell, r->micro);
	integer(&cell, r->time);
	integer(&cell, r->tokens);
	integer(&cell, r->slots);
	integer(&cell, t->load[r->first_load + at->inner]);
	at->inner++;
	return true;
}

static bool next_memory(const struct trace_export *x, struct trace_cursor *at,
			struct trace_cell *cell)
{
	const struct trace *t = x->trace;
	const struct trace_memory *m = t->memory + at->outer;

	if (at->outer >= t->n_memory)
		return false;
	at->outer++;
	integer(&cell, m->time);
	text(&cell, t->purpose[m->purpose]);
	integer(&cell, m->part);
	integer(&cell, m->bytes);
	return true;
}

static bool next_counter(const struct trace_export *x, struct trace_cursor *at,
			 struct trace_cell *cell)
{
	const struct trace *t = x->trace;
	const struct trace_counter *c = t->counter + at->outer;

	if (at->outer >= t->n_counters)
		return false;
	at->outer++;
	integer(&cell, c->time);
	text(&cell, t->counter_name[c->name]);
	integer(&cell, c->value);
	return true;
}

static bool next_mark(const struct trace_export *x, struct trace_cursor *at,
		      struct trace_cell *cell)
{
	const struct trace_mark *m = x->trace->mark + at->outer;

	if (at->outer >= x->trace->n_marks)
		return false;
	at->outer++;
	integer(&cell, m->time);
	text(&cell, moe_mxt_mark_name(m->what));
	integer(&cell, m->step);
	integer(&cell, m->tokens);
	integer(&cell, m->trained);
	return true;
}

static bool next_host(const struct trace_export *x, struct trace_cursor *at,
		      struct trace_cell *cell)
{
	const struct trace_host *h = x->trace->host + at->outer;

	if (at->outer >= x->trace->n_hosts)
		return false;
	at->outer++;
	text(&cell, moe_mxt_host_name(h->what));
	integer(&cell, h->thread);
	integer(&cell, h->begin);
	integer(&cell, h->end);
	return true;
}

#define NUMBER(n)                                                                                  \
	{                                                                                          \
		.name = n                                                                          \
	}
#define TEXT(n)                                                                                    \
	{                                                                                          \
		.name = n, .text = true                                                            \
	}

const struct trace_table trace_tables[] = {
	{ "header", { { "key", true, true }, TEXT("value") }, next_header },
	{ "workers", { { "worker", false, true }, NUMBER("node"), NUMBER("cpu") }, next_worker },
	{ "steps",
	  { { "step", false, true },
	    NUMBER("begin"),
	    NUMBER("submitted"),
	    NUMBER("end"),
	    NUMBER("tokens"),
	    NUMBER("trained"),
	    NUMBER("tasks") },
	  next_step },
	{ "tasks",
	  { { "id", false, true },  TEXT("kind"),	 TEXT("phase"),		 NUMBER("step"),
	    NUMBER("micro"),	    NUMBER("layer"),	 NUMBER("expert_group"), NUMBER("slice"),
	    NUMBER("part"),	    NUMBER("worker"),	 NUMBER("core"),	 NUMBER("submit"),
	    NUMBER("ready"),	    NUMBER("pop"),	 NUMBER("start"),	 NUMBER("stop"),
	    NUMBER("cpu"),	    NUMBER("rows"),	 NUMBER("flops"),	 NUMBER("read"),
	    NUMBER("written"),	    NUMBER("local"),	 NUMBER("remote"),	 NUMBER("cycles"),
	    NUMBER("instructions"), NUMBER("llc_misses") },
	  next_task },
	{ "deps",
	  { { "task", false, true }, { "waits_for", false, true }, NUMBER("needed") },
	  next_dep },
	{ "routing",
	  { { "plan", false, true },
	    { "expert", false, true },
	    NUMBER("step"),
	    NUMBER("layer"),
	    NUMBER("micro"),
	    NUMBER("time"),
	    NUMBER("tokens"),
	    NUMBER("slots"),
	    NUMBER("rows") },
	  next_routing },
	{ "memory",
	  { NUMBER("time"), TEXT("purpose"), NUMBER("part"), NUMBER("bytes") },
	  next_memory },
	{ "counters", { NUMBER("time"), TEXT("counter"), NUMBER("value") }, next_counter },
	{ "marks",
	  { NUMBER("time"), TEXT("mark"), NUMBER("step"), NUMBER("tokens"), NUMBER("trained") },
	  next_mark },
	{ "host", { TEXT("what"), NUMBER("thread"), NUMBER("begin"), NUMBER("end") }, next_host },
	{ .name = NULL },
};
