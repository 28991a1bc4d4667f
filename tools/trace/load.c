/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trace file into memory. Tasks first, then dependencies between those that were kept. Whatever a
 * file claims, what leaves here keeps to trace.h: rows that cannot be are left out and counted.
 */
#include "tools/trace/trace.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WORKERS 65536
#define MAX_KINDS 512
#define MAX_PARTS 1024 /* and nodes */
#define MAX_STEP (1 << 30)
#define MAX_LAYER 4096
#define MAX_TIME ((int64_t)1 << 52) /* ns: 52 days */
#define MAX_ITEMS (1u << 28)	    /* of a list: constant columns cost a hostile file nothing */

struct load {
	struct trace *t;
	const struct trace_slice *slice;
	struct moe_mxt_reader r;
	struct moe_mxt_table table;
	size_t task_cap, pred_cap, routing_cap, load_cap, memory_cap, counter_cap, mark_cap,
		host_cap;
	uint32_t *index; /* of task id - low_id; TRACE_NO_TASK: not there */
	int64_t low_id;
	uint64_t ids;
	bool too_many;
};

static void bad(struct load *l, const char *what, int64_t which)
{
	if (!l->t->bad_rows++)
		snprintf(l->t->bad_row, sizeof l->t->bad_row, "%s (%lld)", what, (long long)which);
}

/* Room for more items of an array; false: no memory. */
static bool grow(struct load *l, void *array, size_t *cap, size_t n, size_t size)
{
	size_t want = *cap ? *cap : 1024;
	void *grown;

	if (n <= *cap)
		return true;
	if (n > MAX_ITEMS) {
		l->too_many = true;
		return false;
	}
	while (want < n)
		want += want / 2;
	grown = realloc(*(void **)array, want * size);
	if (!grown)
		return false;
	*(void **)array = grown;
	*cap = want;
	return true;
}

static int64_t at(const struct load *l, int column, size_t row)
{
	return moe_mxt_at(&l->table, column, row);
}

/* A value for an int32; otherwise where it is absent or has no room. */
static int32_t small(int64_t v, int32_t otherwise)
{
	return v == MOE_MXT_NA || v < INT32_MIN || v > INT32_MAX ? otherwise : (int32_t)v;
}

static bool is_time(int64_t v)
{
	return v == MOE_MXT_NA || (v > -MAX_TIME && v < MAX_TIME);
}

static bool inside(bool wanted, const int64_t range[2], int64_t first, int64_t last)
{
	return !wanted || (first <= range[1] && last >= range[0]);
}

/* ---- header ---- */

static char *number_name(const char *what, int i)
{
	char buf[40];

	snprintf(buf, sizeof buf, "%s%d", what, i);
	return strdup(buf);
}

static bool read_kinds(struct load *l, int n)
{
	l->t->kind = calloc((size_t)n + 1, sizeof *l->t->kind);
	if (!l->t->kind)
		return false;
	for (; l->t->n_kinds < n; l->t->n_kinds++) {
		char key[32], buf[128];
		const char *name;

		snprintf(key, sizeof key, "kind.%d", l->t->n_kinds);
		name = moe_mxt_value(&l->r, key, buf, sizeof buf);
		l->t->kind[l->t->n_kinds] =
			name && *name ? strdup(name) : number_name("kind", l->t->n_kinds);
		if (!l->t->kind[l->t->n_kinds])
			return false;
	}
	return true;
}

static int number_key(struct load *l, const char *format, int i, int otherwise)
{
	char key[48];

	snprintf(key, sizeof key, format, i);
	return small(moe_mxt_number(&l->r, key, otherwise), otherwise);
}

static bool read_workers(struct load *l, int n)
{
	struct trace *t = l->t;
	int nodes = small(moe_mxt_number(&l->r, "topology.nodes", 1), 1);

	t->n_nodes = nodes > 0 && nodes <= MAX_PARTS ? nodes : 1;
	t->worker = calloc((size_t)n + 1, sizeof *t->worker);
	if (!t->worker)
		return false;
	for (; t->n_workers < n; t->n_workers++) {
		struct trace_worker *w = &t->worker[t->n_workers];

		w->node = number_key(l, "worker.%d.node", t->n_workers, 0);
		w->cpu = number_key(l, "worker.%d.cpu", t->n_workers, -1);
		if (w->node < 0 || w->node >= t->n_nodes)
			w->node = 0;
	}
	return true;
}

/* "0,2,4" behind the workers so far; what is no worker is left out. */
static void add_part_workers(struct trace *t, int part, const char *list)
{
	uint32_t n = t->part_first[part];

	while (list && *list) {
		char *end;
		long w = strtol(list, &end, 10);

		if (end == list)
			break;
		if (w >= 0 && w < t->n_workers && n - t->part_first[part] < (uint32_t)t->n_workers)
			t->part_worker[n++] = (int32_t)w;
		list = *end == ',' ? end + 1 : end;
	}
	t->part_first[part + 1] = n;
}

static bool read_parts(struct load *l)
{
	struct trace *t = l->t;
	int n = small(moe_mxt_number(&l->r, "parts", 1), 1);
	size_t list_bytes = (size_t)t->n_workers * 7 + 1;
	char *list = malloc(list_bytes), word[16], key[32];
	const char *text;

	n = n < 1 ? 1 : n > MAX_PARTS ? MAX_PARTS : n;
	if ((size_t)n * (size_t)(t->n_workers + 1) > 1 << 24) /* no machine has that many */
		n = 1;
	t->part_node = calloc((size_t)n, sizeof *t->part_node);
	t->part_first = calloc((size_t)n + 1, sizeof *t->part_first);
	t->part_worker = calloc((size_t)n * (size_t)t->n_workers + 1, sizeof *t->part_worker);
	if (!list || !t->part_node || !t->part_first || !t->part_worker) {
		free(list);
		return false;
	}
	for (; t->n_parts < n; t->n_parts++) {
		int32_t *node = &t->part_node[t->n_parts];

		*node = number_key(l, "part.%d.node", t->n_parts, 0);
		*node = *node < 0 || *node >= t->n_nodes ? 0 : *node;
		snprintf(key, sizeof key, "part.%d.workers", t->n_parts);
		add_part_workers(t, t->n_parts, moe_mxt_value(&l->r, key, list, list_bytes));
	}
	free(list);
	text = moe_mxt_value(&l->r, "placement", word, sizeof word);
	t->strict = text && !strcmp(text, "strict");
	t->data_wait = moe_mxt_number(&l->r, "data.wait", 0) == 1;
	return true;
}

/* A damaged header costs names, not tasks: as many kinds and workers as the tasks need. */
static bool read_header(struct load *l)
{
	int kinds = small(moe_mxt_number(&l->r, "kinds", 0), 0);
	int workers = small(moe_mxt_number(&l->r, "workers", 0), 0);
	bool known_kinds = kinds > 0 && kinds <= MAX_KINDS;
	bool known_workers = workers > 0 && workers <= MAX_WORKERS;
	int32_t kind = 0, worker = 0;

	for (uint32_t i = 0; i < l->t->n_tasks; i++) {
		const struct trace_task *k = &l->t->task[i];

		kind = k->kind > kind && k->kind < MAX_KINDS ? k->kind : kind;
		worker = k->worker > worker && k->worker < MAX_WORKERS ? k->worker : worker;
	}
	return read_kinds(l, known_kinds ? kinds : kind + 1) &&
	       read_workers(l, known_workers ? workers : worker + 1) && read_parts(l);
}

/* ---- tasks ---- */

static void take_task(struct load *l, size_t row, struct trace_task *k)
{
	memset(k, 0, sizeof *k);
	k->id = at(l, MOE_MXT_TASK_ID, row);
	k->submit = at(l, MOE_MXT_TASK_SUBMIT, row);
	k->ready = at(l, MOE_MXT_TASK_READY, row);
	k->pop = at(l, MOE_MXT_TASK_POP, row);
	k->start = at(l, MOE_MXT_TASK_START, row);
	k->stop = at(l, MOE_MXT_TASK_STOP, row);
	k->cpu = at(l, MOE_MXT_TASK_CPU, row);
	k->rows = at(l, MOE_MXT_TASK_ROWS, row);
	k->flops = at(l, MOE_MXT_TASK_FLOPS, row);
	k->read = at(l, MOE_MXT_TASK_READ, row);
	k->written = at(l, MOE_MXT_TASK_WRITTEN, row);
	k->local = at(l, MOE_MXT_TASK_LOCAL, row);
	k->remote = at(l, MOE_MXT_TASK_REMOTE, row);
	k->cycles = at(l, MOE_MXT_TASK_CYCLES, row);
	k->instructions = at(l, MOE_MXT_TASK_INSTRUCTIONS, row);
	k->llc_misses = at(l, MOE_MXT_TASK_LLC_MISSES, row);
	k->kind = small(at(l, MOE_MXT_TASK_KIND, row), -1);
	k->layer = small(at(l, MOE_MXT_TASK_LAYER, row), -1);
	k->group = small(at(l, MOE_MXT_TASK_GROUP, row), -1);
	k->slice = small(at(l, MOE_MXT_TASK_SLICE, row), -1);
	k->part = small(at(l, MOE_MXT_TASK_PART, row), -1);
	k->micro = small(at(l, MOE_MXT_TASK_MICRO, row), 0);
	k->worker = small(at(l, MOE_MXT_TASK_WORKER, row), -1);
	k->core = small(at(l, MOE_MXT_TASK_CORE, row), -1);
	k->step = small(at(l, MOE_MXT_TASK_STEP, row), 0);
	k->phase = (uint8_t)small(at(l, MOE_MXT_TASK_PHASE, row), 0);
}

static const char *wrong_task(const struct trace_task *k)
{
	if (k->id < 1)
		return "a task without an id";
	if (k->start == MOE_MXT_NA || k->stop == MOE_MXT_NA || k->stop < k->start)
		return "a task that does not start before it stops";
	if (!is_time(k->start) || !is_time(k->stop) || !is_time(k->submit) || !is_time(k->ready) ||
	    !is_time(k->pop))
		return "a task with an impossible time";
	if (k->kind < 0 || k->kind >= MAX_KINDS)
		return "a task of unknown kind";
	if (k->worker < 0 || k->worker >= MAX_WORKERS)
		return "a task of unknown worker";
	if (k->layer < -1 || k->layer >= MAX_LAYER || k->step < 0 || k->step > MAX_STEP)
		return "a task of impossible layer or step";
	return NULL;
}

static bool wanted(const struct trace_slice *s, const struct trace_task *k)
{
	return !s || (inside(s->steps, s->step, k->step, k->step) &&
		      inside(s->layers, s->layer, k->layer, k->layer) &&
		      inside(s->times, s->time, k->start, k->stop));
}

static bool chunk_wanted(const struct trace_slice *s, const struct moe_mxt_head *h)
{
	return !s || (inside(s->steps, s->step, h->step[0], h->step[1]) &&
		      inside(s->layers, s->layer, h->layer[0], h->layer[1]) &&
		      inside(s->times, s->time, h->time[0], h->time[1]));
}

/* Loads chunk i; a damaged one is counted as lost. */
static bool load_chunk(struct load *l, size_t i)
{
	if (moe_mxt_load(&l->r, i, &l->table))
		return true;
	l->t->lost_bytes += l->r.chunk[i].head.length;
	return false;
}

static bool add_tasks(struct load *l)
{
	struct trace *t = l->t;

	for (size_t row = 0; row < l->table.head.rows; row++) {
		struct trace_task k;
		const char *wrong;

		take_task(l, row, &k);
		wrong = row && k.id == at(l, MOE_MXT_TASK_ID, row - 1)
				? "a task that is there twice"
				: wrong_task(&k);
		if (wrong) {
			bad(l, wrong, k.id);
			continue;
		}
		if (!wanted(l->slice, &k))
			continue;
		if (t->n_tasks == UINT32_MAX - 1 ||
		    !grow(l, &t->task, &l->task_cap, (size_t)t->n_tasks + 1, sizeof *t->task))
			return false;
		t->task[t->n_tasks++] = k;
	}
	return true;
}

/* By ascending id, each id once. */
static bool sort_tasks(struct load *l)
{
	struct trace *t = l->t;
	struct trace_key *key;
	struct trace_task *sorted;
	uint32_t n = 0;

	for (uint32_t i = 1; i < t->n_tasks && t->task[i].id > t->task[i - 1].id; i++)
		n = i;
	if (n + 1 >= t->n_tasks)
		return true;
	key = malloc((size_t)t->n_tasks * sizeof *key);
	sorted = malloc((size_t)t->n_tasks * sizeof *sorted);
	for (uint32_t i = 0; key && i < t->n_tasks; i++)
		key[i] = (struct trace_key){ t->task[i].id, i };
	if (!key || !sorted || !trace_sort(key, t->n_tasks)) {
		free(key), free(sorted);
		return false;
	}
	n = 0;
	for (uint32_t i = 0; i < t->n_tasks; i++)
		if (n && sorted[n - 1].id == key[i].key)
			bad(l, "a task that is there twice", key[i].key);
		else
			sorted[n++] = t->task[key[i].value];
	free(key);
	free(t->task);
	t->task = sorted;
	t->n_tasks = n;
	return true;
}

/* Tasks of kinds and workers that the header does not have go. */
static void drop_unknown(struct load *l)
{
	struct trace *t = l->t;
	uint32_t n = 0;

	for (uint32_t i = 0; i < t->n_tasks; i++) {
		const struct trace_task *k = &t->task[i];

		if (k->kind >= t->n_kinds)
			bad(l, "a task of unknown kind", k->id);
		else if (k->worker >= t->n_workers)
			bad(l, "a task of unknown worker", k->id);
		else
			t->task[n++] = *k;
	}
	t->n_tasks = n;
}

/* ---- dependencies ---- */

static bool index_tasks(struct load *l)
{
	struct trace *t = l->t;

	if (!t->n_tasks)
		return true;
	l->low_id = t->task[0].id;
	l->ids = (uint64_t)(t->task[t->n_tasks - 1].id - l->low_id) + 1;
	if (l->ids / 16 > t->n_tasks + (1 << 20)) /* sparse: searched instead */
		return true;
	l->index = malloc(l->ids * sizeof *l->index);
	if (!l->index)
		return false;
	memset(l->index, 0xff, l->ids * sizeof *l->index);
	for (uint32_t i = 0; i < t->n_tasks; i++)
		l->index[t->task[i].id - l->low_id] = i;
	return true;
}

static uint32_t find_task(const struct load *l, int64_t id)
{
	const struct trace *t = l->t;
	uint32_t low = 0, high = t->n_tasks;

	if (!t->n_tasks || id < l->low_id || (uint64_t)(id - l->low_id) >= l->ids)
		return TRACE_NO_TASK;
	if (l->index)
		return l->index[id - l->low_id];
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (t->task[middle].id < id)
			low = middle + 1;
		else
			high = middle;
	}
	return low < t->n_tasks && t->task[low].id == id ? low : TRACE_NO_TASK;
}

static bool add_row_of_deps(struct load *l, uint32_t task, int64_t id, size_t list, int64_t n)
{
	struct trace *t = l->t;
	struct trace_task *k = &t->task[task];

	if (k->n_pred) {
		bad(l, "dependencies that are there twice", id);
		return true;
	}
	if ((uint64_t)t->n_preds + (uint64_t)n > UINT32_MAX - 1)
		return false;
	if (!grow(l, &t->pred, &l->pred_cap, (size_t)t->n_preds + (size_t)n, sizeof *t->pred))
		return false;
	k->first_pred = t->n_preds;
	for (int64_t i = 0; i < n; i++) {
		int64_t back = l->table.column[MOE_MXT_DEP_BACK].value[list + (size_t)i];
		uint32_t pred;

		if (back < 1 || back >= id) {
			bad(l, "a dependency on no earlier task", id);
			continue;
		}
		pred = find_task(l, id - back);
		if (pred != TRACE_NO_TASK)
			t->pred[t->n_preds++] = pred;
	}
	k->n_pred = t->n_preds - k->first_pred;
	return true;
}

/* Whether a task that did not run belongs to the slice, as far as its row says. */
static bool row_wanted(const struct load *l, size_t row)
{
	const struct trace_slice *s = l->slice;
	int64_t step = at(l, MOE_MXT_DEP_STEP, row), layer = at(l, MOE_MXT_DEP_LAYER, row);

	return !s || (!s->times && inside(s->steps, s->step, step, step) &&
		      inside(s->layers, s->layer, layer, layer));
}

static bool add_deps(struct load *l)
{
	size_t list = 0;

	for (size_t row = 0; row < l->table.head.rows; row++) {
		int64_t id = at(l, MOE_MXT_DEP_ID, row);
		int64_t n =
			l->table.column[MOE_MXT_DEP_COUNT].n ? at(l, MOE_MXT_DEP_COUNT, row) : 0;
		uint32_t task = find_task(l, id);

		if (task == TRACE_NO_TASK)
			l->t->not_run += row_wanted(l, row);
		else if (!add_row_of_deps(l, task, id, list, n))
			return false;
		list += (size_t)n;
	}
	return true;
}

/* ---- the rest ---- */

static bool add_routing(struct load *l)
{
	struct trace *t = l->t;
	size_t list = 0;

	for (size_t row = 0; row < l->table.head.rows; row++) {
		int64_t n = l->table.column[MOE_MXT_ROUTING_EXPERTS].n
				    ? at(l, MOE_MXT_ROUTING_EXPERTS, row)
				    : 0;
		struct trace_routing r = {
			.task = at(l, MOE_MXT_ROUTING_TASK, row),
			.time = at(l, MOE_MXT_ROUTING_TIME, row),
			.tokens = at(l, MOE_MXT_ROUTING_TOKENS, row),
			.slots = at(l, MOE_MXT_ROUTING_SLOTS, row),
			.step = small(at(l, MOE_MXT_ROUTING_STEP, row), 0),
			.layer = small(at(l, MOE_MXT_ROUTING_LAYER, row), -1),
			.micro = small(at(l, MOE_MXT_ROUTING_MICRO, row), 0),
			.experts = (int32_t)n,
			.first_load = t->n_loads,
		};
		bool keep =
			!l->slice || (inside(l->slice->steps, l->slice->step, r.step, r.step) &&
				      inside(l->slice->layers, l->slice->layer, r.layer, r.layer) &&
				      inside(l->slice->times, l->slice->time, r.time, r.time));

		if (keep && row && r.task == at(l, MOE_MXT_ROUTING_TASK, row - 1)) {
			bad(l, "a routing that is there twice", r.task);
			keep = false;
		}
		if (keep && (!is_time(r.time) || r.layer < -1 || r.layer >= MAX_LAYER ||
			     r.step < 0 || r.step > MAX_STEP)) {
			bad(l, "a routing of impossible time, layer or step", r.task);
			keep = false;
		}
		if (keep) {
			if ((uint64_t)t->n_loads + (uint64_t)n > UINT32_MAX - 1 ||
			    !grow(l, &t->load, &l->load_cap, t->n_loads + (size_t)n,
				  sizeof *t->load) ||
			    !grow(l, &t->routing, &l->routing_cap, (size_t)t->n_routing + 1,
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
	grown = *n < MAX_KINDS ? realloc(*name, ((size_t)*n + 1) * sizeof **name) : NULL;
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

static bool add_memory(struct load *l)
{
	struct trace *t = l->t;
	size_t names = 0;
	int32_t *index = read_names(l, MOE_MXT_MEMORY_NAMES, &t->purpose, &t->n_purposes, &names);
	bool good = index && grow(l, &t->memory, &l->memory_cap,
				  (size_t)t->n_memory + l->table.head.rows, sizeof *t->memory);

	for (size_t row = 0; good && row < l->table.head.rows; row++) {
		struct trace_memory m = { .time = at(l, MOE_MXT_MEMORY_TIME, row),
					  .bytes = at(l, MOE_MXT_MEMORY_BYTES, row),
					  .part = small(at(l, MOE_MXT_MEMORY_PART, row), -1) };
		int64_t purpose = at(l, MOE_MXT_MEMORY_PURPOSE, row);

		if (!is_time(m.time) || m.time == MOE_MXT_NA || purpose < 0 ||
		    purpose >= (int64_t)names) {
			bad(l, "a memory row of no time or purpose", purpose);
			continue;
		}
		m.purpose = index[purpose];
		if (!l->slice || inside(l->slice->times, l->slice->time, m.time, m.time))
			t->memory[t->n_memory++] = m;
	}
	free(index);
	return good;
}

static bool add_counters(struct load *l)
{
	struct trace *t = l->t;
	size_t names = 0;
	int32_t *index =
		read_names(l, MOE_MXT_COUNTER_NAMES, &t->counter_name, &t->n_counter_names, &names);
	bool good = index && grow(l, &t->counter, &l->counter_cap,
				  (size_t)t->n_counters + l->table.head.rows, sizeof *t->counter);

	for (size_t row = 0; good && row < l->table.head.rows; row++) {
		struct trace_counter c = { .time = at(l, MOE_MXT_COUNTER_TIME, row),
					   .value = at(l, MOE_MXT_COUNTER_VALUE, row) };
		int64_t name = at(l, MOE_MXT_COUNTER_NAME, row);

		if (!is_time(c.time) || c.time == MOE_MXT_NA || name < 0 ||
		    name >= (int64_t)names) {
			bad(l, "a counter of no time or name", name);
			continue;
		}
		c.name = index[name];
		t->counter[t->n_counters++] = c;
	}
	free(index);
	return good;
}

static bool add_marks(struct load *l)
{
	struct trace *t = l->t;

	if (!grow(l, &t->mark, &l->mark_cap, (size_t)t->n_marks + l->table.head.rows,
		  sizeof *t->mark))
		return false;
	for (size_t row = 0; row < l->table.head.rows; row++) {
		struct trace_mark m = { .time = at(l, MOE_MXT_MARK_TIME, row),
					.tokens = at(l, MOE_MXT_MARK_TOKENS, row),
					.trained = at(l, MOE_MXT_MARK_TRAINED, row),
					.what = small(at(l, MOE_MXT_MARK_WHAT, row), -1),
					.step = small(at(l, MOE_MXT_MARK_STEP, row), -1) };

		if (!is_time(m.time) || m.time == MOE_MXT_NA || m.what < 0 || m.step < 0)
			bad(l, "a mark of no time, meaning or step", m.step);
		else if (!l->slice || inside(l->slice->steps, l->slice->step, m.step, m.step))
			t->mark[t->n_marks++] = m;
	}
	return true;
}

static bool add_host(struct load *l)
{
	struct trace *t = l->t;

	if (!grow(l, &t->host, &l->host_cap, (size_t)t->n_hosts + l->table.head.rows,
		  sizeof *t->host))
		return false;
	for (size_t row = 0; row < l->table.head.rows; row++) {
		struct trace_host h = { .begin = at(l, MOE_MXT_HOST_BEGIN, row),
					.end = at(l, MOE_MXT_HOST_END, row),
					.what = small(at(l, MOE_MXT_HOST_WHAT, row), -1),
					.thread = small(at(l, MOE_MXT_HOST_THREAD, row), -1) };

		if (!is_time(h.begin) || !is_time(h.end) || h.begin == MOE_MXT_NA ||
		    h.end < h.begin || h.what < 0)
			bad(l, "an interval of the host that cannot be", h.what);
		else if (!l->slice || inside(l->slice->times, l->slice->time, h.begin, h.end))
			t->host[t->n_hosts++] = h;
	}
	return true;
}

/* ---- all of it ---- */

/* Which chunks of a type are looked at, beyond the slice's ranges of their own rows. */
static bool skip_chunk(const struct load *l, const struct moe_mxt_head *h)
{
	const struct trace *t = l->t;

	switch (h->type) {
	case MOE_MXT_TASKS:
		return !chunk_wanted(l->slice, h);
	case MOE_MXT_ROUTING:
		return !chunk_wanted(l->slice, h);
	case MOE_MXT_DEPS: /* their times are those of submission */
		return l->slice && (!t->n_tasks || h->id[1] < t->task[0].id ||
				    h->id[0] > t->task[t->n_tasks - 1].id);
	default:
		return false;
	}
}

static bool read_type(struct load *l, uint32_t type, bool (*add)(struct load *l))
{
	for (size_t i = 0; i < l->r.n; i++) {
		const struct moe_mxt_head *h = &l->r.chunk[i].head;

		if (h->type != type || skip_chunk(l, h) || !load_chunk(l, i))
			continue;
		if (!add(l))
			return false;
	}
	return true;
}

static int by_time(const void *a, const void *b)
{
	const struct trace_routing *p = a, *q = b;

	if (p->time != q->time)
		return p->time < q->time ? -1 : 1;
	return p->task < q->task ? -1 : p->task > q->task;
}

static bool read_all(struct load *l)
{
	if (!read_type(l, MOE_MXT_TASKS, add_tasks) || !sort_tasks(l) || !read_header(l))
		return false;
	drop_unknown(l);
	if (!index_tasks(l) || !read_type(l, MOE_MXT_DEPS, add_deps))
		return false;
	free(l->index);
	l->index = NULL;
	if (!read_type(l, MOE_MXT_ROUTING, add_routing) ||
	    !read_type(l, MOE_MXT_MEMORY, add_memory) ||
	    !read_type(l, MOE_MXT_COUNTERS, add_counters) ||
	    !read_type(l, MOE_MXT_END, add_counters) || !read_type(l, MOE_MXT_MARKS, add_marks) ||
	    !read_type(l, MOE_MXT_HOST, add_host))
		return false;
	if (l->t->n_routing)
		qsort(l->t->routing, l->t->n_routing, sizeof *l->t->routing, by_time);
	return true;
}

int trace_read(struct trace *t, const char *path, const struct trace_slice *slice, char *error,
	       size_t size)
{
	struct load l = { .t = t, .slice = slice };
	char text[400] = "no memory for a trace of this size";
	bool good;

	memset(t, 0, sizeof *t);
	moe_mxt_table_init(&l.table, MOE_MXT_TASKS);
	if (!moe_mxt_open(&l.r, path)) {
		snprintf(error, size, "%s: %s", path, l.r.error);
		return -1;
	}
	t->ended = l.r.ended;
	t->lost_bytes = l.r.lost_bytes;
	good = read_all(&l);
	t->header = l.r.header;
	l.r.header = NULL;
	free(l.index);
	moe_mxt_table_free(&l.table);
	moe_mxt_close(&l.r);
	if (l.too_many)
		snprintf(text, sizeof text, "more than %u rows of a kind", MAX_ITEMS);
	if (good && trace_finish(t, text, sizeof text) == 0)
		return 0;
	trace_free(t);
	snprintf(error, size, "%s: %s", path, text);
	return -1;
}
