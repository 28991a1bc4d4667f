/* SPDX-License-Identifier: Apache-2.0 */
/* Writes records as a trace. What a task of StarPU's own waited for goes to the tasks that waited for it. */
#include "tools/trace/import_rec.h"
#include "engine/trace_write.h"
#include "tools/trace/rec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- contraction ---- */

struct lists {
	uint32_t **
		list; /* by record: what a contracted one waited for, as records that are written */
	uint32_t *n;
	uint32_t *found; /* predecessors of the record at hand */
	size_t n_found, cap;
};

static bool contracted(const struct record *k)
{
	return k->internal || !k->timed || k->worker < 0 || k->kind < 0;
}

static int by_id(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

/* Into l->found: each once, in ascending order of ids (which are small numbers here). */
static int resolve(struct rec *r, struct lists *l, uint32_t at)
{
	const struct record *k = r->record + at;
	size_t n = 0;

	l->n_found = 0;
	for (uint32_t d = k->first_dep; d < k->first_dep + k->n_deps; d++) {
		uint32_t p = (uint32_t)r->dep[d], one = (uint32_t)r->record[p].id;
		const uint32_t *from = one ? &one : l->list[p];
		size_t count = one ? 1 : l->n[p];

		if (rec_grow(r, &l->found, &l->cap, l->n_found + count + 1, sizeof *l->found))
			return -1;
		if (count)
			memcpy(l->found + l->n_found, from, count * sizeof *from);
		l->n_found += count;
	}
	if (l->n_found)
		qsort(l->found, l->n_found, sizeof *l->found, by_id);
	for (size_t i = 0; i < l->n_found; i++)
		if (!n || l->found[n - 1] != l->found[i])
			l->found[n++] = l->found[i];
	l->n_found = n;
	return 0;
}

static int keep_list(struct rec *r, struct lists *l, uint32_t at)
{
	if (!l->n_found)
		return 0;
	l->list[at] = malloc(l->n_found * sizeof *l->found);
	if (!l->list[at])
		return rec_fail(r, "out of memory");
	memcpy(l->list[at], l->found, l->n_found * sizeof *l->found);
	l->n[at] = (uint32_t)l->n_found;
	return 0;
}

/* ---- writing ---- */

static void add_task(struct moe_mxt_table *t, const struct record *k)
{
	moe_mxt_add(t, MOE_MXT_TASK_ID, k->id);
	moe_mxt_add(t, MOE_MXT_TASK_KIND, k->kind);
	moe_mxt_add(t, MOE_MXT_TASK_PHASE, MOE_MXT_PHASE_OTHER);
	moe_mxt_add(t, MOE_MXT_TASK_LAYER, -1);
	moe_mxt_add(t, MOE_MXT_TASK_GROUP, -1);
	moe_mxt_add(t, MOE_MXT_TASK_SLICE, -1);
	moe_mxt_add(t, MOE_MXT_TASK_PART, -1);
	moe_mxt_add(t, MOE_MXT_TASK_MICRO, 0);
	moe_mxt_add(t, MOE_MXT_TASK_STEP, k->step > 0 ? k->step : 0);
	moe_mxt_add(t, MOE_MXT_TASK_WORKER, k->worker);
	moe_mxt_add(t, MOE_MXT_TASK_SUBMIT, k->submit);
	moe_mxt_add(t, MOE_MXT_TASK_START, k->start);
	moe_mxt_add(t, MOE_MXT_TASK_STOP, k->stop);
	moe_mxt_add(t, MOE_MXT_TASK_FLOPS, k->flops);
	moe_mxt_row(t, k->start, k->stop, k->id, k->step > 0 ? k->step : 0, -1);
}

static void add_deps(struct moe_mxt_table *t, const struct record *k, const struct lists *l)
{
	moe_mxt_add(t, MOE_MXT_DEP_ID, k->id);
	moe_mxt_add(t, MOE_MXT_DEP_KIND, k->kind);
	moe_mxt_add(t, MOE_MXT_DEP_LAYER, -1);
	moe_mxt_add(t, MOE_MXT_DEP_MICRO, 0);
	moe_mxt_add(t, MOE_MXT_DEP_STEP, k->step > 0 ? k->step : 0);
	moe_mxt_add(t, MOE_MXT_DEP_SUBMIT, k->submit);
	moe_mxt_add(t, MOE_MXT_DEP_COUNT, (int64_t)l->n_found);
	for (size_t i = 0; i < l->n_found; i++)
		moe_mxt_add(t, MOE_MXT_DEP_BACK, k->id - l->found[i]);
	moe_mxt_row(t, k->submit, k->submit, k->id, k->step > 0 ? k->step : 0, -1);
}

static bool write_header(const struct rec *r, struct moe_mxt_writer *w)
{
	struct moe_mxt_text text = { 0 };
	int workers = 0;
	char key[40];
	bool done;

	for (size_t i = 0; i < r->n; i++)
		if (!contracted(r->record + i) && r->record[i].worker >= workers)
			workers = r->record[i].worker + 1;
	moe_mxt_put_text(&text, "imported", "StarPU tasks.rec");
	moe_mxt_put_text(&text, "config.file", r->path);
	moe_mxt_put_format(&text, "workers", "%d", workers);
	moe_mxt_put_format(&text, "kinds", "%d", r->n_kinds);
	for (int i = 0; i < r->n_kinds; i++) {
		snprintf(key, sizeof key, "kind.%d", i);
		moe_mxt_put_text(&text, key, r->kind[i]);
	}
	done = !text.failed && moe_mxt_write_header(w, text.text);
	free(text.text);
	return done;
}

static int write_records(struct rec *r, const uint32_t *order, struct lists *l,
			 struct moe_mxt_writer *w, struct trace_import *result)
{
	struct moe_mxt_table tasks, deps;
	int rc = 0;

	moe_mxt_table_init(&tasks, MOE_MXT_TASKS);
	moe_mxt_table_init(&deps, MOE_MXT_DEPS);
	for (size_t i = 0; rc == 0 && i < r->n; i++) {
		struct record *k = r->record + order[i];

		rc = resolve(r, l, order[i]);
		if (rc)
			break;
		if (contracted(k)) {
			result->contracted += k->internal;
			result->incomplete += !k->internal;
			rc = keep_list(r, l, order[i]);
			continue;
		}
		k->id = ++result->tasks;
		result->deps += (uint32_t)l->n_found;
		add_task(&tasks, k);
		add_deps(&deps, k, l);
		if (tasks.head.rows >= 8192 &&
		    (!moe_mxt_write(w, &tasks) || !moe_mxt_write(w, &deps)))
			break;
	}
	if (rc == 0 && moe_mxt_write(w, &tasks))
		moe_mxt_write(w, &deps);
	if (rc == 0 && (tasks.failed || deps.failed))
		rc = rec_fail(r, "out of memory");
	moe_mxt_table_free(&tasks);
	moe_mxt_table_free(&deps);
	return rc;
}

/* The end says that the trace is whole. */
static void write_end(struct moe_mxt_writer *w, const struct trace_import *result)
{
	struct moe_mxt_table end;

	moe_mxt_table_init(&end, MOE_MXT_END);
	moe_mxt_add_text(&end, MOE_MXT_COUNTER_NAMES, "executed");
	moe_mxt_add(&end, MOE_MXT_COUNTER_TIME, 0);
	moe_mxt_add(&end, MOE_MXT_COUNTER_NAME, 0);
	moe_mxt_add(&end, MOE_MXT_COUNTER_VALUE, result->tasks);
	moe_mxt_row(&end, 0, 0, MOE_MXT_NA, MOE_MXT_NA, -1);
	moe_mxt_write(w, &end);
	moe_mxt_table_free(&end);
}

static int write_trace(struct rec *r, const uint32_t *order, struct lists *l, const char *to,
		       struct trace_import *result)
{
	struct moe_mxt_writer w;
	int rc = 0;

	if (!moe_mxt_create(&w, to)) {
		snprintf(r->error, r->size, "%s", w.error);
		return -1;
	}
	if (write_header(r, &w))
		rc = write_records(r, order, l, &w, result);
	if (rc == 0)
		write_end(&w, result);
	if (!moe_mxt_finish(&w) && rc == 0) {
		snprintf(r->error, r->size, "%s", w.error[0] ? w.error : "out of memory");
		rc = -1;
	}
	if (rc)
		remove(to);
	return rc;
}

static int convert(struct rec *r, const char *to, struct trace_import *result)
{
	uint32_t *order = malloc(r->n * sizeof *order);
	struct lists l = { calloc(r->n, sizeof *l.list), calloc(r->n, sizeof *l.n), NULL, 0, 0 };
	int rc = order && l.list && l.n ? 0 : rec_fail(r, "out of memory");

	if (rc == 0)
		rc = rec_order(r, order, result);
	if (rc == 0)
		rc = write_trace(r, order, &l, to, result);
	for (size_t i = 0; l.list && i < r->n; i++)
		free(l.list[i]);
	free(l.list);
	free(l.n);
	free(l.found);
	free(order);
	return rc;
}

int trace_import_rec(const char *from, const char *to, struct trace_import *result, char *error,
		     size_t size)
{
	struct rec r = { .path = from, .error = error, .size = size };
	FILE *file = fopen(from, "r");
	int rc;

	*result = (struct trace_import){ 0 };
	if (!file) {
		snprintf(error, size, "%s: %s", from, strerror(errno));
		return -1;
	}
	rc = rec_read(&r, file);
	fclose(file);
	if (rc == 0)
		rc = convert(&r, to, result);
	for (int i = 0; i < r.n_kinds; i++)
		free(r.kind[i]);
	free(r.kind);
	free(r.record);
	free(r.dep);
	return rc;
}
