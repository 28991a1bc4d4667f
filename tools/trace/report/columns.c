/* SPDX-License-Identifier: Apache-2.0 */
/* Tasks as packed columns. About 25 bytes a task before base64. */
#include "engine/trace_table.h"
#include "tools/trace/exporter.h"
#include "tools/trace/output.h"
#include "tools/trace/report/report.h"

#include <stdlib.h>

/* Of tasks. What is not known is -1: all of these are 0 or more. base.js has the same list. */
enum column {
	TASK_INDEX = 1, /* difference to the row before */
	TASK_GAP,	/* ns from the stop of the row before (of the same worker) to the start */
	TASK_DURATION,	/* ns */
	TASK_WAITED,	/* ns from ready to start */
	TASK_CPU,	/* ns */
	TASK_KIND,
	TASK_PHASE,
	TASK_LAYER,
	TASK_GROUP,
	TASK_SLICE,
	TASK_PART,
	TASK_MICRO,
	TASK_STEP,
	TASK_ROWS,
	TASK_FLOPS,
	TASK_BYTES, /* read and written */
	TASK_ID,    /* minus the index: often the same for all */
	TASK_PREDS, /* how many dependencies, needed or not */
};
/* Of needed dependencies, by task index. */
enum { DEP_COUNT = 1, DEP_BACK /* index minus the predecessor's */ };

static int64_t known(int64_t v)
{
	return v == MOE_MXT_NA || v < 0 ? -1 : v;
}

static int put_table(struct moe_mxt_table *t, const char *class, uint32_t rows, FILE *out)
{
	size_t n = 0;
	uint8_t *payload = moe_mxt_pack(t, &n);

	if (!payload)
		return -1;
	fprintf(out, "<script type=\"text/plain\" class=\"%s\" data-rows=\"%u\">", class, rows);
	trace_output_base64(out, payload, n);
	fputs("</script>\n", out);
	free(payload);
	moe_mxt_table_clear(t);
	return 0;
}

static void add_task(struct moe_mxt_table *table, const struct trace *t, uint32_t task)
{
	const struct trace_task *k = t->task + task;

	moe_mxt_add(table, TASK_DURATION, k->stop - k->start);
	moe_mxt_add(table, TASK_WAITED, k->ready == MOE_MXT_NA ? -1 : known(k->start - k->ready));
	moe_mxt_add(table, TASK_CPU, known(k->cpu));
	moe_mxt_add(table, TASK_KIND, k->kind);
	moe_mxt_add(table, TASK_PHASE, k->phase < MOE_MXT_PHASES ? k->phase : MOE_MXT_PHASE_OTHER);
	moe_mxt_add(table, TASK_LAYER, known(k->layer));
	moe_mxt_add(table, TASK_GROUP, known(k->group));
	moe_mxt_add(table, TASK_SLICE, known(k->slice));
	moe_mxt_add(table, TASK_PART, known(k->part));
	moe_mxt_add(table, TASK_MICRO, known(k->micro));
	moe_mxt_add(table, TASK_STEP, known(k->step));
	moe_mxt_add(table, TASK_ROWS, known(k->rows));
	moe_mxt_add(table, TASK_FLOPS, known(k->flops));
	moe_mxt_add(table, TASK_BYTES,
		    k->read == MOE_MXT_NA || k->written == MOE_MXT_NA
			    ? -1
			    : known(k->read + k->written));
	moe_mxt_add(table, TASK_ID, k->id - (int64_t)task);
	moe_mxt_add(table, TASK_PREDS, k->n_pred);
}

static int put_tasks(const struct trace *t, FILE *out)
{
	struct moe_mxt_table table;
	uint32_t rows = 0, before = 0;
	int rc = 0;

	moe_mxt_table_init(&table, MOE_MXT_TASKS);
	for (int w = 0; rc == 0 && w < t->n_workers; w++) {
		int64_t stop = t->first;

		for (uint32_t i = t->worker_first[w]; rc == 0 && i < t->worker_first[w + 1]; i++) {
			uint32_t task = t->by_worker[i];

			moe_mxt_add(&table, TASK_INDEX, (int64_t)task - before);
			moe_mxt_add(&table, TASK_GAP, t->task[task].start - stop);
			add_task(&table, t, task);
			stop = t->task[task].stop;
			before = task;
			if (++rows == REPORT_TABLE_ROWS) {
				rc = put_table(&table, "tasks", rows, out);
				rows = 0;
			}
		}
	}
	if (rc == 0 && rows)
		rc = put_table(&table, "tasks", rows, out);
	moe_mxt_table_free(&table);
	return rc;
}

static int put_deps(const struct trace *t, const uint8_t *needed, FILE *out)
{
	struct moe_mxt_table table;
	uint32_t rows = 0;
	int rc = 0;

	moe_mxt_table_init(&table, MOE_MXT_DEPS);
	for (uint32_t i = 0; rc == 0 && i < t->n_tasks; i++) {
		const struct trace_task *k = t->task + i;
		int64_t n = 0;

		for (uint32_t e = k->first_pred; e < k->first_pred + k->n_pred; e++) {
			if (!needed[e])
				continue;
			moe_mxt_add(&table, DEP_BACK, (int64_t)i - t->pred[e]);
			n++;
		}
		moe_mxt_add(&table, DEP_COUNT, n);
		if (++rows == REPORT_TABLE_ROWS) {
			rc = put_table(&table, "deps", rows, out);
			rows = 0;
		}
	}
	if (rc == 0 && rows)
		rc = put_table(&table, "deps", rows, out);
	moe_mxt_table_free(&table);
	return rc;
}

int report_columns(const struct trace *t, FILE *out)
{
	uint8_t *needed = trace_reduce(t);
	int rc = needed ? put_tasks(t, out) : -1;

	if (rc == 0)
		rc = put_deps(t, needed, out);
	free(needed);
	return rc;
}
