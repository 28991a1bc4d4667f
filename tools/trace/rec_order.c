/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/rec.h"

#include <stdlib.h>
#include <string.h>

struct jobs {
	struct trace_key *by_job; /* value: index of the record */
	uint32_t *order;
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
	return low < r->n && j->by_job[low].key == job ? j->by_job[low].value : TRACE_NO_TASK;
}

/* Jobs become records' indices, those that are not there go. first[i + 1]: successors of record i. */
static void find_deps(struct rec *r, const struct jobs *j, uint32_t *first,
		      struct trace_import *result)
{
	for (size_t i = 0; i < r->n; i++) {
		struct record *k = r->record + i;
		uint32_t n = 0;

		for (uint32_t d = k->first_dep; d < k->first_dep + k->n_deps; d++) {
			uint32_t p = find_job(r, j, r->dep[d]);

			if (p == TRACE_NO_TASK) {
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
	return tail == r->n ? 0 : rec_fail(r, "dependencies form a cycle");
}

static int order_jobs(struct rec *r, struct jobs *j, struct trace_import *result)
{
	uint32_t *first = calloc(r->n + 1, sizeof *first), *waits = calloc(r->n, sizeof *waits);
	uint32_t *succ = malloc((r->n_deps + 1) * sizeof *succ), *by = malloc(r->n * sizeof *by);
	int rc = first && waits && succ && by ? 0 : rec_fail(r, "out of memory");

	if (rc == 0)
		find_deps(r, j, first, result);
	if (rc == 0 && !by_submission(r, j))
		rc = rec_fail(r, "out of memory");
	if (rc == 0 && !is_ordered(r, j, waits))
		rc = make_ordered(r, j, first, waits, succ, by);
	free(first);
	free(waits);
	free(succ);
	free(by);
	return rc;
}

int rec_order(struct rec *r, uint32_t *order, struct trace_import *result)
{
	struct jobs j = { malloc(r->n * sizeof *j.by_job), order };
	int rc = 0;

	for (size_t i = 0; j.by_job && i < r->n; i++)
		j.by_job[i] = (struct trace_key){ r->record[i].job, (uint32_t)i };
	if (!j.by_job || !trace_sort(j.by_job, r->n))
		rc = rec_fail(r, "out of memory");
	for (size_t i = 1; rc == 0 && i < r->n; i++)
		if (j.by_job[i].key == j.by_job[i - 1].key)
			rc = rec_fail(r, "two records have the same JobId");
	if (rc == 0)
		rc = order_jobs(r, &j, result);
	free(j.by_job);
	return rc;
}
