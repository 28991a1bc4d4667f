/* SPDX-License-Identifier: Apache-2.0 */
/* The graph of a replay, and the simulation. */
#include "tools/trace/replay.h"

#include <stdlib.h>
#include <string.h>

/* ---- the graph ---- */

/* Tasks that start in the window, by index; rank is their place in the window's order. */
static void choose(const struct trace_window *w, struct replay *r, uint32_t *local, uint32_t low,
		   uint32_t range)
{
	const struct trace *t = w->trace;
	uint32_t rank = 0;

	for (uint32_t i = 0; i < w->n; i++)
		if (t->task[w->task[i]].start >= w->begin)
			local[w->task[i] - low] = 0;
	for (uint32_t i = 0; i < range; i++)
		if (local[i] != TRACE_NO_TASK) {
			r->task[r->n] = low + i;
			local[i] = r->n++;
		}
	for (uint32_t i = 0; i < w->n; i++)
		if (local[w->task[i] - low] != TRACE_NO_TASK)
			r->rank[local[w->task[i] - low]] = rank++;
}

static uint32_t find(const uint32_t *local, uint32_t low, uint32_t n, uint32_t task)
{
	return task < low || task - low >= n ? TRACE_NO_TASK : local[task - low];
}

static int connect(struct replay *r, const uint32_t *local, uint32_t low, uint32_t range)
{
	const struct trace *t = r->trace;
	uint32_t edges = 0, at = 0;

	for (uint32_t i = 0; i < r->n; i++) {
		const struct trace_task *k = &t->task[r->task[i]];

		for (uint32_t s = 0; s < k->n_succ; s++) {
			uint32_t to = find(local, low, range, t->succ[k->first_succ + s]);

			if (to == TRACE_NO_TASK)
				continue;
			r->n_pred[to]++;
			edges++;
		}
	}
	r->succ = malloc(((size_t)edges + 1) * sizeof *r->succ);
	if (!r->succ)
		return -1;
	for (uint32_t i = 0; i < r->n; i++) {
		const struct trace_task *k = &t->task[r->task[i]];

		r->first_succ[i] = at;
		for (uint32_t s = 0; s < k->n_succ; s++) {
			uint32_t to = find(local, low, range, t->succ[k->first_succ + s]);

			if (to != TRACE_NO_TASK)
				r->succ[at++] = to;
		}
	}
	r->first_succ[r->n] = at;
	return 0;
}

/* ---- submission ---- */

/*
 * What the submitting thread waited for: the last task of the last step that ended while it did;
 * where no step did, the last task that ended.
 */
static uint32_t awaited(const struct trace *t, const struct trace_host *h, const uint32_t *by_stop,
			uint32_t n)
{
	uint32_t low = 0, high = n;
	int64_t ended = INT64_MIN;

	for (int s = 0; s < t->n_steps; s++)
		if (t->step[s].end > h->begin && t->step[s].end <= h->end && t->step[s].end > ended)
			ended = t->step[s].end;
	while (low < high) { /* the first that stops after it */
		uint32_t middle = low + (high - low) / 2;

		if (t->task[by_stop[middle]].stop <= (ended == INT64_MIN ? h->end : ended))
			low = middle + 1;
		else
			high = middle;
	}
	return low && t->task[by_stop[low - 1]].stop > h->begin ? by_stop[low - 1] : TRACE_NO_TASK;
}

static uint32_t *order_by_stop(const struct replay *r)
{
	struct trace_key *key = malloc(((size_t)r->n + 1) * sizeof *key);
	uint32_t *order = malloc(((size_t)r->n + 1) * sizeof *order);

	for (uint32_t i = 0; key && i < r->n; i++)
		key[i] = (struct trace_key){ r->trace->task[r->task[i]].stop, r->task[i] };
	if (!key || !order || !trace_sort(key, r->n)) {
		free(key), free(order);
		return NULL;
	}
	for (uint32_t i = 0; i < r->n; i++)
		order[i] = key[i].value;
	free(key);
	return order;
}

static int by_begin(const void *a, const void *b)
{
	const struct trace_host *p = a, *q = b;

	return p->begin < q->begin ? -1 : p->begin > q->begin;
}

/* Waits, by time; NULL: none or no memory (*n says which: UINT32_MAX). */
static struct trace_host *waits(const struct trace *t, uint32_t *n)
{
	struct trace_host *list = malloc(((size_t)t->n_hosts + 1) * sizeof *list);

	*n = list ? 0 : UINT32_MAX;
	for (uint32_t i = 0; list && i < t->n_hosts; i++)
		if (t->host[i].what == MOE_MXT_HOST_WAIT)
			list[(*n)++] = t->host[i];
	if (list && *n)
		qsort(list, *n, sizeof *list, by_begin);
	return list;
}

static int submissions(struct replay *r, int64_t begin, const uint32_t *local, uint32_t low,
		       uint32_t range)
{
	const struct trace *t = r->trace;
	uint32_t n_waits, next = 0, *by_stop = order_by_stop(r);
	struct trace_host *wait = waits(t, &n_waits);
	int64_t last = begin;

	if (!by_stop || !wait) {
		free(by_stop), free(wait);
		return -1;
	}
	for (uint32_t i = 0; i < r->n; i++) {
		struct replay_submission *s = &r->submission[i];
		int64_t submit = trace_submit(t, r->task[i]);

		s->wait_for = TRACE_NO_TASK;
		submit = submit > last ? submit : last;
		while (next < n_waits && wait[next].end <= last)
			next++;
		s->after = submit - last;
		if (next < n_waits && wait[next].begin >= last && wait[next].end <= submit) {
			uint32_t task = awaited(t, &wait[next], by_stop, r->n);
			uint32_t at = task == TRACE_NO_TASK ? task : find(local, low, range, task);

			if (at != TRACE_NO_TASK && at < i) {
				s->wait_for = at;
				s->wait_after = submit - t->task[task].stop;
				s->after = wait[next].begin - last;
			}
		}
		last = submit;
	}
	free(by_stop), free(wait);
	return 0;
}

/* ---- opening ---- */

static int allocate(struct replay *r, uint32_t n)
{
	size_t room = (size_t)n + 2;

	r->task = malloc(room * sizeof *r->task);
	r->rank = malloc(room * sizeof *r->rank);
	r->duration = malloc(room * sizeof *r->duration);
	r->release = malloc(room * sizeof *r->release);
	r->overhead = malloc(room * sizeof *r->overhead);
	r->first_succ = malloc(room * sizeof *r->first_succ);
	r->n_pred = calloc(room, sizeof *r->n_pred);
	r->submission = calloc(room, sizeof *r->submission);
	return r->task && r->rank && r->duration && r->release && r->overhead && r->first_succ &&
			       r->n_pred && r->submission
		       ? 0
		       : -1;
}

/* From the first moment of the graph in the window to its last. */
static int64_t origin(const struct replay *r, const struct trace_window *w)
{
	int64_t first = INT64_MAX;

	for (uint32_t i = 0; i < r->n; i++) {
		int64_t submit = trace_submit(r->trace, r->task[i]);

		first = submit < first ? submit : first;
	}
	return first < w->begin || !r->n ? w->begin : first;
}

/* What the runtime took: from when a task could be ready to when it was, and from when its worker
 * could begin it to when it did. */
static void delays(const struct trace *t, uint32_t i, int64_t *release, int64_t *overhead)
{
	const struct trace_task *k = &t->task[i];
	int64_t ready = trace_ready(t, i), could = trace_submit(t, i), free_at = ready;

	for (uint32_t p = 0; p < k->n_pred; p++)
		if (t->task[t->pred[k->first_pred + p]].stop > could)
			could = t->task[t->pred[k->first_pred + p]].stop;
	if (k->prev != TRACE_NO_TASK && t->task[k->prev].stop > free_at)
		free_at = t->task[k->prev].stop;
	*release = ready > could ? ready - could : 0;
	*overhead = k->start > free_at ? k->start - free_at : 0;
}

int replay_open(const struct trace_window *w, struct replay *r)
{
	const struct trace *t = w->trace;
	uint32_t low = UINT32_MAX, high = 0, range, *local;
	int64_t begin, last = INT64_MIN;

	memset(r, 0, sizeof *r);
	r->trace = t;
	for (uint32_t i = 0; i < w->n; i++) {
		low = w->task[i] < low ? w->task[i] : low;
		high = w->task[i] > high ? w->task[i] : high;
	}
	range = w->n ? high - low + 1 : 0;
	local = malloc(((size_t)range + 1) * sizeof *local);
	if (local)
		memset(local, 0xff, (size_t)range * sizeof *local);
	if (!local || allocate(r, w->n)) {
		free(local);
		replay_close(r);
		return -1;
	}
	choose(w, r, local, low, range);
	if (connect(r, local, low, range)) {
		free(local);
		replay_close(r);
		return -1;
	}
	begin = origin(r, w);
	for (uint32_t i = 0; i < r->n; i++) {
		last = t->task[r->task[i]].stop > last ? t->task[r->task[i]].stop : last;
		delays(t, r->task[i], &r->release[i], &r->overhead[i]);
	}
	r->recorded = r->n ? last - begin : 0;
	replay_reset(r);
	if (submissions(r, begin, local, low, range)) {
		free(local);
		replay_close(r);
		return -1;
	}
	free(local);
	return 0;
}

void replay_close(struct replay *r)
{
	free(r->task), free(r->rank), free(r->duration), free(r->release);
	free(r->overhead);
	free(r->first_succ), free(r->succ), free(r->n_pred), free(r->submission);
	memset(r, 0, sizeof *r);
}

void replay_result_free(struct replay_result *out)
{
	free(out->start), free(out->worker);
	memset(out, 0, sizeof *out);
}

/* ---- the simulation ---- */

struct event {
	int64_t time;
	uint32_t what; /* worker or task */
};

struct queue {
	struct event *a; /* heap */
	uint32_t n;
};

struct simulation {
	const struct replay *r;
	const struct replay_machine *m;
	const struct replay_scheduler *s;
	struct replay_result *out;
	void *state;
	uint32_t *left;	    /* predecessors, and its submission */
	int64_t *ended;	    /* of tasks that the submitting thread waits for; INT64_MIN: not yet */
	struct queue busy;  /* workers, by the end of their task */
	struct queue later; /* tasks that are released and not ready yet */
	uint32_t *running;  /* [workers] */
	bool *idle;
	int n_idle, first_idle;
	uint32_t ready; /* pushed, not popped */
	uint32_t next;	/* to submit */
	int64_t submit_at, submitted_last;
};

static void push_event(struct queue *q, int64_t time, uint32_t what)
{
	uint32_t i = q->n++;

	for (; i && q->a[(i - 1) / 2].time > time; i = (i - 1) / 2)
		q->a[i] = q->a[(i - 1) / 2];
	q->a[i] = (struct event){ time, what };
}

static uint32_t pull_event(struct queue *q)
{
	struct event top = q->a[0], last = q->a[--q->n];
	uint32_t i = 0;

	for (;;) {
		uint32_t c = 2 * i + 1;

		if (c >= q->n)
			break;
		c += c + 1 < q->n && q->a[c + 1].time < q->a[c].time;
		if (last.time <= q->a[c].time)
			break;
		q->a[i] = q->a[c];
		i = c;
	}
	q->a[i] = last;
	return top.what;
}

static int64_t time_of_next(const struct queue *q)
{
	return q->n ? q->a[0].time : INT64_MAX;
}

/* When the next task is submitted; INT64_MAX: what it waits for has not ended. */
static int64_t submission_time(const struct simulation *x)
{
	const struct replay_submission *s = &x->r->submission[x->next];
	int64_t time = x->submitted_last + s->after;

	if (s->wait_for == TRACE_NO_TASK)
		return time;
	if (x->ended[s->wait_for] == INT64_MIN)
		return INT64_MAX;
	return x->ended[s->wait_for] + s->wait_after > time ? x->ended[s->wait_for] + s->wait_after
							    : time;
}

static void become_ready(struct simulation *x, uint32_t task, int64_t now)
{
	x->s->push(x->state, task, now);
	x->ready++;
}

static void release(struct simulation *x, uint32_t task, int64_t now)
{
	if (--x->left[task])
		return;
	if (x->r->release[task])
		push_event(&x->later, now + x->r->release[task], task);
	else
		become_ready(x, task, now);
}

static void submit(struct simulation *x, int64_t now)
{
	release(x, x->next++, now);
	x->submitted_last = now;
	x->submit_at = x->next < x->r->n ? submission_time(x) : INT64_MAX;
}

static void finish(struct simulation *x, uint32_t worker, int64_t now)
{
	const struct replay *r = x->r;
	uint32_t task = x->running[worker];

	x->ended[task] = now;
	x->idle[worker] = true;
	x->n_idle++;
	x->out->done++;
	x->out->makespan = now > x->out->makespan ? now : x->out->makespan;
	for (uint32_t i = r->first_succ[task]; i < r->first_succ[task + 1]; i++)
		release(x, r->succ[i], now);
	if (x->next < r->n && r->submission[x->next].wait_for == task)
		x->submit_at = submission_time(x);
}

static int64_t time_of(const struct simulation *x, uint32_t task, int worker, int64_t now)
{
	if (x->m->time)
		return x->m->time(x->r, task, worker, now, x->m->user);
	return x->r->overhead[task] + x->r->duration[task];
}

/* Idle workers ask until there is nothing for them. */
static void hand_out(struct simulation *x, int64_t now)
{
	for (int w = 0; w < x->m->workers && x->ready && x->n_idle; w++) {
		uint32_t task;
		int64_t time;

		if (!x->idle[w])
			continue;
		task = x->s->pop(x->state, w, now);
		if (task == TRACE_NO_TASK)
			continue;
		time = time_of(x, task, w, now);
		time = time > 0 ? time : 0;
		x->ready--;
		x->idle[w] = false;
		x->n_idle--;
		x->running[w] = task;
		x->out->busy += time;
		if (x->out->start) {
			x->out->start[task] = now;
			x->out->worker[task] = w;
		}
		push_event(&x->busy, now + time, (uint32_t)w);
	}
}

static int open_simulation(struct simulation *x, bool places)
{
	size_t n = (size_t)x->r->n + 1, workers = (size_t)x->m->workers;

	x->left = malloc(n * sizeof *x->left);
	x->ended = malloc(n * sizeof *x->ended);
	x->busy.a = malloc((workers + 1) * sizeof *x->busy.a);
	x->later.a = malloc(n * sizeof *x->later.a);
	x->running = malloc((workers + 1) * sizeof *x->running);
	x->idle = malloc(workers + 1);
	if (places) {
		x->out->start = malloc(n * sizeof *x->out->start);
		x->out->worker = malloc(n * sizeof *x->out->worker);
	}
	x->state = x->s->open(x->r, x->m);
	if (!x->left || !x->ended || !x->busy.a || !x->later.a || !x->running || !x->idle ||
	    !x->state || (places && (!x->out->start || !x->out->worker)))
		return -1;
	for (uint32_t i = 0; i < x->r->n; i++) {
		x->left[i] = x->r->n_pred[i] + 1;
		x->ended[i] = INT64_MIN;
	}
	memset(x->idle, 1, workers);
	x->n_idle = x->m->workers;
	x->submit_at = x->r->n ? submission_time(x) : INT64_MAX;
	return 0;
}

static int64_t next_moment(const struct simulation *x)
{
	int64_t now = x->submit_at, busy = time_of_next(&x->busy), later = time_of_next(&x->later);

	now = busy < now ? busy : now;
	return later < now ? later : now;
}

int replay_run(const struct replay *r, const struct replay_machine *m,
	       const struct replay_scheduler *s, bool places, struct replay_result *out)
{
	struct simulation x = { .r = r, .m = m, .s = s, .out = out };
	int rc;

	memset(out, 0, sizeof *out);
	rc = open_simulation(&x, places);
	while (!rc) {
		int64_t now = next_moment(&x);

		if (now == INT64_MAX)
			break;
		/* all that happens at one moment, then workers choose */
		while (x.submit_at == now)
			submit(&x, now);
		while (time_of_next(&x.busy) == now)
			finish(&x, pull_event(&x.busy), now);
		while (time_of_next(&x.later) == now)
			become_ready(&x, pull_event(&x.later), now);
		hand_out(&x, now);
	}
	if (x.state)
		s->close(x.state);
	free(x.left), free(x.ended), free(x.busy.a), free(x.later.a), free(x.running), free(x.idle);
	if (rc)
		replay_result_free(out);
	return rc;
}
