/* SPDX-License-Identifier: Apache-2.0 */
/* Completes a trace in memory: checks, successors, orders, steps. */
#include "tools/trace/trace.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(char *error, size_t size, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
static int fail(char *error, size_t size, const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	vsnprintf(error, size, format, ap);
	va_end(ap);
	return -1;
}

static void *room(size_t n, size_t size)
{
	return calloc(n ? n : 1, size);
}

/* ---- sorting: by bytes, least significant first; bytes that are all equal cost one look ---- */

static uint64_t ordered(int64_t key)
{
	return (uint64_t)key ^ 1ull << 63;
}

bool trace_sort(struct trace_key *a, size_t n)
{
	struct trace_key *b, *from = a, *to;
	uint64_t different = 0;

	for (size_t i = 1; i < n; i++)
		different |= ordered(a[i].key) ^ ordered(a[0].key);
	if (!different)
		return true;
	to = b = malloc(n * sizeof *b);
	if (!b)
		return false;
	for (int shift = 0; shift < 64; shift += 8) {
		size_t at[256] = { 0 }, sum = 0;
		struct trace_key *was = from;

		if (!(different >> shift & 255))
			continue;
		for (size_t i = 0; i < n; i++)
			at[ordered(from[i].key) >> shift & 255]++;
		for (int i = 0; i < 256; i++) {
			size_t count = at[i];

			at[i] = sum;
			sum += count;
		}
		for (size_t i = 0; i < n; i++)
			to[at[ordered(from[i].key) >> shift & 255]++] = from[i];
		from = to;
		to = was;
	}
	if (from != a)
		memcpy(a, from, n * sizeof *a);
	free(b);
	return true;
}

/* ---- checks ---- */

static const char *wrong_task(const struct trace *t, uint32_t i)
{
	const struct trace_task *k = &t->task[i];

	if (k->kind < 0 || k->kind >= t->n_kinds)
		return "its kind is unknown";
	if (k->worker < 0 || k->worker >= t->n_workers)
		return "its worker is unknown";
	if (k->stop < k->start)
		return "it stops before it starts";
	if (k->layer < -1 || k->layer >= 1 << 16)
		return "its layer is impossible";
	if (k->first_pred > t->n_preds || k->n_pred > t->n_preds - k->first_pred)
		return "its predecessors lie outside of the list";
	if (i && k->id <= t->task[i - 1].id)
		return "ids do not ascend";
	for (uint32_t p = 0; p < k->n_pred; p++)
		if (t->pred[k->first_pred + p] >= i)
			return "it waits for a task that was submitted later";
	return NULL;
}

static int check(const struct trace *t, char *error, size_t size)
{
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		const char *wrong = wrong_task(t, i);

		if (wrong)
			return fail(error, size, "task %lld: %s", (long long)t->task[i].id, wrong);
	}
	for (int p = 0; p < t->n_parts; p++)
		if (t->part_first && t->part_first[p + 1] < t->part_first[p])
			return fail(error, size, "workers of part %d are wrong", p);
	for (uint32_t i = 0; t->part_first && i < t->part_first[t->n_parts]; i++)
		if (t->part_worker[i] < 0 || t->part_worker[i] >= t->n_workers)
			return fail(error, size, "a part names worker %d of %d", t->part_worker[i],
				    t->n_workers);
	return 0;
}

/* ---- successors ---- */

static bool make_successors(struct trace *t)
{
	uint32_t at = 0;

	t->succ = room(t->n_preds, sizeof *t->succ);
	if (!t->succ)
		return false;
	for (uint32_t i = 0; i < t->n_tasks; i++)
		t->task[i].n_succ = 0;
	for (uint32_t i = 0; i < t->n_tasks; i++)
		for (uint32_t p = 0; p < t->task[i].n_pred; p++)
			t->task[t->pred[t->task[i].first_pred + p]].n_succ++;
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		t->task[i].first_succ = at;
		at += t->task[i].n_succ;
		t->task[i].n_succ = 0;
	}
	for (uint32_t i = 0; i < t->n_tasks; i++)
		for (uint32_t p = 0; p < t->task[i].n_pred; p++) {
			struct trace_task *from = &t->task[t->pred[t->task[i].first_pred + p]];

			t->succ[from->first_succ + from->n_succ++] = i;
		}
	return true;
}

/* ---- orders ---- */

static bool order_by_worker(struct trace *t, struct trace_key *key)
{
	int64_t latest = INT64_MIN;

	t->by_worker = room(t->n_tasks, sizeof *t->by_worker);
	t->stop_before = room(t->n_tasks, sizeof *t->stop_before);
	t->worker_first = room((size_t)t->n_workers + 1, sizeof *t->worker_first);
	if (!t->by_worker || !t->stop_before || !t->worker_first)
		return false;
	for (uint32_t i = 0; i < t->n_tasks; i++)
		key[i] = (struct trace_key){ t->task[i].start, i };
	if (!trace_sort(key, t->n_tasks))
		return false;
	for (uint32_t i = 0; i < t->n_tasks; i++)
		t->worker_first[t->task[i].worker + 1]++;
	for (int w = 0; w < t->n_workers; w++)
		t->worker_first[w + 1] += t->worker_first[w];
	for (uint32_t i = 0; i < t->n_tasks; i++)
		t->by_worker[t->worker_first[t->task[key[i].value].worker]++] = key[i].value;
	for (int w = t->n_workers; w > 0; w--)
		t->worker_first[w] = t->worker_first[w - 1];
	t->worker_first[0] = 0;
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		struct trace_task *k = &t->task[t->by_worker[i]];
		bool first = i == 0 || t->task[t->by_worker[i - 1]].worker != k->worker;

		k->prev = first ? TRACE_NO_TASK : t->by_worker[i - 1];
		latest = first || k->stop > latest ? k->stop : latest;
		t->stop_before[i] = latest;
	}
	return true;
}

static bool order_by_step(struct trace *t, struct trace_key *key)
{
	t->by_step = room(t->n_tasks, sizeof *t->by_step);
	if (!t->by_step)
		return false;
	for (uint32_t i = 0; i < t->n_tasks; i++)
		key[i] = (struct trace_key){ t->task[i].step, i };
	if (!trace_sort(key, t->n_tasks))
		return false;
	for (uint32_t i = 0; i < t->n_tasks; i++)
		t->by_step[i] = key[i].value;
	return true;
}

/* ---- steps ---- */

static void span(const struct trace *t, struct trace_step *s)
{
	for (uint32_t i = s->first; i < s->first + s->n; i++) {
		const struct trace_task *k = &t->task[t->by_step[i]];
		int64_t submit = k->submit == MOE_MXT_NA ? k->start : k->submit;

		if (i == s->first || submit < s->begin)
			s->begin = submit;
		if (i == s->first || submit > s->submitted)
			s->submitted = submit;
		if (i == s->first || k->stop > s->end)
			s->end = k->stop;
	}
}

static struct trace_step *step_of(const struct trace *t, int32_t step)
{
	int low = 0, high = t->n_steps;

	while (low < high) {
		int middle = (low + high) / 2;

		if (t->step[middle].step < step)
			low = middle + 1;
		else
			high = middle;
	}
	return low < t->n_steps && t->step[low].step == step ? &t->step[low] : NULL;
}

/* The first step whose tasks come at or after a time, NULL: none. */
static struct trace_step *step_after(const struct trace *t, int64_t time)
{
	int low = 0, high = t->n_steps;

	while (low < high) {
		int middle = (low + high) / 2;

		if (t->step[middle].begin < time)
			low = middle + 1;
		else
			high = middle;
	}
	return low < t->n_steps ? &t->step[low] : NULL;
}

#define IN_FLIGHT 8

/* Steps that marks have begun, by the marks' numbers. */
struct begun {
	int32_t number[IN_FLIGHT];
	struct trace_step *step[IN_FLIGHT];
	unsigned n;
};

/*
 * Whoever marks steps may count them otherwise than the tasks do (a caller of the C API counts its
 * own, a block its updates). A beginning that is later than the step of its number goes to the next
 * one by time, and so do the later marks of that number.
 */
static struct trace_step *step_of_mark(const struct trace *t, struct begun *b,
				       const struct trace_mark *m)
{
	struct trace_step *s = step_of(t, m->step);

	if (m->what == MOE_MXT_STEP_BEGIN) {
		s = s && m->time <= s->end ? s : step_after(t, m->time);
		b->number[b->n % IN_FLIGHT] = m->step;
		b->step[b->n++ % IN_FLIGHT] = s;
		return s;
	}
	for (unsigned i = 0; i < IN_FLIGHT && i < b->n; i++)
		if (b->number[(b->n - 1 - i) % IN_FLIGHT] == m->step)
			return b->step[(b->n - 1 - i) % IN_FLIGHT];
	return s;
}

static void apply_marks(struct trace *t)
{
	struct begun begun = { .n = 0 };

	for (uint32_t i = 0; i < t->n_marks; i++) {
		const struct trace_mark *m = &t->mark[i];
		struct trace_step *s = step_of_mark(t, &begun, m);

		if (!s)
			continue;
		if (m->what == MOE_MXT_STEP_BEGIN && m->time < s->begin)
			s->begin = m->time;
		if (m->what == MOE_MXT_STEP_SUBMITTED && m->time > s->submitted)
			s->submitted = m->time;
		if (m->tokens != MOE_MXT_NA)
			s->tokens = m->tokens;
		if (m->trained != MOE_MXT_NA)
			s->trained = m->trained;
	}
}

static bool make_steps(struct trace *t)
{
	int64_t end = INT64_MIN;
	uint32_t n = 0;

	for (uint32_t i = 0; i < t->n_tasks; i++) {
		int32_t step = t->task[t->by_step[i]].step;

		n += step > 0 && (i == 0 || t->task[t->by_step[i - 1]].step != step);
	}
	t->step = room(n, sizeof *t->step);
	if (!t->step)
		return false;
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		int32_t step = t->task[t->by_step[i]].step;

		if (step <= 0)
			continue;
		if (!t->n_steps || t->step[t->n_steps - 1].step != step)
			t->step[t->n_steps++] = (struct trace_step){ .step = step,
								     .first = i,
								     .tokens = MOE_MXT_NA,
								     .trained = MOE_MXT_NA };
		t->step[t->n_steps - 1].n++;
	}
	for (int s = 0; s < t->n_steps; s++)
		span(t, &t->step[s]);
	apply_marks(t);
	for (int s = 0; s < t->n_steps; s++) {
		t->step[s].from = t->step[s].begin > end ? t->step[s].begin : end;
		end = t->step[s].end > end ? t->step[s].end : end;
	}
	return true;
}

static void measure(struct trace *t)
{
	t->n_layers = 0;
	t->first = t->last = 0;
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		const struct trace_task *k = &t->task[i];
		int64_t begin =
			k->submit == MOE_MXT_NA || k->submit > k->start ? k->start : k->submit;

		if (k->layer >= t->n_layers)
			t->n_layers = k->layer + 1;
		if (i == 0 || begin < t->first)
			t->first = begin;
		if (i == 0 || k->stop > t->last)
			t->last = k->stop;
	}
	for (int s = 0; s < t->n_steps; s++)
		if (t->step[s].begin < t->first)
			t->first = t->step[s].begin;
}

static void forget(struct trace *t)
{
	free(t->succ), free(t->by_step), free(t->by_worker), free(t->stop_before);
	free(t->worker_first), free(t->step);
	t->succ = t->by_step = t->by_worker = t->worker_first = NULL;
	t->stop_before = NULL;
	t->step = NULL;
	t->n_steps = 0;
}

int trace_finish(struct trace *t, char *error, size_t size)
{
	struct trace_key *key;
	bool good;

	forget(t);
	if (check(t, error, size))
		return -1;
	key = malloc(((size_t)t->n_tasks + 1) * sizeof *key);
	good = key && make_successors(t) && order_by_worker(t, key) && order_by_step(t, key) &&
	       make_steps(t);
	free(key);
	if (!good) {
		forget(t);
		return fail(error, size, "no memory for %u tasks", t->n_tasks);
	}
	measure(t);
	return 0;
}

static void free_names(char **name, int n)
{
	for (int i = 0; name && i < n; i++)
		free(name[i]);
	free(name);
}

void trace_free(struct trace *t)
{
	forget(t);
	free(t->header), free(t->task), free(t->pred);
	free_names(t->kind, t->n_kinds);
	free_names(t->purpose, t->n_purposes);
	free_names(t->counter_name, t->n_counter_names);
	free(t->worker), free(t->part_node), free(t->part_worker), free(t->part_first);
	free(t->routing), free(t->load), free(t->memory), free(t->counter);
	free(t->mark), free(t->host);
	memset(t, 0, sizeof *t);
}

/* ---- questions ---- */

int64_t trace_submit(const struct trace *t, uint32_t task)
{
	const struct trace_task *k = &t->task[task];

	return k->submit == MOE_MXT_NA ? t->first : k->submit;
}

int64_t trace_ready(const struct trace *t, uint32_t task)
{
	const struct trace_task *k = &t->task[task];
	int64_t ready = trace_submit(t, task);

	if (k->ready != MOE_MXT_NA)
		return k->ready;
	for (uint32_t p = 0; p < k->n_pred; p++)
		if (t->task[t->pred[k->first_pred + p]].stop > ready)
			ready = t->task[t->pred[k->first_pred + p]].stop;
	return ready < k->start ? ready : k->start;
}

bool trace_may_run(const struct trace *t, uint32_t task, int worker)
{
	int32_t part = t->task[task].part;

	if (!t->strict || !t->part_first || part < 0 || part >= t->n_parts ||
	    t->part_first[part] == t->part_first[part + 1])
		return true;
	for (uint32_t i = t->part_first[part]; i < t->part_first[part + 1]; i++)
		if (t->part_worker[i] == worker)
			return true;
	return false;
}

int trace_home(const struct trace *t, uint32_t task)
{
	const struct trace_task *k = &t->task[task];
	int here = t->worker[k->worker].node;
	int layer_part = k->layer >= 0 && t->n_parts > 0 ? k->layer % t->n_parts : -1;

	if (!t->part_node)
		return -1;
	if (k->part >= 0 && k->part < t->n_parts && t->part_node[k->part] != here)
		return t->part_node[k->part];
	if (layer_part >= 0 && t->part_node[layer_part] != here)
		return t->part_node[layer_part];
	return -1;
}

int trace_kind(const struct trace *t, const char *name)
{
	for (int i = 0; i < t->n_kinds; i++)
		if (!strcmp(t->kind[i], name))
			return i;
	return -1;
}

uint32_t trace_find(const struct trace *t, int64_t id)
{
	uint32_t low = 0, high = t->n_tasks;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (t->task[middle].id < id)
			low = middle + 1;
		else
			high = middle;
	}
	return low < t->n_tasks && t->task[low].id == id ? low : TRACE_NO_TASK;
}

const char *trace_value(const struct trace *t, const char *key, char *buf, size_t size)
{
	struct moe_mxt_reader r = { .header = t->header };

	return moe_mxt_value(&r, key, buf, size);
}

double trace_number(const struct trace *t, const char *key, double otherwise)
{
	char buf[64], *end;
	const char *text = trace_value(t, key, buf, sizeof buf);
	double v = text ? strtod(text, &end) : 0;

	return text && end != text && !*end && v == v && v - v == 0 ? v : otherwise;
}
