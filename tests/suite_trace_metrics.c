/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics of traces against values computed by hand. */
#include "tests/trace_build.h"

const char moe_suite_name[] = "trace_metrics";

/*
 * Two workers, 100 ns.
 *
 *          0    10   20   30   40   50   60   70   80   90  100
 * worker 0      |1 a      |         |3 b      |    |5 b|
 * worker 1       |2 b |                      |4 a          | |6 a
 *
 * 3 waits for 1 and 2, 4 for 3, 6 for 5.
 */
static const struct made six[] = {
	{ A, 0, 0, 0, 8, 10, 30, { 0 }, .step = 1, .layer = 1 },
	{ B, 1, 2, 2, 11, 12, 22, { 0 }, .step = 1, .layer = 1 },
	{ B, 0, 4, 30, 35, 40, 60, { 1, 2 }, .step = 1, .layer = 2 },
	{ A, 1, 50, 60, 60, 62, 90, { 3 }, .step = 1 },
	{ B, 0, 65, 65, 69, 70, 80, { 0 }, .step = 2, .layer = 1 },
	{ A, 1, 66, 80, 92, 95, 100, { 5 }, .step = 2, .layer = 2 },
};

static bool six_tasks(struct trace *t, struct trace_window *w, bool steps)
{
	struct made m[COUNT(six)];

	memcpy(m, six, sizeof six);
	for (size_t i = 0; !steps && i < COUNT(m); i++)
		m[i].step = 0;
	return MADE(t, m, 2, 1, NULL) && CHECK(trace_window(t, t->first, t->last, w) == 0);
}

static void done(struct trace *t, struct trace_window *w)
{
	trace_window_free(w);
	trace_free(t);
}

/* ---- sets ---- */

static void sets(void)
{
	struct trace_set a = { 0 }, b = { 0 }, c;

	/* [5,9) [1,3) [2,4) [9,12) [20,20): [1,4) [5,12), 3 + 7 */
	CHECK(!trace_set_add(&a, 5, 9) && !trace_set_add(&a, 1, 3) && !trace_set_add(&a, 2, 4));
	CHECK(!trace_set_add(&a, 9, 12) && !trace_set_add(&a, 20, 20) && !trace_set_close(&a));
	CHECK(a.n == 2 && a.begin[0] == 1 && a.end[0] == 4 && a.begin[1] == 5 && a.end[1] == 12);
	CHECK(trace_set_length(&a) == 10);
	CHECK(trace_set_within(&a, 3, 6) == 2); /* [3,4) and [5,6) */
	CHECK(trace_set_within(&a, 4, 5) == 0 && trace_set_within(&a, -9, 99) == 10);
	CHECK(!trace_set_add(&b, 0, 2) && !trace_set_add(&b, 6, 7) && !trace_set_add(&b, 11, 30));
	CHECK(!trace_set_close(&b));
	CHECK(trace_set_common(&a, &b) == 3); /* [1,2) [6,7) [11,12) */
	CHECK(!trace_set_subtract(&a, &b, &c));
	/* [2,4) [5,6) [7,11) */
	CHECK(c.n == 3 && trace_set_length(&c) == 7 && c.begin[2] == 7 && c.end[2] == 11);
	trace_set_free(&a), trace_set_free(&b), trace_set_free(&c);
}

/* ---- orders and windows ---- */

static void windows(void)
{
	struct trace_window w, part;
	int64_t begin, end;
	struct trace t;

	if (!six_tasks(&t, &w, true))
		return;
	CHECK(w.begin == 0 && w.end == 100 && w.n == 6 && w.task[1] == 1 && w.task[4] == 4);
	CHECK(t.n_steps == 2 && t.n_layers == 2 && trace_steady(&t) == 0);
	CHECK(t.task[0].n_succ == 1 && t.succ[t.task[0].first_succ] == 2);
	CHECK(t.task[5].prev == 3 && t.task[3].prev == 1 && t.task[1].prev == TRACE_NO_TASK);
	CHECK(t.step[0].submitted == 50 && t.step[0].end == 90);
	/* step 2 is submitted at 65, while step 1 runs: its own time is from 90 */
	trace_step_time(&t, 1, &begin, &end);
	CHECK(begin == 90 && end == 100);
	/* [50,85): 3 from 50 on, all of 5, 4 up to 85 */
	CHECK(trace_window(&t, 50, 85, &part) == 0 && part.n == 3);
	CHECK(trace_inside(&part, 2) == 10 && trace_inside(&part, 3) == 23);
	CHECK(trace_inside(&part, 4) == 10);
	trace_window_free(&part);
	CHECK(trace_window(&t, 22, 40, &part) == 0 && part.n == 1 && part.task[0] == 0);
	trace_window_free(&part);
	done(&t, &w);
}

/* ---- bounds ---- */

static void bounds(void)
{
	struct trace_bounds b;
	struct trace_window w, part;
	struct trace_path p;
	struct trace t;

	if (!six_tasks(&t, &w, true))
		return;
	CHECK(trace_bounds(&w, &b) == 0);
	CHECK(near(b.area, 46.5));	  /* (20 + 10 + 20 + 28 + 10 + 5) / 2 */
	CHECK(near(b.critical_path, 68)); /* 1, 3, 4: 20 + 20 + 28 */
	CHECK(isnan(b.bandwidth) && near(b.lower, 68) && near(b.efficiency, .68));
	CHECK(trace_critical_path(&w, true, &p) == 0);
	CHECK(p.n == 3 && p.task[0] == 0 && p.task[1] == 2 && p.task[2] == 3);
	CHECK(p.by_kind[A] == 48 && p.by_kind[B] == 20);
	CHECK(p.by_layer[0] == 20 && p.by_layer[1] == 20 && p.by_layer[2] == 28); /* 4: no layer */
	/* through 2: 10 + 20 + 28 = 58; through 5 and 6: 15 */
	CHECK(p.slack[0] == 0 && p.slack[1] == 10 && p.slack[2] == 0 && p.slack[3] == 0);
	CHECK(p.slack[4] == 53 && p.slack[5] == 53);
	trace_path_free(&p);
	CHECK(trace_window(&t, 50, 85, &part) == 0 && trace_bounds(&part, &b) == 0);
	CHECK(near(b.area, 21.5) && near(b.critical_path, 33)); /* 10 + 23 + 10; 3 and 4: 10 + 23 */
	trace_window_free(&part);
	done(&t, &w);
}

/* Part 1's work of 30 fits on worker 0 alone: 30, not (30 + 10) / 2. */
static void area_of_parts(void)
{
	static const struct made m[] = {
		{ A, 0, 0, 0, 0, 0, 30, { 0 }, .part = 1 },
		{ A, 1, 0, 0, 0, 0, 10, { 0 }, .part = 2 },
	};
	struct trace_bounds b;
	struct trace_window w;
	struct trace t;

	if (!MADE(&t, m, 2, 2, NULL) || !CHECK(trace_window(&t, 0, 30, &w) == 0))
		return;
	CHECK(trace_bounds(&w, &b) == 0 && near(b.area, 20) && b.area_parts == 0);
	t.strict = true;
	CHECK(trace_bounds(&w, &b) == 0 && near(b.area, 30) && b.area_parts == 1);
	CHECK(trace_may_run(&t, 0, 0) && !trace_may_run(&t, 0, 1));
	done(&t, &w);
}

static void bandwidth(void)
{
	/* worker 0 on node 0, worker 1 on node 1; 2 GB/s for both nodes: a byte per ns each */
	static const struct made m[] = {
		{ A,
		  0,
		  0,
		  0,
		  0,
		  0,
		  30,
		  { 0 },
		  .part = 2,
		  .read = 100,
		  .written = 20,
		  .remote = 50 },
		{ B, 1, 0, 0, 0, 0, 10, { 0 }, .part = 2, .layer = 1, .read = 40, .local = 30 },
	};
	struct trace_bounds b;
	struct trace_window w;
	struct trace_numa x;
	struct trace t;

	if (!MADE(&t, m, 2, 2, "rates.measured=1\nrates.read_all_gbps=2\n") ||
	    !CHECK(trace_window(&t, 0, 30, &w) == 0))
		return;
	/* node 0: 120 - 50; node 1: 50 + 40 */
	CHECK(trace_bounds(&w, &b) == 0 && near(b.bandwidth, 90) && b.bandwidth_node == 1);
	CHECK(!b.guessed_rate && near(b.lower, 90) && near(b.efficiency, 3));
	CHECK(trace_numa(&w, &x) == 0 && x.known);
	CHECK(x.local == 30 && x.remote == 50 && x.unplaced == 70 + 10);
	CHECK(x.kind[A][1] == 50 && x.kind[B][0] == 30 && x.layer[0][0] == 30);
	CHECK(x.matrix[0 * 3 + 1] == 50 && x.matrix[1 * 3 + 1] == 30 && x.matrix[0 * 3 + 0] == 0);
	trace_numa_free(&x);
	done(&t, &w);
}

/* ---- idle time ---- */

/*
 * Busy 93 of 200. Worker 0 is idle in [0,10) [30,40) [60,70) [80,100), worker 1 in [0,12) [22,62)
 * [90,95). Some task is ready and nobody has it in [0,11) [30,35) [65,69) [80,92).
 *
 * runtime    worker 0: ready to pop [0,8) [30,35) [65,69), pop to start 2 + 5 + 1: 17 + 8
 *            worker 1: [2,11) [90,92), 1 + 2 + 3: 11 + 6; in all 42, 14 of them from pop to start
 * placement  worker 0: [80,92); worker 1: [0,2) [30,35): 12 + 7
 * rest       worker 0: [60,65) [92,100); worker 1: [22,30) [35,60)
 * Everything is submitted at 66: submission [60,65) and all of worker 1's, 5 + 33; dependency 8.
 * With steps, step 1 counts until 90 and is submitted at 50: submission [22,30) [35,50), the rest
 * is dependency: 5 + 8 + 10.
 */
static void idle(void)
{
	int64_t c[TRACE_CAUSES], d[TRACE_CAUSES];
	struct trace_window w;
	struct trace_idle *x;
	struct trace t;

	for (int steps = 0; steps < 2; steps++) {
		if (!six_tasks(&t, &w, steps))
			return;
		x = trace_idle_new(&t);
		trace_idle_within(x, -1, 0, 100, c);
		CHECK(c[TRACE_SUBMISSION] == (steps ? 23 : 38));
		CHECK(c[TRACE_DEPENDENCY] == (steps ? 23 : 8));
		CHECK(c[TRACE_PLACEMENT] == 19 && c[TRACE_DATA] == 0 && c[TRACE_RUNTIME] == 42);
		CHECK(trace_busy_within(x, -1, 0, 100) == 93);
		trace_idle_within(x, 0, 75, 95, c); /* [80,92) placement, [92,95) dependency */
		CHECK(c[TRACE_PLACEMENT] == 12 && c[TRACE_DEPENDENCY] == 3);
		CHECK(trace_busy_within(x, 0, 75, 95) == 5);
		trace_idle_within(x, 0, 0, 100, c);
		trace_idle_within(x, 1, 0, 100, d);
		CHECK(c[TRACE_RUNTIME] == 25 && d[TRACE_RUNTIME] == 17);
		trace_idle_free(x);
		t.data_wait = true;
		x = trace_idle_new(&t);
		trace_idle_within(x, -1, 0, 100, c);
		CHECK(c[TRACE_DATA] == 14 && c[TRACE_RUNTIME] == 28);
		trace_idle_free(x);
		done(&t, &w);
	}
}

/* ---- the realised path ---- */

/* 6 waits for its worker (4 ends at 90, 5 at 80), 4 for 3, 3 for 1 as much as for its worker. */
static void realised(void)
{
	struct trace_realised r;
	struct trace_window w;
	struct trace t;

	if (!six_tasks(&t, &w, false))
		return;
	CHECK(trace_realised(&w, &r) == 0 && r.n == 4);
	CHECK(r.task[0] == 0 && r.task[1] == 2 && r.task[2] == 3 && r.task[3] == 5);
	CHECK(r.link[0] == TRACE_LINK_FIRST && r.link[1] == TRACE_LINK_DEPENDENCY);
	CHECK(r.link[2] == TRACE_LINK_DEPENDENCY && r.link[3] == TRACE_LINK_WORKER);
	CHECK(r.busy == 73 && r.gaps == 10 + 2 + 5);
	CHECK(r.gap_after[TRACE_LINK_DEPENDENCY] == 12 && r.gap_after[TRACE_LINK_WORKER] == 5);
	CHECK(r.by_kind[A] == 53 && r.by_kind[B] == 20);
	trace_realised_free(&r);
	t.task[5].submit =
		91; /* later than 4 ended: submission is to blame, the path is the same */
	CHECK(trace_realised(&w, &r) == 0 && r.n == 4 && r.link[3] == TRACE_LINK_SUBMISSION);
	trace_realised_free(&r);
	done(&t, &w);
}

/* ---- times, overlap, exposure ---- */

static void times(void)
{
	struct trace_times s;
	struct trace_window w;
	struct trace t;

	if (!six_tasks(&t, &w, false))
		return;
	CHECK(trace_times(&w, &s) == 0);
	CHECK(s.kind[A].n == 3 && s.kind[A].time == 53 && s.kind[A].median == 20);
	CHECK(s.kind[A].p95 == 28 && s.kind[B].median == 10 && s.kind[B].p95 == 20);
	CHECK(s.kind[UPDATE].n == 0 && s.kind[UPDATE].flops == NA && s.all.time == 93);
	CHECK(s.cell[A * 3 + 0].time == 20 && s.cell[B * 3 + 0].time == 20);
	CHECK(s.cell[B * 3 + 1].time == 20 && s.cell[A * 3 + 2].time == 28);
	CHECK(s.layer[0][MOE_MXT_PHASE_OTHER] == 40 && s.layer[2][MOE_MXT_PHASE_OTHER] == 28);
	trace_times_free(&s);
	done(&t, &w);
}

static void overlap(void)
{
	struct trace_exposure x;
	struct trace_realised r;
	struct trace_window w;
	struct trace t;
	int64_t *time;

	if (!six_tasks(&t, &w, false))
		return;
	CHECK(trace_overlap(&w, &time) == 0);
	CHECK(time[A * t.n_kinds + A] == 53 && time[B * t.n_kinds + B] == 40);
	CHECK(time[A * t.n_kinds + B] == 20 && time[B * t.n_kinds + A] == 20); /* [12,22) [70,80) */
	free(time);
	CHECK(trace_realised(&w, &r) == 0);
	/* a could run or ran in [0,30) [60,100): of b's 40 only [40,60) is alone; it is on the path
	 */
	CHECK(trace_exposed(&w, &r, "b", &x) == 0 && x.time == 40 && x.blocked == 20);
	CHECK(x.on_path == 20 && x.exposed == 20);
	/* b in [2,22) [30,60) [65,80): a alone in [22,30) [62,65) [80,90) [95,100) */
	CHECK(trace_exposed(&w, &r, "x|a", &x) == 0 && x.time == 53 && x.blocked == 26);
	CHECK(x.on_path == 53 && x.exposed == 53);
	CHECK(trace_exposed(&w, &r, "update", &x) == 0 && x.time == 0 && x.exposed == 0);
	trace_realised_free(&r);
	done(&t, &w);
}

/* ---- curves ---- */

static void curves(void)
{
	struct trace_window w;
	int32_t most[10];
	float mean[10];
	struct trace t;

	if (!six_tasks(&t, &w, false))
		return;
	CHECK(trace_curve(&t, TRACE_CURVE_RUNNING, 0, 100, 10, mean, most) == 0);
	CHECK(fabsf(mean[0]) < 1e-6f && fabsf(mean[1] - 1.8f) < 1e-5f && most[1] == 2);
	CHECK(fabsf(mean[2] - 1.2f) < 1e-5f && fabsf(mean[6] - .8f) < 1e-5f && most[6] == 1);
	CHECK(trace_curve(&t, TRACE_CURVE_READY, 0, 100, 10, mean, most) == 0);
	CHECK(fabsf(mean[0] - 1.6f) < 1e-5f && most[0] == 2); /* [0,8) and [2,10) */
	CHECK(fabsf(mean[8] - 1) < 1e-5f && fabsf(mean[9] - .2f) < 1e-5f);
	/* submitted and not ended, [55,75): 3 to 60, 4 all of it, 5 and 6 from 65 and 66 */
	CHECK(trace_curve(&t, TRACE_CURVE_SUBMITTED, 55, 75, 1, mean, NULL) == 0);
	CHECK(fabsf(mean[0] - (5 + 20 + 10 + 9) / 20.f) < 1e-5f);
	done(&t, &w);
}

/* ---- any trace: what must add up ---- */

static uint64_t state;

static int64_t below(int64_t n)
{
	state = state * 6364136223846793005ull + 1442695040888963407ull;
	return (int64_t)(state >> 33) % n;
}

static void random_trace(struct made *m, int n, int workers)
{
	int64_t end[8] = { 0 }, submit = 0;

	for (int i = 0; i < n; i++) {
		int worker = (int)below(workers);
		int64_t ready = submit += below(20);

		m[i] = (struct made){ .kind = (int)below(4),
				      .worker = worker,
				      .submit = submit,
				      .step = 1 + i * 3 / n,
				      .layer = (int)below(4) };
		for (int p = 0; p < 3 && i && below(2); p++) {
			int pred = 1 + (int)below(i);

			if ((p > 0 && m[i].pred[0] == pred) || (p > 1 && m[i].pred[1] == pred))
				break;
			m[i].pred[p] = pred;
			ready = m[pred - 1].stop > ready ? m[pred - 1].stop : ready;
		}
		m[i].ready = ready;
		m[i].pop = (ready > end[worker] ? ready : end[worker]) + below(5);
		m[i].start = m[i].pop + below(3);
		end[worker] = m[i].stop = m[i].start + below(30);
	}
}

static void check_sums(const struct trace *t)
{
	int64_t c[TRACE_CAUSES], sum = 0, begin = t->first + below(t->last - t->first + 1);
	int64_t end = begin + below(t->last - begin + 1);
	struct trace_idle *x = trace_idle_new(t);
	struct trace_realised r;
	struct trace_bounds b;
	struct trace_window w;

	trace_idle_within(x, -1, begin, end, c);
	for (int i = 0; i < TRACE_CAUSES; i++) {
		CHECK(c[i] >= 0);
		sum += c[i];
	}
	CHECK(sum + trace_busy_within(x, -1, begin, end) == (end - begin) * t->n_workers);
	CHECK(trace_window(t, begin, end, &w) == 0 && trace_bounds(&w, &b) == 0);
	CHECK(b.area <= b.makespan && b.critical_path <= b.makespan);
	trace_window_free(&w);
	CHECK(trace_window(t, t->first, t->last, &w) == 0 && trace_realised(&w, &r) == 0);
	if (r.n) { /* what its first task waited for ended before the window */
		begin = r.link[0] == TRACE_LINK_FIRST ? t->task[r.task[0]].start : w.begin;
		CHECK(begin + r.busy + r.gaps == t->task[r.task[r.n - 1]].stop);
	}
	trace_realised_free(&r);
	trace_window_free(&w);
	trace_idle_free(x);
}

/* The definition, word for word, for one worker at one moment; -1: it is busy. */
static int cause_at(const struct trace *t, int worker, int64_t now)
{
	bool mine = false, any = false, unsubmitted = false;
	int32_t step = INT32_MAX; /* the current one */

	for (int i = t->n_steps - 1; i >= 0; i--) {
		int64_t ended = INT64_MIN;

		for (int k = 0; k <= i; k++)
			ended = t->step[k].end > ended ? t->step[k].end : ended;
		step = now < ended ? t->step[i].step : step;
	}
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		const struct trace_task *k = &t->task[i];
		bool waits = k->ready <= now && now < k->pop;

		if (k->worker == worker && k->start <= now && now < k->stop)
			return -1;
		mine = mine || (k->worker == worker && k->ready <= now && now < k->start &&
				(waits || k->pop <= now));
		any = any || waits;
		unsubmitted = unsubmitted || (k->step <= step && k->submit > now);
	}
	return mine	     ? TRACE_RUNTIME
	       : any	     ? TRACE_PLACEMENT
	       : unsubmitted ? TRACE_SUBMISSION
			     : TRACE_DEPENDENCY;
}

static void causes(void)
{
	state = moe_test_seed();
	for (int round = 0; round < (moe_test_full() ? 200 : 20); round++) {
		int64_t got[TRACE_CAUSES], want[TRACE_CAUSES] = { 0 };
		int n = 1 + (int)below(60), workers = 1 + (int)below(4);
		struct trace_idle *x;
		struct made m[60];
		struct trace t;

		random_trace(m, n, workers);
		if (!made_trace(&t, m, (size_t)n, workers, 1, NULL))
			return;
		for (int64_t now = t.first; now < t.last; now++)
			for (int w = 0; w < workers; w++) {
				int cause = cause_at(&t, w, now);

				want[cause < 0 ? 0 : cause] += cause >= 0;
			}
		x = trace_idle_new(&t);
		trace_idle_within(x, -1, t.first, t.last, got);
		CHECK(!memcmp(got, want, sizeof got));
		trace_idle_free(x);
		trace_free(&t);
	}
}

static void sums(void)
{
	int rounds = moe_test_full() ? 2000 : 200;

	state = moe_test_seed();
	for (int i = 0; i < rounds; i++) {
		struct made m[120];
		struct trace t;
		int n = 1 + (int)below(120), workers = 1 + (int)below(8);

		random_trace(m, n, workers);
		if (!made_trace(&t, m, (size_t)n, workers, 1, NULL))
			return;
		check_sums(&t);
		trace_free(&t);
	}
}

const struct moe_test moe_suite_tests[] = {
	{ "sets of times", sets },
	{ "windows, orders, steps", windows },
	{ "area, critical path, slack, efficiency", bounds },
	{ "area of parts", area_of_parts },
	{ "bandwidth and NUMA", bandwidth },
	{ "idle time by cause", idle },
	{ "realised critical path", realised },
	{ "times per kind and layer", times },
	{ "overlap and exposure", overlap },
	{ "curves", curves },
	{ "random traces: causes as defined, moment by moment", causes },
	{ "random traces: causes sum to the idle time, bounds are bounds", sums },
	{ NULL, NULL },
};
