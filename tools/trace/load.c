/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trace file into memory. Tasks first, then dependencies between those that were kept. Whatever a
 * file claims, what leaves here keeps to trace.h: rows that cannot be are left out and counted.
 */
#include "tools/trace/load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void load_bad(struct load *l, const char *what, int64_t which)
{
	if (!l->t->bad_rows++)
		snprintf(l->t->bad_row, sizeof l->t->bad_row, "%s (%lld)", what, (long long)which);
}

bool load_grow(struct load *l, void *array, size_t *cap, size_t n, size_t size)
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

/* ---- tasks ---- */

static void take_task(struct load *l, size_t row, struct trace_task *k)
{
	memset(k, 0, sizeof *k);
	k->id = load_at(l, MOE_MXT_TASK_ID, row);
	k->submit = load_at(l, MOE_MXT_TASK_SUBMIT, row);
	k->ready = load_at(l, MOE_MXT_TASK_READY, row);
	k->pop = load_at(l, MOE_MXT_TASK_POP, row);
	k->start = load_at(l, MOE_MXT_TASK_START, row);
	k->stop = load_at(l, MOE_MXT_TASK_STOP, row);
	k->cpu = load_at(l, MOE_MXT_TASK_CPU, row);
	k->rows = load_at(l, MOE_MXT_TASK_ROWS, row);
	k->flops = load_at(l, MOE_MXT_TASK_FLOPS, row);
	k->read = load_at(l, MOE_MXT_TASK_READ, row);
	k->written = load_at(l, MOE_MXT_TASK_WRITTEN, row);
	k->local = load_at(l, MOE_MXT_TASK_LOCAL, row);
	k->remote = load_at(l, MOE_MXT_TASK_REMOTE, row);
	k->cycles = load_at(l, MOE_MXT_TASK_CYCLES, row);
	k->instructions = load_at(l, MOE_MXT_TASK_INSTRUCTIONS, row);
	k->llc_misses = load_at(l, MOE_MXT_TASK_LLC_MISSES, row);
	k->kind = load_small(load_at(l, MOE_MXT_TASK_KIND, row), -1);
	k->layer = load_small(load_at(l, MOE_MXT_TASK_LAYER, row), -1);
	k->group = load_small(load_at(l, MOE_MXT_TASK_GROUP, row), -1);
	k->slice = load_small(load_at(l, MOE_MXT_TASK_SLICE, row), -1);
	k->part = load_small(load_at(l, MOE_MXT_TASK_PART, row), -1);
	k->micro = load_small(load_at(l, MOE_MXT_TASK_MICRO, row), 0);
	k->worker = load_small(load_at(l, MOE_MXT_TASK_WORKER, row), -1);
	k->core = load_small(load_at(l, MOE_MXT_TASK_CORE, row), -1);
	k->step = load_small(load_at(l, MOE_MXT_TASK_STEP, row), 0);
	k->phase = (uint8_t)load_small(load_at(l, MOE_MXT_TASK_PHASE, row), 0);
}

static const char *wrong_task(const struct trace_task *k)
{
	if (k->id < 1)
		return "a task without an id";
	if (k->start == MOE_MXT_NA || k->stop == MOE_MXT_NA || k->stop < k->start)
		return "a task that does not start before it stops";
	if (!load_is_time(k->start) || !load_is_time(k->stop) || !load_is_time(k->submit) ||
	    !load_is_time(k->ready) || !load_is_time(k->pop))
		return "a task with an impossible time";
	if (k->kind < 0 || k->kind >= TRACE_MAX_KINDS)
		return "a task of unknown kind";
	if (k->worker < 0 || k->worker >= TRACE_MAX_WORKERS)
		return "a task of unknown worker";
	if (k->layer < -1 || k->layer >= MAX_LAYER || k->step < 0 || k->step > MAX_STEP)
		return "a task of impossible layer or step";
	return NULL;
}

static bool wanted(const struct trace_slice *s, const struct trace_task *k)
{
	return !s || (load_inside(s->steps, s->step, k->step, k->step) &&
		      load_inside(s->layers, s->layer, k->layer, k->layer) &&
		      load_inside(s->times, s->time, k->start, k->stop));
}

static bool chunk_wanted(const struct trace_slice *s, const struct moe_mxt_head *h)
{
	return !s || (load_inside(s->steps, s->step, h->step[0], h->step[1]) &&
		      load_inside(s->layers, s->layer, h->layer[0], h->layer[1]) &&
		      load_inside(s->times, s->time, h->time[0], h->time[1]));
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
		wrong = row && k.id == load_at(l, MOE_MXT_TASK_ID, row - 1)
				? "a task that is there twice"
				: wrong_task(&k);
		if (wrong) {
			load_bad(l, wrong, k.id);
			continue;
		}
		if (!wanted(l->slice, &k))
			continue;
		if (t->n_tasks == UINT32_MAX - 1 ||
		    !load_grow(l, &t->task, &l->task_cap, (size_t)t->n_tasks + 1, sizeof *t->task))
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
			load_bad(l, "a task that is there twice", key[i].key);
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
			load_bad(l, "a task of unknown kind", k->id);
		else if (k->worker >= t->n_workers)
			load_bad(l, "a task of unknown worker", k->id);
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
	l->waiter = calloc(t->n_tasks, sizeof *l->waiter);
	if (!l->waiter)
		return false;
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

	if (!t->n_tasks || id < l->low_id || (uint64_t)(id - l->low_id) >= l->ids)
		return TRACE_NO_TASK;
	if (l->index)
		return l->index[id - l->low_id];
	return trace_find(t, id);
}

static bool add_row_of_deps(struct load *l, uint32_t task, int64_t id, size_t list, int64_t n)
{
	struct trace *t = l->t;
	struct trace_task *k = &t->task[task];

	if (k->n_pred) {
		load_bad(l, "dependencies that are there twice", id);
		return true;
	}
	if ((uint64_t)t->n_preds + (uint64_t)n > UINT32_MAX - 1)
		return false;
	if (!load_grow(l, &t->pred, &l->pred_cap, (size_t)t->n_preds + (size_t)n, sizeof *t->pred))
		return false;
	k->first_pred = t->n_preds;
	for (int64_t i = 0; i < n; i++) {
		int64_t back = l->table.column[MOE_MXT_DEP_BACK].value[list + (size_t)i];
		uint32_t pred;

		if (back < 1 || back >= id) {
			load_bad(l, "a dependency on no earlier task", id);
			continue;
		}
		pred = find_task(l, id - back);
		if (pred == TRACE_NO_TASK)
			continue;
		if (l->waiter[pred] == task + 1) {
			load_bad(l, "a dependency that is there twice", id);
			continue;
		}
		l->waiter[pred] = task + 1;
		t->pred[t->n_preds++] = pred;
	}
	k->n_pred = t->n_preds - k->first_pred;
	return true;
}

/* Whether a task that did not run belongs to the slice, as far as its row says. */
static bool row_wanted(const struct load *l, size_t row)
{
	const struct trace_slice *s = l->slice;
	int64_t step = load_at(l, MOE_MXT_DEP_STEP, row),
		layer = load_at(l, MOE_MXT_DEP_LAYER, row);

	return !s || (!s->times && load_inside(s->steps, s->step, step, step) &&
		      load_inside(s->layers, s->layer, layer, layer));
}

static bool add_deps(struct load *l)
{
	size_t list = 0;

	for (size_t row = 0; row < l->table.head.rows; row++) {
		int64_t id = load_at(l, MOE_MXT_DEP_ID, row);
		int64_t n = l->table.column[MOE_MXT_DEP_COUNT].n
				    ? load_at(l, MOE_MXT_DEP_COUNT, row)
				    : 0;
		uint32_t task = find_task(l, id);

		if (task == TRACE_NO_TASK)
			l->t->not_run += row_wanted(l, row);
		else if (!add_row_of_deps(l, task, id, list, n))
			return false;
		list += (size_t)n;
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
	if (!read_type(l, MOE_MXT_TASKS, add_tasks) || !sort_tasks(l) || !load_header(l))
		return false;
	drop_unknown(l);
	if (!index_tasks(l) || !read_type(l, MOE_MXT_DEPS, add_deps))
		return false;
	free(l->index), free(l->waiter);
	l->index = l->waiter = NULL;
	if (!read_type(l, MOE_MXT_ROUTING, load_routing) ||
	    !read_type(l, MOE_MXT_MEMORY, load_memory) ||
	    !read_type(l, MOE_MXT_COUNTERS, load_counters) ||
	    !read_type(l, MOE_MXT_END, load_counters) || !read_type(l, MOE_MXT_MARKS, load_marks) ||
	    !read_type(l, MOE_MXT_HOST, load_host))
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
	free(l.index), free(l.waiter);
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
