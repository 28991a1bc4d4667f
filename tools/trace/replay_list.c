/* SPDX-License-Identifier: Apache-2.0 */
/* A machine of equal workers, the list scheduler, and changes of durations. */
#include "tools/trace/replay.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the recorded machine ---- */

static bool may_run_recorded(const struct replay *r, uint32_t task, int worker, const void *user)
{
	(void)user;
	return trace_may_run(r->trace, r->task[task], worker);
}

/* Another number of workers: part p has those that are p modulo min(parts, workers), as the engine
 * deals them. user: the machine's workers, in a pointer. */
static bool may_run_dealt(const struct replay *r, uint32_t task, int worker, const void *user)
{
	int workers = (int)(intptr_t)user, parts = r->trace->n_parts;
	int part = r->trace->task[r->task[task]].part, classes = parts < workers ? parts : workers;

	return part < 0 || classes < 1 || worker % classes == part % classes;
}

struct replay_machine replay_machine_of(const struct replay *r, int workers)
{
	bool same = workers <= 0 || workers == r->trace->n_workers;
	struct replay_machine m = { .workers = same ? r->trace->n_workers : workers };

	if (r->trace->strict)
		m.may_run = same ? may_run_recorded : may_run_dealt;
	m.user = (const void *)(intptr_t)m.workers;
	return m;
}

/* ---- the list: a set of ranks per part, smallest first ---- */

#define LEVELS 6 /* 64^6 tasks */

struct ranks {
	uint64_t
		*word[LEVELS]; /* [0]: a bit per rank; [i + 1]: a bit per word of i that is not 0 */
};

struct list {
	const struct replay *r;
	const struct replay_machine *m;
	struct ranks *set; /* [classes] one per part, the last for tasks of no part */
	int classes;
	uint32_t *ready; /* [classes] tasks in the set */
	bool *may;	 /* [classes * workers] whether a worker may run a class */
	uint32_t *task;	 /* by rank */
};

static bool open_ranks(struct ranks *s, uint32_t n)
{
	size_t words = n;

	for (int i = 0; i < LEVELS; i++) {
		words = words / 64 + 1;
		s->word[i] = calloc(words, sizeof **s->word);
		if (!s->word[i])
			return false;
	}
	return true;
}

static void insert(struct ranks *s, uint32_t rank)
{
	for (int i = 0; i < LEVELS; i++, rank /= 64)
		s->word[i][rank / 64] |= 1ull << rank % 64;
}

static void erase(struct ranks *s, uint32_t rank)
{
	for (int i = 0; i < LEVELS; i++, rank /= 64) {
		s->word[i][rank / 64] &= ~(1ull << rank % 64);
		if (s->word[i][rank / 64])
			return;
	}
}

/* TRACE_NO_TASK: empty. */
static uint32_t smallest(const struct ranks *s)
{
	uint32_t at = 0;

	for (int i = LEVELS - 1; i >= 0; i--) {
		if (!s->word[i][at])
			return TRACE_NO_TASK;
		at = at * 64 + (uint32_t)__builtin_ctzll(s->word[i][at]);
	}
	return at;
}

static int class_of(const struct list *l, uint32_t task)
{
	int part = l->r->trace->task[l->r->task[task]].part;

	return part < 0 || part >= l->classes - 1 ? l->classes - 1 : part;
}

static void list_close(void *state)
{
	struct list *l = state;

	for (int c = 0; l->set && c < l->classes; c++)
		for (int i = 0; i < LEVELS; i++)
			free(l->set[c].word[i]);
	free(l->set), free(l->task), free(l->ready), free(l->may);
	free(l);
}

/* Whether workers may run a class holds for all of its tasks: one is asked for. */
static void allow(struct list *l, int class, uint32_t task)
{
	const struct replay_machine *m = l->m;

	for (int w = 0; m->may_run && w < m->workers; w++)
		l->may[class * m->workers + w] = m->may_run(l->r, task, w, m->user);
}

static void *list_open(const struct replay *r, const struct replay_machine *m)
{
	struct list *l = calloc(1, sizeof *l);
	bool good;

	if (!l)
		return NULL;
	l->r = r;
	l->m = m;
	l->classes = m->may_run ? r->trace->n_parts + 1 : 1;
	l->set = calloc((size_t)l->classes, sizeof *l->set);
	l->ready = calloc((size_t)l->classes, sizeof *l->ready);
	l->may = calloc((size_t)l->classes * (size_t)m->workers + 1, sizeof *l->may);
	l->task = malloc(((size_t)r->n + 1) * sizeof *l->task);
	good = l->set && l->ready && l->may && l->task;
	for (uint32_t i = 0; good && i < r->n; i++) {
		int class = class_of(l, i);

		l->task[r->rank[i]] = i;
		if (l->set[class].word[0])
			continue;
		allow(l, class, i);
		good = open_ranks(&l->set[class], r->n);
	}
	if (good)
		return l;
	list_close(l);
	return NULL;
}

static void list_push(void *state, uint32_t task, int64_t now)
{
	struct list *l = state;
	int class = class_of(l, task);

	(void)now;
	insert(&l->set[class], l->r->rank[task]);
	l->ready[class]++;
}

static uint32_t list_pop(void *state, int worker, int64_t now)
{
	struct list *l = state;
	uint32_t best = TRACE_NO_TASK;
	int from = 0;

	(void)now;
	for (int c = 0; c < l->classes; c++) {
		uint32_t rank;

		if (!l->ready[c] || (l->m->may_run && !l->may[c * l->m->workers + worker]))
			continue;
		rank = smallest(&l->set[c]);
		if (rank < best) {
			best = rank;
			from = c;
		}
	}
	if (best == TRACE_NO_TASK)
		return TRACE_NO_TASK;
	erase(&l->set[from], best);
	l->ready[from]--;
	return l->task[best];
}

const struct replay_scheduler replay_list = {
	.name = "list", .open = list_open, .push = list_push, .pop = list_pop, .close = list_close
};

/* ---- changes ---- */

void replay_reset(struct replay *r)
{
	for (uint32_t i = 0; i < r->n; i++)
		r->duration[i] = trace_duration(r->trace, r->task[i]);
}

void replay_scale(struct replay *r, int kind, double factor)
{
	for (uint32_t i = 0; i < r->n; i++)
		if (r->trace->task[r->task[i]].kind == kind) {
			double scaled = (double)r->duration[i] * factor;

			r->duration[i] = scaled < 9e15 ? llrint(scaled) : (int64_t)9e15;
		}
}

/* Micro-batch, layer, kind and phase in one number; with the step it names a cell. */
static int64_t cell_of(const struct trace_task *k)
{
	return (int64_t)(k->micro & INT32_MAX) << 31 | (int64_t)(k->layer + 1) << 14 |
	       (int64_t)k->kind << 2 | (k->phase & 3);
}

int replay_equalise_experts(struct replay *r)
{
	struct trace_key *key = malloc(((size_t)r->n + 1) * sizeof *key);
	const struct trace_task *task = r->trace->task;
	uint32_t n = 0;
	bool good;

	for (uint32_t i = 0; key && i < r->n; i++)
		if (trace_is_expert(r->trace, r->task[i]))
			key[n++] = (struct trace_key){ cell_of(&task[r->task[i]]), i };
	good = key && trace_sort(key, n);
	for (uint32_t i = 0; good && i < n; i++)
		key[i].key = task[r->task[key[i].value]].step;
	good = good && trace_sort(key, n);
	for (uint32_t i = 0, k; good && i < n; i = k) {
		const struct trace_task *first = &task[r->task[key[i].value]];
		int64_t sum = 0;

		for (k = i; k < n && key[k].key == key[i].key &&
			    cell_of(&task[r->task[key[k].value]]) == cell_of(first);
		     k++)
			sum += r->duration[key[k].value];
		for (uint32_t j = i; j < k; j++)
			r->duration[key[j].value] = sum / (k - i);
	}
	free(key);
	return good ? 0 : -1;
}

/* ---- what the summary asks ---- */

static int makespan(const struct replay *r, int64_t *out)
{
	struct replay_machine m = replay_machine_of(r, 0);
	struct replay_result result;

	if (replay_run(r, &m, &replay_list, false, &result))
		return -1;
	*out = result.makespan;
	replay_result_free(&result);
	return 0;
}

static int without(struct replay *r, const char *const *kinds, int64_t *out)
{
	bool any = false;

	replay_reset(r);
	for (; *kinds; kinds++) {
		int kind = trace_kind(r->trace, *kinds);

		if (kind < 0)
			continue;
		replay_scale(r, kind, 0);
		for (uint32_t i = 0; i < r->n && !any; i++)
			any = r->trace->task[r->task[i]].kind == kind;
	}
	return any ? makespan(r, out) : 0;
}

int replay_gains(const struct trace_window *w, struct replay_gains *g)
{
	static const char *const repack[] = { "repack", "repack_bwd", NULL };
	static const char *const update[] = { "update", NULL };
	struct replay r;
	int rc;

	*g = (struct replay_gains){ MOE_MXT_NA, MOE_MXT_NA, MOE_MXT_NA, MOE_MXT_NA, MOE_MXT_NA };
	if (replay_open(w, &r))
		return -1;
	g->recorded = r.recorded;
	rc = makespan(&r, &g->base) || without(&r, repack, &g->without_repack) ||
	     without(&r, update, &g->without_update);
	if (!rc) {
		replay_reset(&r);
		rc = replay_equalise_experts(&r) || makespan(&r, &g->equal_experts);
	}
	replay_close(&r);
	return rc ? -1 : 0;
}
