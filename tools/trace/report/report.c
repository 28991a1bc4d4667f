/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/output.h"
#include "tools/trace/report/report.h"

#include <stdlib.h>
#include <string.h>

/* Generated: page.html, style.css, then the scripts by name. */
struct asset {
	const char *name;
	const unsigned char *data;
	size_t size;
};
extern const struct asset report_assets[];

#define MOST_VIEWS 5

struct choice {
	int first, last; /* steps, 0: the steady ones */
	char name[80];
};

static int64_t step_time(const struct trace *t, int i)
{
	int64_t begin, end;

	trace_step_time(t, i, &begin, &end);
	return end - begin;
}

static void choose(struct choice *c, int *n, const struct trace *t, int i, const char *what)
{
	int step = t->step[i].step;

	for (int k = 0; k < *n; k++)
		if (c[k].first == step)
			return;
	c[*n].first = c[*n].last = step;
	snprintf(c[*n].name, sizeof c[*n].name, "step %d (%s)", step, what);
	++*n;
}

/* Median, slowest and fastest of the steady steps, all of them, and the first of the trace. */
static int choose_views(const struct trace *t, struct choice *c)
{
	int steady = trace_steady(t), slow = steady, fast = steady, count, n = 0;
	struct trace_key *key;

	if (steady < 0) {
		c[0] = (struct choice){ 0, 0, "the whole trace" };
		return 1;
	}
	count = t->n_steps - steady;
	key = malloc((size_t)count * sizeof *key);
	if (!key)
		return -1;
	for (int i = 0; i < count; i++) {
		key[i] = (struct trace_key){ step_time(t, steady + i), (uint32_t)(steady + i) };
		slow = step_time(t, steady + i) > step_time(t, slow) ? steady + i : slow;
		fast = step_time(t, steady + i) < step_time(t, fast) ? steady + i : fast;
	}
	if (!trace_sort(key, (size_t)count)) {
		free(key);
		return -1;
	}
	choose(c, &n, t, (int)key[(count - 1) / 2].value, "the median step");
	free(key);
	if (count > 1) {
		c[n] = (struct choice){ 0, 0, "" };
		snprintf(c[n].name, sizeof c[n].name, "all %d steady steps", count);
		n++;
	}
	choose(c, &n, t, slow, "the slowest");
	choose(c, &n, t, fast, "the fastest");
	choose(c, &n, t, 0, "the first");
	return n;
}

static int put_views(const struct trace *t, struct trace_json *j, char *error, size_t size)
{
	struct choice c[MOST_VIEWS];
	int n = choose_views(t, c), rc = 0;

	if (n < 0) {
		snprintf(error, size, "out of memory");
		return -1;
	}
	trace_json_array(j, "views");
	for (int i = 0; rc == 0 && i < n; i++) {
		struct trace_view v;

		if (trace_view_open(t, c[i].first, c[i].last, &v, error, size))
			return -1;
		rc = trace_view_replay(&v) || report_view(&v, c[i].name, j) ? -1 : 0;
		if (rc)
			snprintf(error, size, "out of memory");
		trace_view_close(&v);
	}
	trace_json_end(j, ']');
	return rc;
}

static void put_scripts(FILE *out)
{
	for (const struct asset *a = report_assets; a->name; a++) {
		size_t n = strlen(a->name);

		if (n > 3 && !strcmp(a->name + n - 3, ".js"))
			fwrite(a->data, 1, a->size, out);
	}
}

/* What a mark in page.html, a line of its own, stands for. */
static int put_mark(const struct trace *t, const char *mark, const char *name, FILE *out,
		    char *error, size_t size)
{
	struct trace_json j = { .out = out };
	int rc = 0;

	if (!strcmp(mark, "@style@")) {
		for (const struct asset *a = report_assets; a->name; a++)
			if (!strcmp(a->name, "style.css"))
				fwrite(a->data, 1, a->size, out);
	} else if (!strcmp(mark, "@script@")) {
		put_scripts(out);
	} else if (!strcmp(mark, "@columns@")) {
		rc = report_columns(t, out);
		if (rc)
			snprintf(error, size, "out of memory");
	} else {
		trace_json_object(&j, NULL);
		rc = report_facts(t, name, &j);
		if (rc)
			snprintf(error, size, "out of memory");
		else
			rc = put_views(t, &j, error, size);
		trace_json_end(&j, '}');
	}
	return rc;
}

static int put_page(const struct trace *t, const char *name, FILE *out, char *error, size_t size)
{
	const char *at = (const char *)report_assets[0].data;
	const char *end = at + report_assets[0].size;
	int rc = 0;

	while (rc == 0 && at < end) {
		const char *stop = memchr(at, '\n', (size_t)(end - at));
		size_t n = stop ? (size_t)(stop - at) : (size_t)(end - at);
		char mark[16];

		if (n > 2 && n < sizeof mark && at[0] == '@' && at[n - 1] == '@') {
			memcpy(mark, at, n);
			mark[n] = '\0';
			rc = put_mark(t, mark, name, out, error, size);
		} else {
			fwrite(at, 1, n, out);
		}
		putc('\n', out);
		at += n + 1;
	}
	return rc;
}

int trace_report(const struct trace *t, const char *name, const char *path, char *error,
		 size_t size)
{
	struct trace_output o;
	int rc;

	if (trace_output_open(&o, path, error, size))
		return -1;
	rc = put_page(t, name, o.file, error, size);
	if (trace_output_close(&o, rc == 0, error, size))
		rc = -1;
	return rc;
}
