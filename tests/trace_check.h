/* SPDX-License-Identifier: Apache-2.0 */
/* A trace file as whole tables, and what must hold in the trace of any graph. */
#ifndef MOE_TESTS_TRACE_CHECK_H
#define MOE_TESTS_TRACE_CHECK_H

#include "engine/trace_read.h"
#include "tests/trace_bytes.h"

static inline struct moe_trace_params trace_params(const char *file)
{
	return (struct moe_trace_params){ .struct_size = sizeof(struct moe_trace_params),
					  .file = file };
}

static inline struct moe_trace_info trace_stop(struct moe_engine *e)
{
	struct moe_trace_info info = { .struct_size = sizeof info };

	CHECK_OK(moe_trace_stop(e, &info));
	CHECK(!info.error[0] && info.bytes > 0);
	return info;
}

static inline void trace_start(struct moe_engine *e, const char *file, size_t ring_bytes)
{
	struct moe_trace_params p = trace_params(file);

	p.ring_bytes = ring_bytes;
	CHECK_OK(moe_trace_start(e, &p));
}

struct trace {
	struct moe_mxt_reader reader;
	struct moe_mxt_table all[MOE_MXT_CHUNK_TYPES]; /* rows of all chunks in file order */
};

/* All chunks of a type appended; NAMES are only right where there is one chunk. */
static inline bool trace_open(struct trace *t, const char *path)
{
	struct moe_mxt_table one;

	memset(t, 0, sizeof *t);
	if (!CHECK(moe_mxt_open(&t->reader, path)))
		return false;
	for (int i = 0; i < MOE_MXT_CHUNK_TYPES; i++)
		moe_mxt_table_init(&t->all[i], (enum moe_mxt_chunk)i);
	moe_mxt_table_init(&one, MOE_MXT_TASKS);
	for (size_t i = 0; i < t->reader.n; i++) {
		struct moe_mxt_table *to = &t->all[t->reader.chunk[i].head.type];

		if (!check_at(moe_mxt_load(&t->reader, i, &one), t->reader.error, __FILE__,
			      __LINE__))
			return false;
		for (int c = 1; c < MOE_MXT_MAX_COLUMNS; c++)
			for (size_t k = 0; k < one.column[c].n; k++)
				moe_mxt_add(to, c, one.column[c].value[k]);
		to->head.rows += one.head.rows;
	}
	moe_mxt_table_free(&one);
	return true;
}

static inline void trace_close(struct trace *t)
{
	for (int i = 0; i < MOE_MXT_CHUNK_TYPES; i++)
		moe_mxt_table_free(&t->all[i]);
	moe_mxt_close(&t->reader);
}

static inline int64_t trace_at(const struct trace *t, enum moe_mxt_chunk type, int column,
			       size_t row)
{
	return moe_mxt_at(&t->all[type], column, row);
}

static inline size_t trace_rows(const struct trace *t, enum moe_mxt_chunk type)
{
	return t->all[type].head.rows;
}

/* Index of a text in a column of them; -1: not there. */
static inline int64_t trace_name(const struct moe_mxt_table *t, int column, const char *name)
{
	const struct moe_mxt_column *c = &t->column[column];
	char text[200] = "";
	size_t n = 0;
	int64_t index = 0;

	for (size_t i = 0; i < c->n; i++) {
		if (n < sizeof text)
			text[n++] = (char)c->value[i];
		if (c->value[i])
			continue;
		if (!strcmp(text, name))
			return index;
		index++;
		n = 0;
	}
	return -1;
}

/* The last value of a counter at the end of the trace; -1: not there. */
static inline int64_t trace_counter(const struct trace *t, const char *name)
{
	const struct moe_mxt_table *end = &t->all[MOE_MXT_END];
	int64_t index = trace_name(end, MOE_MXT_COUNTER_NAMES, name), value = -1;

	for (size_t i = 0; i < end->head.rows; i++)
		if (moe_mxt_at(end, MOE_MXT_COUNTER_NAME, i) == index)
			value = moe_mxt_at(end, MOE_MXT_COUNTER_VALUE, i);
	return value;
}

/*
 * Rows by task: every submitted task ran, is there once, after all that it waits for, and no two
 * overlap on a worker. Returns [n + 1] rows of TASKS by id - first (free it), NULL after a failed
 * check.
 */
static inline int64_t *trace_check(const struct trace *t, int64_t *first)
{
	const struct moe_mxt_table *tasks = &t->all[MOE_MXT_TASKS], *deps = &t->all[MOE_MXT_DEPS];
	size_t n = deps->head.rows, at = 0;
	int64_t *row = malloc((n + 1) * sizeof *row), wrong = 0, last_end[1024] = { 0 };

	*first = moe_mxt_at(deps, MOE_MXT_DEP_ID, 0);
	for (size_t i = 0; i < n; i++)
		row[i] = -1;
	CHECK(tasks->head.rows == n);
	for (size_t i = 0; i < tasks->head.rows; i++) {
		int64_t task = moe_mxt_at(tasks, MOE_MXT_TASK_ID, i) - *first;
		int64_t worker = moe_mxt_at(tasks, MOE_MXT_TASK_WORKER, i);
		int64_t submit = moe_mxt_at(tasks, MOE_MXT_TASK_SUBMIT, i);
		int64_t ready = moe_mxt_at(tasks, MOE_MXT_TASK_READY, i);
		int64_t pop = moe_mxt_at(tasks, MOE_MXT_TASK_POP, i);
		int64_t start = moe_mxt_at(tasks, MOE_MXT_TASK_START, i);
		int64_t stop = moe_mxt_at(tasks, MOE_MXT_TASK_STOP, i);

		if (!CHECK(task >= 0 && task < (int64_t)n && row[task] == -1))
			break;
		row[task] = (int64_t)i;
		wrong += submit < 0 || ready < submit || pop < ready || start < pop || stop < start;
		wrong += worker < 0 || worker >= 1024 || last_end[worker] > start;
		last_end[worker] = stop;
	}
	CHECK(wrong == 0);
	for (size_t i = 0; i < n; i++) {
		int64_t id = moe_mxt_at(deps, MOE_MXT_DEP_ID, i), last = INT64_MAX;

		wrong += id != *first + (int64_t)i || row[i] < 0;
		for (int64_t k = 0; k < moe_mxt_at(deps, MOE_MXT_DEP_COUNT, i); k++, at++) {
			int64_t back = moe_mxt_at(deps, MOE_MXT_DEP_BACK, at);
			int64_t dep = id - back - *first;

			wrong += back < 1 || back >= last || dep < 0;
			last = back;
			if (!wrong)
				wrong += moe_mxt_at(tasks, MOE_MXT_TASK_STOP, (size_t)row[dep]) >
					 moe_mxt_at(tasks, MOE_MXT_TASK_READY, (size_t)row[i]);
		}
	}
	if (CHECK(wrong == 0))
		return row;
	free(row);
	return NULL;
}

#endif
