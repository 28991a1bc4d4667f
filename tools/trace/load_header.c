/* SPDX-License-Identifier: Apache-2.0 */
/* What the header says of the machine, as far as it can be believed. */
#include "tools/trace/load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *number_name(const char *what, int i)
{
	char buf[40];

	snprintf(buf, sizeof buf, "%s%d", what, i);
	return strdup(buf);
}

static bool read_kinds(struct load *l, int n)
{
	l->t->kind = calloc((size_t)n + 1, sizeof *l->t->kind);
	if (!l->t->kind)
		return false;
	for (; l->t->n_kinds < n; l->t->n_kinds++) {
		char key[32], buf[128];
		const char *name;

		snprintf(key, sizeof key, "kind.%d", l->t->n_kinds);
		name = moe_mxt_value(&l->r, key, buf, sizeof buf);
		l->t->kind[l->t->n_kinds] =
			name && *name ? strdup(name) : number_name("kind", l->t->n_kinds);
		if (!l->t->kind[l->t->n_kinds])
			return false;
	}
	return true;
}

static int number_key(struct load *l, const char *format, int i, int otherwise)
{
	char key[48];

	snprintf(key, sizeof key, format, i);
	return load_small(moe_mxt_number(&l->r, key, otherwise), otherwise);
}

static bool read_workers(struct load *l, int n)
{
	struct trace *t = l->t;
	int nodes = load_small(moe_mxt_number(&l->r, "topology.nodes", 1), 1);

	t->n_nodes = nodes > 0 && nodes <= MAX_PARTS ? nodes : 1;
	t->worker = calloc((size_t)n + 1, sizeof *t->worker);
	if (!t->worker)
		return false;
	for (; t->n_workers < n; t->n_workers++) {
		struct trace_worker *w = &t->worker[t->n_workers];

		w->node = number_key(l, "worker.%d.node", t->n_workers, 0);
		w->cpu = number_key(l, "worker.%d.cpu", t->n_workers, -1);
		if (w->node < 0 || w->node >= t->n_nodes)
			w->node = 0;
	}
	return true;
}

/* "0,2,4" behind the workers so far; what is no worker is left out. */
static void add_part_workers(struct trace *t, int part, const char *list)
{
	uint32_t n = t->part_first[part];

	while (list && *list) {
		char *end;
		long w = strtol(list, &end, 10);

		if (end == list)
			break;
		if (w >= 0 && w < t->n_workers && n - t->part_first[part] < (uint32_t)t->n_workers)
			t->part_worker[n++] = (int32_t)w;
		list = *end == ',' ? end + 1 : end;
	}
	t->part_first[part + 1] = n;
}

static bool read_parts(struct load *l)
{
	struct trace *t = l->t;
	int n = load_small(moe_mxt_number(&l->r, "parts", 1), 1);
	size_t list_bytes = (size_t)t->n_workers * 7 + 1;
	char *list = malloc(list_bytes), word[16], key[32];
	const char *text;

	n = n < 1 ? 1 : n > MAX_PARTS ? MAX_PARTS : n;
	if ((size_t)n * (size_t)(t->n_workers + 1) > 1 << 24) /* no machine has that many */
		n = 1;
	t->part_node = calloc((size_t)n, sizeof *t->part_node);
	t->part_first = calloc((size_t)n + 1, sizeof *t->part_first);
	t->part_worker = calloc((size_t)n * (size_t)t->n_workers + 1, sizeof *t->part_worker);
	if (!list || !t->part_node || !t->part_first || !t->part_worker) {
		free(list);
		return false;
	}
	for (; t->n_parts < n; t->n_parts++) {
		int32_t *node = &t->part_node[t->n_parts];

		*node = number_key(l, "part.%d.node", t->n_parts, 0);
		*node = *node < 0 || *node >= t->n_nodes ? 0 : *node;
		snprintf(key, sizeof key, "part.%d.workers", t->n_parts);
		add_part_workers(t, t->n_parts, moe_mxt_value(&l->r, key, list, list_bytes));
	}
	free(list);
	text = moe_mxt_value(&l->r, "placement", word, sizeof word);
	t->strict = text && !strcmp(text, "strict");
	t->data_wait = moe_mxt_number(&l->r, "data.wait", 0) == 1;
	return true;
}

bool load_header(struct load *l)
{
	int kinds = load_small(moe_mxt_number(&l->r, "kinds", 0), 0);
	int workers = load_small(moe_mxt_number(&l->r, "workers", 0), 0);
	bool known_kinds = kinds > 0 && kinds <= TRACE_MAX_KINDS;
	bool known_workers = workers > 0 && workers <= TRACE_MAX_WORKERS;
	int32_t kind = 0, worker = 0;

	for (uint32_t i = 0; i < l->t->n_tasks; i++) {
		const struct trace_task *k = &l->t->task[i];

		kind = k->kind > kind && k->kind < TRACE_MAX_KINDS ? k->kind : kind;
		worker = k->worker > worker && k->worker < TRACE_MAX_WORKERS ? k->worker : worker;
	}
	return read_kinds(l, known_kinds ? kinds : kind + 1) &&
	       read_workers(l, known_workers ? workers : worker + 1) && read_parts(l);
}
