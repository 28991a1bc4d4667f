/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/rec.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int rec_fail(struct rec *r, const char *what)
{
	snprintf(r->error, r->size, "%s:%zu: %s", r->path, r->line, what);
	return -1;
}

int rec_grow(struct rec *r, void *list, size_t *cap, size_t n, size_t size)
{
	void *more;

	if (n <= *cap)
		return 0;
	*cap = n < 64 ? 64 : 2 * n;
	memcpy(&more, list, sizeof more);
	more = realloc(more, *cap * size);
	if (!more)
		return rec_fail(r, "out of memory");
	memcpy(list, &more, sizeof more);
	return 0;
}

static int kind_of(struct rec *r, const char *name, int32_t *kind)
{
	for (int i = 0; i < r->n_kinds; i++)
		if (!strcmp(r->kind[i], name)) {
			*kind = i;
			return 0;
		}
	if (r->n_kinds == TRACE_MAX_KINDS)
		return rec_fail(r, "too many names of tasks");
	if (rec_grow(r, &r->kind, &r->kind_cap, (size_t)r->n_kinds + 1, sizeof *r->kind))
		return -1;
	r->kind[r->n_kinds] = strdup(name);
	if (!r->kind[r->n_kinds])
		return rec_fail(r, "out of memory");
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
		return rec_fail(r, "no job id where one is needed");
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
			return rec_fail(r, "too many dependencies");
		if (rec_grow(r, &r->dep, &r->dep_cap, r->n_deps + 1, sizeof *r->dep) ||
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

	if (end == text || !(fabs(ms) * 1e6 < (double)TRACE_MAX_TIME))
		return rec_fail(r, "no time in ms where one is needed");
	*ns = llrint(ms * 1e6);
	return 0;
}

static int parse_flops(struct rec *r, const char *text, int64_t *flops)
{
	char *end;
	double billions = strtod(text, &end);

	if (end == text || !(billions >= 0 && billions <= 1e9))
		return rec_fail(r, "no GFlop of 0 to 1e9 where one is needed");
	*flops = llrint(billions * 1e9);
	return 0;
}

static int parse_small(struct rec *r, const char *text, int32_t most, int32_t *v)
{
	char *end;
	long n = strtol(text, &end, 10);

	if (end == text || n < -1 || n > most)
		return rec_fail(r, "no small number where one is needed");
	*v = (int32_t)n;
	return 0;
}

/* A "Key: value" of the record; keys that say nothing here are skipped. */
static int parse_field(struct rec *r, struct record *k, const char *key, const char *value)
{
	const char *end;

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
		return parse_small(r, value, TRACE_MAX_WORKERS - 1, &k->worker);
	if (!strcmp(key, "Iteration"))
		return parse_small(r, value, 1 << 20, &k->step);
	if (!strcmp(key, "SubmitTime"))
		return parse_time(r, value, &k->submit);
	if (!strcmp(key, "StartTime"))
		return parse_time(r, value, &k->start);
	if (!strcmp(key, "EndTime")) {
		k->timed = true;
		return parse_time(r, value, &k->stop);
	}
	if (!strcmp(key, "GFlop"))
		return parse_flops(r, value, &k->flops);
	return 0;
}

/* ---- the file ---- */

static int end_record(struct rec *r, struct record *k, bool *open)
{
	if (!*open)
		return 0;
	*open = false;
	if (k->job < 0)
		return rec_fail(r, "a record without JobId ends here");
	if (k->timed && k->stop < k->start)
		return rec_fail(r, "EndTime is before StartTime");
	if (r->n >= UINT32_MAX - 1)
		return rec_fail(r, "too many tasks");
	if (rec_grow(r, &r->record, &r->cap, r->n + 1, sizeof *r->record))
		return -1;
	r->record[r->n++] = *k;
	return 0;
}

int rec_read(struct rec *r, FILE *file)
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
			rc = rec_fail(r, "not a line 'Key: value'; is this a tasks.rec of StarPU?");
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
		rc = rec_fail(r, "no task in the file");
	free(line);
	return rc;
}
