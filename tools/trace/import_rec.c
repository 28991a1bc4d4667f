/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/import_rec.h"
#include "engine/trace_write.h"
#include "tools/trace/trace.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_TASK UINT32_MAX

struct record {
	int64_t job, order; /* StarPU's ids */
	int64_t submit, start, stop, flops;
	int32_t kind, worker, step;
	uint32_t first_dep, n_deps; /* jobs, in rec.dep */
	bool internal, timed;
	int64_t id; /* in the result, 0: contracted */
};

struct rec {
	struct record *record;
	int64_t *dep;
	char **kind;
	size_t n, cap, n_deps, dep_cap;
	int n_kinds;
	size_t kind_cap;
	const char *path;
	size_t line;
	char *error;
	size_t size;
};

static int fail(struct rec *r, const char *what)
{
	snprintf(r->error, r->size, "%s:%zu: %s", r->path, r->line, what);
	return -1;
}

static int grow(struct rec *r, void *list, size_t *cap, size_t n, size_t size)
{
	void **p = list, *more;

	if (n <= *cap)
		return 0;
	*cap = n < 64 ? 64 : 2 * n;
	more = realloc(*p, *cap * size);
	if (!more)
		return fail(r, "out of memory");
	*p = more;
	return 0;
}

static int kind_of(struct rec *r, const char *name, int32_t *kind)
{
	for (int i = 0; i < r->n_kinds; i++)
		if (!strcmp(r->kind[i], name)) {
			*kind = i;
			return 0;
		}
	if (grow(r, &r->kind, &r->kind_cap, (size_t)r->n_kinds + 1, sizeof *r->kind))
		return -1;
	r->kind[r->n_kinds] = strdup(name);
	if (!r->kind[r->n_kinds])
		return fail(r, "out of memory");
	*kind = r->n_kinds++;
	return 0;
}

/* ---- values ---- */

/* Job ids may carry a rank before them ("0_17"). */
static int parse_job(struct rec *r, const char *text, const char **end, int64_t *job)
{
	char *stop;
	int64_t rank = 0;

	errno = 0;
	*job = strtoll(text, &stop, 10);
	if (stop != text && *stop == '_') {
		rank = *job;
		text = stop + 1;
		*job = strtoll(text, &stop, 10);
	}
	if (stop == text || errno || *job < 0 || *job >= (int64_t)1 << 40 || rank < 0 ||
	    rank > 65535)
		return fail(r, "no job id where one is needed");
	*job |= rank << 40;
	*end = stop;
	return 0;
}

static int parse_deps(struct rec *r, struct record *k, const char *text)
{
	k->first_dep = (uint32_t)r->n_deps;
	for (;;) {
		text += strspn(text, " \t");
		if (!*text)
			return 0;
		if (r->n_deps >= UINT32_MAX - 1)
			return fail(r, "too many dependencies");
		if (grow(r, &r->dep, &r->dep_cap, r->n_deps + 1, sizeof *r->dep) ||
		    parse_job(r, text, &text, &r->dep[r->n_deps]))
			return -1;
		r->n_deps++;
		k->n_deps++;
	}
}

/* Milliseconds into ns. */
static int parse_time(struct rec *r, const char *text, int64_t *ns)
{
	char *end;
	double ms = strtod(text, &end);

	if (end == text || !isfinite(ms) || fabs(ms) > 1e12)
		return fail(r, "no time in ms where one is needed");
	*ns = llrint(ms * 1e6);
	return 0;
}

static int parse_small(struct rec *r, const char *text, int32_t *v)
{
	char *end;
	long n = strtol(text, &end, 10);

	if (end == text || n < -1 || n > 1 << 20)
		return fail(r, "no small number where one is needed");
	*v = (int32_t)n;
	return 0;
}

/* A "Key: value" of the record; keys that say nothing here are skipped. */
static int parse_field(struct rec *r, struct record *k, const char *key, const char *value)
{
	const char *end;
	int64_t ns;

	if (!strcmp(key, "Name")) {
		k->internal = !strncmp(value, "_starpu_", 8);
		return kind_of(r, value, &k->kind);
	}
	if (!strcmp(key, "Model"))
		return k->kind < 0 ? kind_of(r, value, &k->kind) : 0;
	if (!strcmp(key, "JobId"))
		return parse_job(r, value, &end, &k->job);
	if (!strcmp(key, "SubmitOrder"))
		return parse_job(r, value, &end, &k->order);
	if (!strcmp(key, "DependsOn"))
		return parse_deps(r, k, value);
	if (!strcmp(key, "WorkerId"))
		return parse_small(r, value, &k->worker);
	if (!strcmp(key, "Iteration"))
		return parse_small(r, value, &k->step);
	if (!strcmp(key, "SubmitTime"))
		return parse_time(r, value, &k->submit);
	if (!strcmp(key, "StartTime"))
		return parse_time(r, value, &k->start);
	if (!strcmp(key, "EndTime")) {
		k->timed = true;
		return parse_time(r, value, &k->stop);
	}
	if (!strcmp(key, "GFlop")) {
		if (parse_time(r, value, &ns))
			return -1;
		k->flops = ns * 1000; /* 1e9 flops each where a time is 1e6 ns */
	}
	return 0;
}

/* ---- the file ---- */

static int end_record(struct rec *r, struct record *k, bool *open)
{
	if (!*open)
		return 0;
	*open = false;
	if (k->job < 0)
		return fail(r, "a record without JobId ends here");
	if (k->timed && k->stop < k->start)
		return fail(r, "EndTime is before StartTime");
	if (r->n >= UINT32_MAX - 1)
		return fail(r, "too many tasks");
	if (grow(r, &r->record, &r->cap, r->n + 1, sizeof *r->record))
		return -1;
	r->record[r->n++] = *k;
	return 0;
}

static int read_lines(struct rec *r, FILE *file)
{
	struct record k = { 0 };
	char *line = NULL;
	size_t cap = 0;
	bool open = false;
	ssize_t n;
	int rc = 0;

	while (rc == 0 && (n = getline(&line, &cap, file)) >= 0) {
		char *colon;

		r->line++;
		while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
			line[--n] = '\0';
		if (!n) {
			rc = end_record(r, &k, &open);
			continue;
		}
		if (line[0] == '%' || line[0] == '#')
			continue;
		colon = strchr(line, ':');
		if (!colon || strlen(line) != (size_t)n) {
			rc = fail(r, "not a line 'Key: value'; is this a tasks.rec of StarPU?");
			continue;
		}
		*colon++ = '\0';
		if (!open)
			k = (struct record){ .job = -1,
					     .order = MOE_MXT_NA,
					     .kind = -1,
					     .worker = -1,
					     .submit = MOE_MXT_NA,
					     .flops = MOE_MXT_NA };
		open = true;
		rc = parse_field(r, &k, line, colon + strspn(colon, " \t"));
	}
	if (rc == 0)
		rc = end_record(r, &k, &open);
	if (rc == 0 && !r->n)
		rc = fail(r, "no task in the file");
	free(line);
	return rc;
}

/* ---- dependencies ---- */

struct jobs {
	struct trace_key *by_job; /* value: index of the record */
	uint32_t *order;	  /* records so that predecessors come first */
};

static uint32_t find_job(const struct rec *r, const struct jobs *j, int64_t job)
{
	size_t low = 0, high = r->n;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (j->by_job[middle].key < job)
			low = middle + 1;
		else
			high = middle;
	}
	return low < r->n && j->by_job[low].key == job ? j->by_job[low].value : NO_TASK;
}

/* Jobs become records' indices, those that are not there go. first[i + 1]: successors of record i.
 */
static void find_deps(struct rec *r, const struct jobs *j, uint32_t *first,
		      struct trace_import *result)
{
	for (size_t i = 0; i < r->n; i++) {
		struct record *k = r->record + i;
		uint32_t n = 0;

		for (uint32_t d = k->first_dep; d < k->first_dep + k->n_deps; d++) {
			uint32_t p = find_job(r, j, r->dep[d]);

			if (p == NO_TASK) {
				result->unknown_deps++;
				continue;
			}
			r->dep[k->first_dep + n++] = p;
			first[p + 1]++;
		}
		k->n_deps = n;
	}
}

/* Records by submission, into j->order. */
static bool by_submission(struct rec *r, struct jobs *j)
{
	struct trace_key *key = malloc(r->n * sizeof *key);
	bool sorted;

	for (size_t i = 0; key && i < r->n; i++) {
		const struct record *k = r->record + i;

		key[i] = (struct trace_key){ k->order == MOE_MXT_NA ? k->job : k->order,
					     (uint32_t)i };
	}
	sorted = key && trace_sort(key, r->n);
	for (size_t i = 0; sorted && i < r->n; i++)
		j->order[i] = key[i].value;
	free(key);
	return sorted;
}

/* Whether all that a task waits for comes before it in j->order. */
static bool is_ordered(const struct rec *r, const struct jobs *j, uint32_t *done)
{
	bool ordered = true;

	memset(done, 0, r->n * sizeof *done);
	for (size_t i = 0; i < r->n; i++) {
		const struct record *k = r->record + j->order[i];

		for (uint32_t d = k->first_dep; d < k->first_dep + k->n_deps; d++)
			ordered &= done[r->dep[d]];
		done[j->order[i]] = 1;
	}
	return ordered;
}

/* Makes it so: takes tasks as their last predecessor is taken. -1: a cycle. */
static int make_ordered(struct rec *r, struct jobs *j, uint32_t *first, uint32_t *waits,
			uint32_t *succ, uint32_t *by)
{
	uint32_t head = 0, tail = 0;

	memcpy(by, j->order, r->n * sizeof *by);
	for (size_t i = 0; i < r->n; i++)
		first[i + 1] += first[i];
	for (size_t i = 0; i < r->n; i++) {
		waits[i] = r->record[i].n_deps;
		for (uint32_t d = 0; d < r->record[i].n_deps; d++)
			succ[first[r->dep[r->record[i].first_dep + d]]++] = (uint32_t)i;
	}
	for (size_t i = 0; i < r->n; i++)
		if (!waits[by[i]])
			j->order[tail++] = by[i];
	while (head < tail) {
		uint32_t at = j->order[head++];

		/* filling moved first[at] to the end of its list, which is where the next begins */
		for (uint32_t s = at ? first[at - 1] : 0; s < first[at]; s++)
			if (--waits[succ[s]] == 0)
				j->order[tail++] = succ[s];
	}
	return tail == r->n ? 0 : fail(r, "dependencies form a cycle");
}

/* Records in an order in which all that a task waits for comes before it: submission's where it can
 * be. */
static int order_records(struct rec *r, struct jobs *j, struct trace_import *result)
{
	uint32_t *first = calloc(r->n + 1, sizeof *first), *waits = calloc(r->n, sizeof *waits);
	uint32_t *succ = malloc((r->n_deps + 1) * sizeof *succ), *by = malloc(r->n * sizeof *by);
	int rc = first && waits && succ && by ? 0 : fail(r, "out of memory");

	if (rc == 0)
		find_deps(r, j, first, result);
	if (rc == 0 && !by_submission(r, j))
		rc = fail(r, "out of memory");
	if (rc == 0 && !is_ordered(r, j, waits))
		rc = make_ordered(r, j, first, waits, succ, by);
	free(first);
	free(waits);
	free(succ);
	free(by);
	return rc;
}

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

		if (grow(r, &l->found, &l->cap, l->n_found + count + 1, sizeof *l->found))
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
		return fail(r, "out of memory");
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

static int write_records(struct rec *r, const struct jobs *j, struct lists *l,
			 struct moe_mxt_writer *w, struct trace_import *result)
{
	struct moe_mxt_table tasks, deps;
	int rc = 0;

	moe_mxt_table_init(&tasks, MOE_MXT_TASKS);
	moe_mxt_table_init(&deps, MOE_MXT_DEPS);
	for (size_t i = 0; rc == 0 && i < r->n; i++) {
		struct record *k = r->record + j->order[i];

		rc = resolve(r, l, j->order[i]);
		if (rc)
			break;
		if (contracted(k)) {
			result->contracted += k->internal;
			result->incomplete += !k->internal;
			rc = keep_list(r, l, j->order[i]);
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
		rc = fail(r, "out of memory");
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

static int write_trace(struct rec *r, const struct jobs *j, struct lists *l, const char *to,
		       struct trace_import *result)
{
	struct moe_mxt_writer w;
	int rc = 0;

	if (!moe_mxt_create(&w, to)) {
		snprintf(r->error, r->size, "%s", w.error);
		return -1;
	}
	if (write_header(r, &w))
		rc = write_records(r, j, l, &w, result);
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
	struct jobs j = { malloc(r->n * sizeof *j.by_job), malloc(r->n * sizeof *j.order) };
	struct lists l = { calloc(r->n, sizeof *l.list), calloc(r->n, sizeof *l.n), NULL, 0, 0 };
	int rc = j.by_job && j.order && l.list && l.n ? 0 : fail(r, "out of memory");

	for (size_t i = 0; rc == 0 && i < r->n; i++)
		j.by_job[i] = (struct trace_key){ r->record[i].job, (uint32_t)i };
	if (rc == 0 && !trace_sort(j.by_job, r->n))
		rc = fail(r, "out of memory");
	for (size_t i = 1; rc == 0 && i < r->n; i++)
		if (j.by_job[i].key == j.by_job[i - 1].key)
			rc = fail(r, "two records have the same JobId");
	if (rc == 0)
		rc = order_records(r, &j, result);
	if (rc == 0)
		rc = write_trace(r, &j, &l, to, result);
	for (size_t i = 0; l.list && i < r->n; i++)
		free(l.list[i]);
	free(l.list);
	free(l.n);
	free(l.found);
	free(j.by_job);
	free(j.order);
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
	rc = read_lines(&r, file);
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
