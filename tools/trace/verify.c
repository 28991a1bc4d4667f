/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/verify.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static const char *const rule_name[TRACE_RULES] = { "file",	"order",  "dependencies", "worker",
						   "placement", "tokens", "repack" };

struct checking {
	const struct trace *t;
	struct trace_verify *v;
};

static void found(const struct checking *c, enum trace_rule rule, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
static void found(const struct checking *c, enum trace_rule rule, const char *format, ...)
{
	va_list ap;

	if (c->v->found[rule]++ >= c->v->most || !c->v->out)
		return;
	fprintf(c->v->out, "%s: ", rule_name[rule]);
	va_start(ap, format);
	vfprintf(c->v->out, format, ap);
	va_end(ap);
	putc('\n', c->v->out);
}

/* "task 12 (gate_up, layer 3, step 2)" */
static const char *name_of(const struct checking *c, uint32_t i, char buf[160])
{
	const struct trace_task *k = &c->t->task[i];

	snprintf(buf, 160, "task %lld (%.60s, layer %d, step %d)", (long long)k->id,
		 c->t->kind[k->kind], k->layer, k->step);
	return buf;
}

/* ---- the file ---- */

/* The last value of a counter, -1: not there. */
static int64_t counter(const struct trace *t, const char *name)
{
	int64_t value = -1;

	for (uint32_t i = 0; i < t->n_counters; i++)
		if (!strcmp(t->counter_name[t->counter[i].name], name))
			value = t->counter[i].value;
	return value;
}

static void check_lost(const struct checking *c)
{
	const struct trace *t = c->t;
	int64_t executed = counter(t, "executed"), submitted = counter(t, "submitted");

	for (int i = 0; i < t->n_counter_names; i++)
		if (!strncmp(t->counter_name[i], "lost_", 5) && counter(t, t->counter_name[i]) > 0)
			found(c, TRACE_RULE_FILE, "counter %.60s is %lld", t->counter_name[i],
			      (long long)counter(t, t->counter_name[i]));
	if (!t->ended)
		found(c, TRACE_RULE_FILE, "it was cut off: no end is in it");
	if (t->not_run)
		found(c, TRACE_RULE_FILE, "%lld tasks were submitted and have not run",
		      (long long)t->not_run);
	if (t->ended && executed >= 0 && executed != t->n_tasks)
		found(c, TRACE_RULE_FILE, "%lld tasks were executed, %u are in it",
		      (long long)executed, t->n_tasks);
	if (t->ended && submitted >= 0 && executed >= 0 && submitted != executed)
		found(c, TRACE_RULE_FILE, "%lld tasks were submitted, %lld executed",
		      (long long)submitted, (long long)executed);
}

static void check_file(const struct checking *c)
{
	const struct trace *t = c->t;

	if (t->bad_rows)
		found(c, TRACE_RULE_FILE, "%lld rows say what cannot be; the first: %s",
		      (long long)t->bad_rows, t->bad_row);
	if (c->v->partial)
		return;
	if (t->lost_bytes)
		found(c, TRACE_RULE_FILE, "%lld bytes are damaged", (long long)t->lost_bytes);
	check_lost(c);
}

/* ---- times ---- */

static void check_order(const struct checking *c, uint32_t i)
{
	static const char *const name[] = { "submitted", "ready", "popped", "started" };
	const struct trace_task *k = &c->t->task[i];
	const int64_t time[] = { k->submit, k->ready, k->pop, k->start };
	char buf[160];
	int last = 0;

	for (int n = 1; n < 4; n++) {
		if (time[n] == MOE_MXT_NA)
			continue;
		if (time[last] != MOE_MXT_NA && time[n] < time[last])
			found(c, TRACE_RULE_ORDER, "%s was %s %lld ns before it was %s",
			      name_of(c, i, buf), name[n], (long long)(time[last] - time[n]),
			      name[last]);
		last = n;
	}
}

static void check_deps(const struct checking *c, uint32_t i)
{
	const struct trace *t = c->t;
	const struct trace_task *k = &t->task[i];
	int64_t ready = k->ready != MOE_MXT_NA && k->ready < k->start ? k->ready : k->start;
	char a[160], b[160];

	for (uint32_t p = 0; p < k->n_pred; p++) {
		uint32_t pred = t->pred[k->first_pred + p];

		if (t->task[pred].stop > ready)
			found(c, TRACE_RULE_DEPS, "%s was %s %lld ns before %s ended",
			      name_of(c, i, a), ready == k->start ? "started" : "ready",
			      (long long)(t->task[pred].stop - ready), name_of(c, pred, b));
	}
}

static void check_workers(const struct checking *c)
{
	const struct trace *t = c->t;
	char a[160], b[160];

	for (uint32_t i = 1; i < t->n_tasks; i++) {
		uint32_t task = t->by_worker[i], before = t->by_worker[i - 1];

		if (t->task[task].worker == t->task[before].worker &&
		    t->task[task].start < t->stop_before[i - 1])
			found(c, TRACE_RULE_WORKER,
			      "%s starts on worker %d %lld ns before the tasks before it have "
			      "ended "
			      "(%s is one)",
			      name_of(c, task, a), t->task[task].worker,
			      (long long)(t->stop_before[i - 1] - t->task[task].start),
			      name_of(c, before, b));
	}
}

static void check_placement(const struct checking *c, uint32_t i)
{
	char buf[160];

	if (c->t->strict && !trace_may_run(c->t, i, c->t->task[i].worker))
		found(c, TRACE_RULE_PLACEMENT, "%s of part %d ran on worker %d", name_of(c, i, buf),
		      c->t->task[i].part, c->t->task[i].worker);
}

/* ---- tokens ---- */

struct routed {
	int32_t step, layer, micro;
	int64_t slots; /* that went to experts */
};

static int by_place(const void *a, const void *b)
{
	const struct routed *p = a, *q = b;

	if (p->step != q->step)
		return p->step < q->step ? -1 : 1;
	if (p->layer != q->layer)
		return p->layer < q->layer ? -1 : 1;
	return p->micro < q->micro ? -1 : p->micro > q->micro;
}

/* Slots per (step, layer, micro-batch), all its routings together. Checks each on the way. */
static struct routed *sum_routing(const struct checking *c, uint32_t *n)
{
	const struct trace *t = c->t;
	struct routed *list = malloc(((size_t)t->n_routing + 1) * sizeof *list);
	uint32_t kept = 0;

	*n = t->n_routing;
	for (uint32_t i = 0; list && i < t->n_routing; i++) {
		const struct trace_routing *r = &t->routing[i];
		int64_t sum = 0, least = 0;

		for (int32_t e = 0; e < r->experts; e++) {
			sum += t->load[r->first_load + (uint32_t)e];
			least = t->load[r->first_load + (uint32_t)e] < least
					? t->load[r->first_load + (uint32_t)e]
					: least;
		}
		if (least < 0 || (r->slots != MOE_MXT_NA &&
				  (sum > r->slots || (sum < r->slots && !c->v->skipped_slots))))
			found(c, TRACE_RULE_TOKENS,
			      "layer %d, step %d, micro-batch %d: experts have %lld of %lld slots",
			      r->layer, r->step, r->micro, (long long)sum, (long long)r->slots);
		list[i] = (struct routed){ r->step, r->layer, r->micro, sum };
	}
	if (!list || !*n)
		return list;
	qsort(list, *n, sizeof *list, by_place);
	for (uint32_t i = 0; i < *n; i++)
		if (kept && !by_place(&list[kept - 1], &list[i]))
			list[kept - 1].slots += list[i].slots;
		else
			list[kept++] = list[i];
	*n = kept;
	return list;
}

/* Kinds whose tasks get a row for each of their group's slots; of step 0 only forward ones, whose
 * routing is in the trace for certain. */
static int rows_kind(const struct trace *t, const struct trace_task *k)
{
	static const char *const name[] = { "gate_up", "down", "down_bwd", "gate_up_bwd" };
	int n = k->step > 0 ? 4 : k->phase == MOE_MXT_PHASE_FORWARD ? 2 : 0;

	for (int i = 0; i < n; i++)
		if (!strcmp(t->kind[k->kind], name[i]))
			return i;
	return -1;
}

/* All but the step in one number. */
static int64_t cell_of(const struct trace_task *k, int kind)
{
	return (int64_t)(k->micro & INT32_MAX) << 33 | (int64_t)(k->layer & 0xffff) << 17 |
	       (int64_t)((k->part + 1) & 0x1fff) << 4 | (int64_t)kind << 2 | (k->phase & 3);
}

static void compare(const struct checking *c, const struct trace_key *key, uint32_t n,
		    const struct routed *routed, uint32_t n_routed)
{
	const struct trace_task *k = &c->t->task[key->value];
	struct routed want = { k->step, k->layer, k->micro, 0 }, *place;
	int64_t rows = 0;

	for (uint32_t i = 0; i < n; i++)
		rows += c->t->task[key[i].value].rows;
	place = n_routed ? bsearch(&want, routed, n_routed, sizeof *routed, by_place) : NULL;
	if (place && place->slots != rows)
		found(c, TRACE_RULE_TOKENS,
		      "layer %d, step %d, micro-batch %d, part %d: %s has %lld rows, %lld slots "
		      "were "
		      "routed",
		      k->layer, k->step, k->micro, k->part, c->t->kind[k->kind], (long long)rows,
		      (long long)place->slots);
}

static int check_rows(const struct checking *c, const struct routed *routed, uint32_t n_routed)
{
	const struct trace *t = c->t;
	struct trace_key *key = malloc(((size_t)t->n_tasks + 1) * sizeof *key);
	uint32_t n = 0;
	bool good;

	for (uint32_t i = 0; key && i < t->n_tasks; i++) {
		const struct trace_task *k = &t->task[i];
		int kind = k->group >= 0 && k->layer >= 0 && k->slice <= 0 && k->rows != MOE_MXT_NA
				   ? rows_kind(t, k)
				   : -1;

		if (kind >= 0)
			key[n++] = (struct trace_key){ cell_of(k, kind), i };
	}
	good = key && trace_sort(key, n);
	for (uint32_t i = 0; good && i < n; i++)
		key[i].key = t->task[key[i].value].step;
	good = good && trace_sort(key, n);
	for (uint32_t i = 0, k; good && i < n; i = k) {
		const struct trace_task *first = &t->task[key[i].value];
		int64_t cell = cell_of(first, rows_kind(t, first));

		for (k = i; k < n; k++) {
			const struct trace_task *task = &t->task[key[k].value];

			if (task->step != first->step || cell_of(task, rows_kind(t, task)) != cell)
				break;
		}
		compare(c, key + i, k - i, routed, n_routed);
	}
	free(key);
	return good ? 0 : -1;
}

static int check_tokens(const struct checking *c)
{
	uint32_t n;
	struct routed *routed = sum_routing(c, &n);
	int rc = routed && (c->v->partial || check_rows(c, routed, n) == 0) ? 0 : -1;

	free(routed);
	return rc;
}

/* ---- repacking ---- */

enum role { NO_ROLE, REPACK_BWD, READER_BWD, REPACK, READER };

static enum role role_of(const struct trace *t, const struct trace_task *k, bool backward)
{
	const char *name = t->kind[k->kind];
	bool bwd = !strcmp(name, "down_bwd") || !strcmp(name, "gate_up_bwd");

	if (k->group < 0 || k->layer < 0)
		return NO_ROLE;
	if (backward)
		return bwd ? READER_BWD : !strcmp(name, "repack_bwd") ? REPACK_BWD : NO_ROLE;
	if (!strcmp(name, "repack"))
		return REPACK;
	return bwd || !strcmp(name, "gate_up") || !strcmp(name, "down") ? READER : NO_ROLE;
}

/* Tasks with a role by (layer, part, group), then by `second` of the task. */
static struct trace_key *by_group(const struct trace *t, bool backward, uint32_t *n)
{
	struct trace_key *key = malloc(((size_t)t->n_tasks + 1) * sizeof *key);

	*n = 0;
	for (uint32_t i = 0; key && i < t->n_tasks; i++)
		if (role_of(t, &t->task[i], backward) != NO_ROLE)
			key[(*n)++] = (struct trace_key){ backward ? i : t->task[i].start, i };
	if (key && trace_sort(key, *n)) {
		for (uint32_t i = 0; i < *n; i++) {
			const struct trace_task *k = &t->task[key[i].value];

			key[i].key = (int64_t)k->layer << 45 |
				     (int64_t)((k->part + 1) & 0x1fff) << 32 | (uint32_t)k->group;
		}
		if (trace_sort(key, *n))
			return key;
	}
	free(key);
	return NULL;
}

static bool waits_for(const struct trace *t, uint32_t task, uint32_t pred)
{
	const struct trace_task *k = &t->task[task];

	for (uint32_t p = 0; p < k->n_pred; p++)
		if (t->pred[k->first_pred + p] == pred)
			return true;
	return false;
}

/* A reader waits for the copy of its step that was ordered last before it, and starts after it. */
static void check_reader(const struct checking *c, uint32_t task, uint32_t made)
{
	const struct trace_task *k = &c->t->task[task], *copy = &c->t->task[made];
	char a[160], b[160];

	if (copy->stop > k->start)
		found(c, TRACE_RULE_REPACK, "%s starts %lld ns before %s has ended",
		      name_of(c, task, a), (long long)(copy->stop - k->start), name_of(c, made, b));
	else if (!c->v->partial && copy->step == k->step && copy->micro == k->micro &&
		 !waits_for(c->t, task, made))
		found(c, TRACE_RULE_REPACK, "%s does not wait for %s", name_of(c, task, a),
		      name_of(c, made, b));
}

static int check_copies(const struct checking *c)
{
	const struct trace *t = c->t;
	uint32_t n, made = TRACE_NO_TASK;
	struct trace_key *key = by_group(t, true, &n);

	for (uint32_t i = 0; key && i < n; i++) {
		uint32_t task = key[i].value;

		if (i && key[i].key != key[i - 1].key)
			made = TRACE_NO_TASK;
		if (role_of(t, &t->task[task], true) == REPACK_BWD)
			made = task;
		else if (made != TRACE_NO_TASK)
			check_reader(c, task, made);
	}
	free(key);
	return key ? 0 : -1;
}

/* Nothing reads a group's weights while they are repacked. */
static int check_weights(const struct checking *c)
{
	const struct trace *t = c->t;
	uint32_t n, last[2] = { TRACE_NO_TASK, TRACE_NO_TASK }; /* latest stop: reader, repack */
	struct trace_key *key = by_group(t, false, &n);
	char a[160], b[160];

	for (uint32_t i = 0; key && i < n; i++) {
		uint32_t task = key[i].value, other;
		int repack = role_of(t, &t->task[task], false) == REPACK;

		if (i && key[i].key != key[i - 1].key)
			last[0] = last[1] = TRACE_NO_TASK;
		other = last[!repack];
		if (other != TRACE_NO_TASK && t->task[other].stop > t->task[task].start)
			found(c, TRACE_RULE_REPACK, "%s and %s overlap by %lld ns",
			      name_of(c, task, a), name_of(c, other, b),
			      (long long)(t->task[other].stop - t->task[task].start));
		if (last[repack] == TRACE_NO_TASK ||
		    t->task[task].stop > t->task[last[repack]].stop)
			last[repack] = task;
	}
	free(key);
	return key ? 0 : -1;
}

/* ---- all ---- */

int64_t trace_verify(const struct trace *t, struct trace_verify *v)
{
	struct checking c = { t, v };
	int64_t sum = 0;

	memset(v->found, 0, sizeof v->found);
	check_file(&c);
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		check_order(&c, i);
		check_deps(&c, i);
		check_placement(&c, i);
	}
	check_workers(&c);
	if (check_tokens(&c) || check_copies(&c) || check_weights(&c))
		return -1;
	for (int r = 0; r < TRACE_RULES; r++) {
		sum += v->found[r];
		if (v->out && v->found[r] > v->most)
			fprintf(v->out, "%s: %lld more\n", rule_name[r],
				(long long)(v->found[r] - v->most));
	}
	return sum;
}
