/* SPDX-License-Identifier: Apache-2.0 */
/* The execution: workers take ready tasks by submission order; two steps are in flight. */
#include "bench/trace_make/make.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUBMIT_NS 1500
#define POP_NS 800
#define START_NS 700

struct heap {
	struct item {
		int64_t key;
		uint32_t value;
	} * a;
	uint32_t n;
};

static void push(struct heap *h, int64_t key, uint32_t value)
{
	uint32_t i = h->n++;

	for (; i && h->a[(i - 1) / 2].key > key; i = (i - 1) / 2)
		h->a[i] = h->a[(i - 1) / 2];
	h->a[i] = (struct item){ key, value };
}

static struct item pull(struct heap *h)
{
	struct item top = h->a[0], last = h->a[--h->n];
	uint32_t i = 0;

	for (;;) {
		uint32_t c = 2 * i + 1;

		if (c >= h->n)
			break;
		c += c + 1 < h->n && h->a[c + 1].key < h->a[c].key;
		if (last.key <= h->a[c].key)
			break;
		h->a[i] = h->a[c];
		i = c;
	}
	h->a[i] = last;
	return top;
}

struct execution {
	struct run *r;
	uint32_t *first_succ, *succ;
	uint32_t *step_left;	 /* [steps + 1] tasks */
	struct heap ready, busy; /* by id; workers by the end of their task */
	int *idle, n_idle;
	uint32_t *running; /* [workers] */
	uint32_t next;	   /* to be submitted */
	int64_t submit_at; /* when; INT64_MAX: waits for a step */
};

static void *need(void *p)
{
	if (!p) {
		fprintf(stderr, "bench_trace_make: no memory\n");
		exit(1);
	}
	return p;
}

static void successors(struct execution *x)
{
	struct run *r = x->r;
	uint32_t *at = need(malloc(((size_t)r->n + 1) * sizeof *at));

	x->first_succ = need(calloc((size_t)r->n + 1, sizeof *x->first_succ));
	x->succ = need(malloc(((size_t)r->n_deps + 1) * sizeof *x->succ));
	for (uint32_t i = 0; i < r->n_deps; i++)
		x->first_succ[r->dep[i] + 1]++;
	for (uint32_t i = 0; i < r->n; i++)
		x->first_succ[i + 1] += x->first_succ[i];
	memcpy(at, x->first_succ, ((size_t)r->n + 1) * sizeof *at);
	for (uint32_t i = 0; i < r->n; i++)
		for (uint32_t d = 0; d < r->job[i].n_deps; d++)
			x->succ[at[r->dep[r->job[i].first_dep + d]]++] = i;
	free(at);
}

static void become_ready(struct execution *x, uint32_t i, int64_t now)
{
	x->r->job[i].ready = now;
	push(&x->ready, i, i);
}

static void submit(struct execution *x)
{
	struct run *r = x->r;
	struct job *j = &r->job[x->next];
	int64_t now = x->submit_at;
	bool first = x->next == 0 || r->job[x->next - 1].step != j->step;

	if (first)
		r->step_begin[j->step - 1] = now;
	j->submit = now;
	if (!--j->left)
		become_ready(x, x->next, now);
	x->next++;
	x->submit_at = now + SUBMIT_NS;
	if (x->next == r->n || r->job[x->next].step != j->step) {
		r->step_submitted[j->step - 1] = x->submit_at;
		if (x->next < r->n)
			r->wait_begin[j->step] = x->submit_at;
		if (x->next == r->n || (j->step >= 2 && x->step_left[j->step - 1]))
			x->submit_at = INT64_MAX;
	}
}

static void finish(struct execution *x, int worker, int64_t now)
{
	struct run *r = x->r;
	uint32_t i = x->running[worker];
	struct job *j = &r->job[i];

	for (uint32_t s = x->first_succ[i]; s < x->first_succ[i + 1]; s++)
		if (!--r->job[x->succ[s]].left)
			become_ready(x, x->succ[s], now + 200);
	x->idle[x->n_idle++] = worker;
	if (--x->step_left[j->step])
		return;
	r->step_end[j->step - 1] = now + 5000;
	if (x->submit_at == INT64_MAX && x->next < r->n && r->job[x->next].step == j->step + 2)
		x->submit_at = now + 5000; /* the waiting thread wakes */
}

static void take(struct execution *x, int64_t now)
{
	while (x->n_idle && x->ready.n) {
		uint32_t i = pull(&x->ready).value;
		int worker = x->idle[--x->n_idle];
		struct job *j = &x->r->job[i];
		int64_t length = j->stop;

		j->worker = worker;
		j->pop = (now > j->ready ? now : j->ready) + POP_NS;
		j->start = j->pop + START_NS;
		j->stop = j->start + length;
		x->running[worker] = i;
		push(&x->busy, j->stop, (uint32_t)worker);
	}
}

static void open_execution(struct execution *x, struct run *r)
{
	const struct shape *s = &r->shape;

	memset(x, 0, sizeof *x);
	x->r = r;
	successors(x);
	x->step_left = need(calloc((size_t)s->steps + 2, sizeof *x->step_left));
	x->ready.a = need(malloc(((size_t)r->n + 1) * sizeof *x->ready.a));
	x->busy.a = need(malloc((size_t)s->workers * sizeof *x->busy.a));
	x->idle = need(malloc((size_t)s->workers * sizeof *x->idle));
	x->running = need(malloc((size_t)s->workers * sizeof *x->running));
	r->step_begin = need(calloc((size_t)s->steps, sizeof *r->step_begin));
	r->step_submitted = need(calloc((size_t)s->steps, sizeof *r->step_submitted));
	r->step_end = need(calloc((size_t)s->steps, sizeof *r->step_end));
	r->wait_begin = need(calloc((size_t)s->steps, sizeof *r->wait_begin));
	for (uint32_t i = 0; i < r->n; i++) {
		r->job[i].left = r->job[i].n_deps + 1;
		x->step_left[r->job[i].step]++;
	}
	for (int w = s->workers - 1; w >= 0; w--)
		x->idle[x->n_idle++] = w;
	x->submit_at = 100000;
}

void make_execute(struct run *r)
{
	struct execution x;

	open_execution(&x, r);
	while (x.busy.n || x.submit_at != INT64_MAX) {
		int64_t now;

		if (!x.busy.n || x.submit_at < x.busy.a[0].key) {
			now = x.submit_at;
			submit(&x);
		} else {
			struct item done = pull(&x.busy);

			now = done.key;
			finish(&x, (int)done.value, now);
		}
		take(&x, now);
	}
	free(x.first_succ), free(x.succ), free(x.step_left), free(x.ready.a), free(x.busy.a);
	free(x.idle), free(x.running);
}
