/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks beside tasks and dependencies. */
#include "tools/trace/load.h"

#include <stdlib.h>
#include <string.h>

bool load_routing(struct load *l)
{
	struct trace *t = l->t;
	size_t list = 0;

	for (size_t row = 0; row < l->table.head.rows; row++) {
		int64_t n = l->table.column[MOE_MXT_ROUTING_EXPERTS].n
				    ? load_at(l, MOE_MXT_ROUTING_EXPERTS, row)
				    : 0;
		struct trace_routing r = {
			.task = load_at(l, MOE_MXT_ROUTING_TASK, row),
			.time = load_at(l, MOE_MXT_ROUTING_TIME, row),
			.tokens = load_at(l, MOE_MXT_ROUTING_TOKENS, row),
			.slots = load_at(l, MOE_MXT_ROUTING_SLOTS, row),
			.step = load_small(load_at(l, MOE_MXT_ROUTING_STEP, row), 0),
			.layer = load_small(load_at(l, MOE_MXT_ROUTING_LAYER, row), -1),
			.micro = load_small(load_at(l, MOE_MXT_ROUTING_MICRO, row), 0),
			.experts = (int32_t)n,
			.first_load = t->n_loads,
		};
		bool keep = !l->slice ||
			    (load_inside(l->slice->steps, l->slice->step, r.step, r.step) &&
			     load_inside(l->slice->layers, l->slice->layer, r.layer, r.layer) &&
			     load_inside(l->slice->times, l->slice->time, r.time, r.time));

		if (keep && row && r.task == load_at(l, MOE_MXT_ROUTING_TASK, row - 1)) {
			load_bad(l, "a routing that is there twice", r.task);
			keep = false;
		}
		if (keep && (!load_is_time(r.time) || r.layer < -1 || r.layer >= MAX_LAYER ||
			     r.step < 0 || r.step > MAX_STEP)) {
			load_bad(l, "a routing of impossible time, layer or step", r.task);
			keep = false;
		}
		if (keep) {
			if ((uint64_t)t->n_loads + (uint64_t)n > UINT32_MAX - 1 ||
			    !load_grow(l, &t->load, &l->load_cap, t->n_loads + (size_t)n,
				       sizeof *t->load) ||
			    !load_grow(l, &t->routing, &l->routing_cap, (size_t)t->n_routing + 1,
				       sizeof *t->routing))
				return false;
			for (int64_t i = 0; i < n; i++)
				t->load[t->n_loads++] = l->table.column[MOE_MXT_ROUTING_LOADS]
								.value[list + (size_t)i];
			t->routing[t->n_routing++] = r;
		}
		list += (size_t)n;
	}
	return true;
}

/* Index of a name in a list that grows; -1: no memory. */
static int intern(char ***name, int *n, const char *text)
{
	char **grown;

	for (int i = 0; i < *n; i++)
		if (!strcmp((*name)[i], text))
			return i;
	grown = *n < TRACE_MAX_KINDS ? realloc(*name, ((size_t)*n + 1) * sizeof **name) : NULL;
	if (!grown)
		return -1;
	*name = grown;
	grown[*n] = strdup(text);
	return grown[*n] ? (*n)++ : -1;
}

/* Names of a chunk: [n] indices into the trace's own list. NULL: no memory; free it. */
static int32_t *read_names(struct load *l, int column, char ***name, int *n, size_t *count)
{
	const struct moe_mxt_column *c = &l->table.column[column];
	int32_t *index = malloc((c->n + 1) * sizeof *index);
	char text[128];
	size_t used = 0;

	*count = 0;
	for (size_t i = 0; index && i < c->n; i++) {
		int v;

		if (c->value[i] && used < sizeof text - 1)
			text[used++] = (char)c->value[i];
		if (c->value[i])
			continue;
		text[used] = 0;
		used = 0;
		v = intern(name, n, text);
		if (v < 0) {
			free(index);
			return NULL;
		}
		index[(*count)++] = v;
	}
	return index;
}

bool load_memory(struct load *l)
{
	struct trace *t = l->t;
	size_t names = 0;
	int32_t *index = read_names(l, MOE_MXT_MEMORY_NAMES, &t->purpose, &t->n_purposes, &names);
	bool good = index && load_grow(l, &t->memory, &l->memory_cap,
				       (size_t)t->n_memory + l->table.head.rows, sizeof *t->memory);

	for (size_t row = 0; good && row < l->table.head.rows; row++) {
		struct trace_memory m = { .time = load_at(l, MOE_MXT_MEMORY_TIME, row),
					  .bytes = load_at(l, MOE_MXT_MEMORY_BYTES, row),
					  .part = load_small(load_at(l, MOE_MXT_MEMORY_PART, row),
							     -1) };
		int64_t purpose = load_at(l, MOE_MXT_MEMORY_PURPOSE, row);

		if (!load_is_time(m.time) || m.time == MOE_MXT_NA || purpose < 0 ||
		    purpose >= (int64_t)names) {
			load_bad(l, "a memory row of no time or purpose", purpose);
			continue;
		}
		m.purpose = index[purpose];
		if (!l->slice || load_inside(l->slice->times, l->slice->time, m.time, m.time))
			t->memory[t->n_memory++] = m;
	}
	free(index);
	return good;
}

bool load_counters(struct load *l)
{
	struct trace *t = l->t;
	size_t names = 0;
	int32_t *index =
		read_names(l, MOE_MXT_COUNTER_NAMES, &t->counter_name, &t->n_counter_names, &names);
	bool good =
		index && load_grow(l, &t->counter, &l->counter_cap,
				   (size_t)t->n_counters + l->table.head.rows, sizeof *t->counter);

	for (size_t row = 0; good && row < l->table.head.rows; row++) {
		struct trace_counter c = { .time = load_at(l, MOE_MXT_COUNTER_TIME, row),
					   .value = load_at(l, MOE_MXT_COUNTER_VALUE, row) };
		int64_t name = load_at(l, MOE_MXT_COUNTER_NAME, row);

		if (!load_is_time(c.time) || c.time == MOE_MXT_NA || name < 0 ||
		    name >= (int64_t)names) {
			load_bad(l, "a counter of no time or name", name);
			continue;
		}
		c.name = index[name];
		t->counter[t->n_counters++] = c;
	}
	free(index);
	return good;
}

bool load_marks(struct load *l)
{
	struct trace *t = l->t;

	if (!load_grow(l, &t->mark, &l->mark_cap, (size_t)t->n_marks + l->table.head.rows,
		       sizeof *t->mark))
		return false;
	for (size_t row = 0; row < l->table.head.rows; row++) {
		struct trace_mark m = { .time = load_at(l, MOE_MXT_MARK_TIME, row),
					.tokens = load_at(l, MOE_MXT_MARK_TOKENS, row),
					.trained = load_at(l, MOE_MXT_MARK_TRAINED, row),
					.what = load_small(load_at(l, MOE_MXT_MARK_WHAT, row), -1),
					.step = load_small(load_at(l, MOE_MXT_MARK_STEP, row),
							   -1) };

		if (!load_is_time(m.time) || m.time == MOE_MXT_NA || m.what < 0 || m.step < 0)
			load_bad(l, "a mark of no time, meaning or step", m.step);
		else if (!l->slice || load_inside(l->slice->steps, l->slice->step, m.step, m.step))
			t->mark[t->n_marks++] = m;
	}
	return true;
}

bool load_host(struct load *l)
{
	struct trace *t = l->t;

	if (!load_grow(l, &t->host, &l->host_cap, (size_t)t->n_hosts + l->table.head.rows,
		       sizeof *t->host))
		return false;
	for (size_t row = 0; row < l->table.head.rows; row++) {
		struct trace_host h = { .begin = load_at(l, MOE_MXT_HOST_BEGIN, row),
					.end = load_at(l, MOE_MXT_HOST_END, row),
					.what = load_small(load_at(l, MOE_MXT_HOST_WHAT, row), -1),
					.thread = load_small(load_at(l, MOE_MXT_HOST_THREAD, row),
							     -1) };

		if (!load_is_time(h.begin) || !load_is_time(h.end) || h.begin == MOE_MXT_NA ||
		    h.end < h.begin || h.what < 0)
			load_bad(l, "an interval of the host that cannot be", h.what);
		else if (!l->slice || load_inside(l->slice->times, l->slice->time, h.begin, h.end))
			t->host[t->n_hosts++] = h;
	}
	return true;
}
