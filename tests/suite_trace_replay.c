/* SPDX-License-Identifier: Apache-2.0 */
/* Replays, comparisons and the rules of good traces, on small traces by hand. */
#include "tests/trace_build.h"
#include "tools/trace/compare.h"
#include "tools/trace/replay.h"
#include "tools/trace/verify.h"

const char moe_suite_name[] = "trace_replay";

/* ---- replays ---- */

/*
 * A plan, two groups, a sum: 10 + 30 + 10 = 50, group 1 on the other worker.
 *
 *          0    10             40   50
 * worker 0 |plan|gate_up 0     |sum |
 * worker 1      |1   |
 */
static const struct made layer[] = {
	{ PLAN, 0, 0, 0, 0, 0, 10, { 0 }, .step = 1, .layer = 1, .phase = 1, .rows = 4 },
	{ GATE_UP,
	  0,
	  0,
	  10,
	  10,
	  10,
	  40,
	  { 1 },
	  .step = 1,
	  .layer = 1,
	  .group = 1,
	  .phase = 1,
	  .part = 1,
	  .rows = 6 },
	{ GATE_UP,
	  1,
	  0,
	  10,
	  10,
	  10,
	  20,
	  { 1 },
	  .step = 1,
	  .layer = 1,
	  .group = 2,
	  .phase = 1,
	  .part = 1,
	  .rows = 2 },
	{ COMBINE, 0, 0, 40, 40, 40, 50, { 2, 3 }, .step = 1, .layer = 1, .phase = 1 },
};

static int64_t makespan(const struct replay *r, int workers)
{
	struct replay_machine m = replay_machine_of(r, workers);
	struct replay_result out;
	int64_t v;

	CHECK(replay_run(r, &m, &replay_list, true, &out) == 0 && out.done == r->n);
	for (uint32_t i = 0; i < r->n; i++)
		CHECK(out.worker[i] >= 0 && out.worker[i] < m.workers && out.start[i] >= 0);
	v = out.makespan;
	replay_result_free(&out);
	return v;
}

static void changes(void)
{
	struct replay_gains g;
	struct trace_window w;
	struct replay r;
	struct trace t;

	if (!MADE(&t, layer, 2, 1, NULL) || !CHECK(trace_window(&t, 0, 50, &w) == 0) ||
	    !CHECK(replay_open(&w, &r) == 0))
		return;
	CHECK(r.n == 4 && r.recorded == 50 && makespan(&r, 0) == 50);
	CHECK(makespan(&r, 1) == 60 && makespan(&r, 9) == 50);
	replay_scale(&r, GATE_UP, .5); /* 10 + 15 + 10 */
	CHECK(makespan(&r, 0) == 35);
	replay_scale(&r, GATE_UP, 0);
	CHECK(makespan(&r, 0) == 20);
	replay_reset(&r);
	CHECK(replay_equalise_experts(&r) == 0 && r.duration[1] == 20 && r.duration[2] == 20);
	CHECK(r.duration[0] == 10 && makespan(&r, 0) == 40);
	CHECK(replay_gains(&w, &g) == 0 && g.recorded == 50 && g.base == 50);
	CHECK(g.equal_experts == 40 && g.without_repack == NA && g.without_update == NA);
	replay_close(&r);
	t.strict = true; /* one part with both workers: nothing changes */
	CHECK(replay_open(&w, &r) == 0 && makespan(&r, 0) == 50);
	replay_close(&r);
	/* only worker 0 may run the groups: 10 + 30 + 10 + 10; dealt to one of two: the same */
	t.part_first[1] = 1;
	CHECK(replay_open(&w, &r) == 0 && makespan(&r, 0) == 60);
	replay_close(&r);
	trace_window_free(&w);
	trace_free(&t);
}

/* Parts on workers of their own, dealt anew with four workers: two each. */
static void parts(void)
{
	static const struct made m[] = {
		{ A, 0, 0, 0, 0, 0, 10, { 0 }, .part = 1 },
		{ A, 0, 0, 0, 10, 10, 20, { 0 }, .part = 1 },
		{ A, 0, 0, 0, 20, 20, 30, { 0 }, .part = 1 },
		{ A, 0, 0, 0, 30, 30, 40, { 0 }, .part = 1 },
		{ A, 1, 0, 0, 0, 0, 10, { 0 }, .part = 2 },
	};
	struct trace_window w;
	struct replay r;
	struct trace t;

	if (!MADE(&t, m, 2, 2, NULL) || !CHECK(trace_window(&t, 0, 40, &w) == 0))
		return;
	t.strict = true;
	CHECK(replay_open(&w, &r) == 0 && makespan(&r, 0) == 40 && makespan(&r, 4) == 20);
	CHECK(makespan(&r, 1) == 50);
	replay_close(&r);
	t.strict = false; /* 50 of work on two */
	CHECK(replay_open(&w, &r) == 0 && makespan(&r, 0) == 30);
	replay_close(&r);
	trace_window_free(&w);
	trace_free(&t);
}

/* Step 2 is submitted after a wait for step 1: where step 1 is faster, so is its submission. */
static void submission(void)
{
	static const struct made m[] = {
		{ A, 0, 0, 0, 1, 2, 100, { 0 }, .step = 1 },
		{ A, 0, 110, 110, 110, 110, 210, { 0 }, .step = 2 },
	};
	struct trace_window w;
	struct replay r;
	struct trace t;

	if (!MADE(&t, m, 1, 1, NULL) || !CHECK(trace_window(&t, 0, 210, &w) == 0))
		return;
	/* not known to wait: it is submitted at 110 whatever happens */
	CHECK(replay_open(&w, &r) == 0 && r.recorded == 210 && makespan(&r, 0) == 210);
	replay_scale(&r, A, .5);
	CHECK(makespan(&r, 0) == 110 + 50);
	replay_close(&r);
	t.host = made_copy(&(struct trace_host){ 5, 108, MOE_MXT_HOST_WAIT, 1 }, sizeof *t.host);
	t.n_hosts = 1;
	CHECK(replay_open(&w, &r) == 0);
	CHECK(r.submission[1].wait_for == 0 && r.submission[1].wait_after == 10);
	CHECK(r.overhead[0] == 2 && makespan(&r, 0) == 2 + 98 + 10 + 100);
	replay_scale(&r, A, .5);
	CHECK(makespan(&r, 0) == 2 + 49 + 10 + 50);
	replay_close(&r);
	trace_window_free(&w);
	trace_free(&t);
}

/* A task that was ready 4 after its predecessor ended and was begun 3 later, on a worker that was
 * busy for 1 of them. */
static void delays(void)
{
	static const struct made m[] = {
		{ A, 0, 0, 0, 0, 0, 10, { 0 }, .step = 0 },
		{ B, 1, 0, 0, 0, 0, 15, { 0 }, .step = 0 },
		{ A, 1, 0, 14, 16, 17, 27, { 1 }, .step = 0 },
	};
	struct trace_window w;
	struct replay r;
	struct trace t;

	if (!MADE(&t, m, 2, 1, NULL) || !CHECK(trace_window(&t, 0, 27, &w) == 0))
		return;
	CHECK(replay_open(&w, &r) == 0 && r.release[2] == 4 && r.overhead[2] == 2);
	CHECK(r.release[0] == 0 && r.overhead[0] == 0);
	CHECK(makespan(&r, 0) == 14 + 2 + 10); /* worker 0 is free and takes it at 14 */
	replay_close(&r);
	trace_window_free(&w);
	trace_free(&t);
}

/* No list schedule is below the bounds, or above all of its work in a row. */
static void within_bounds(void)
{
	uint64_t state = moe_test_seed();

	for (int round = 0; round < 100; round++) {
		struct made m[80] = { 0 };
		struct trace_bounds b;
		struct trace_window w;
		struct replay r;
		struct trace t;
		int64_t at = 0, work = 0, got;
		int workers;

		for (int i = 0; i < 80; i++) { /* recorded one after the other */
			state = state * 6364136223846793005ull + 1442695040888963407ull;
			m[i] = (struct made){ .ready = at, .pop = at, .start = at };
			at = m[i].stop = at + (int64_t)(state >> 40) % 50;
			for (int p = 0; i && p < 2; p++)
				m[i].pred[p] = 1 + (int)((state >> (33 + 9 * p)) % (unsigned)i);
			if (m[i].pred[0] == m[i].pred[1])
				m[i].pred[1] = 0;
		}
		workers = 1 + (int)((state >> 50) % 7);
		if (!MADE(&t, m, 1, 1, NULL) || !CHECK(trace_window(&t, 0, at, &w) == 0))
			return;
		CHECK(trace_bounds(&w, &b) == 0 && replay_open(&w, &r) == 0);
		got = makespan(&r, workers);
		work = at;
		CHECK((double)got >= b.critical_path && got * workers >= work && got <= work);
		CHECK(makespan(&r, 1) == work);
		replay_close(&r);
		trace_window_free(&w);
		trace_free(&t);
	}
}

/* ---- comparisons ---- */

static void differences(void)
{
	const double a[] = { 10, 10, 10 }, b[] = { 11, 11, 11 }, c[] = { 8, 12, 10 },
		     zero[] = { 0 };
	struct trace_difference d = trace_difference(a, 3, b, 3);

	CHECK(d.before == 10 && d.after == 11 && near(d.change, .1));
	CHECK(near(d.low, .1) && near(d.high, .1));
	d = trace_difference(a, 3, c, 3);
	CHECK(d.change == 0 && near(d.low, -.2) && near(d.high, .2));
	d = trace_difference(a, 3, c, 2);
	CHECK(d.after == 10 && isnan(d.low));
	d = trace_difference(zero, 1, c, 3);
	CHECK(isnan(d.change) && d.before == 0 && isnan(d.low));
}

static void series(void)
{
	/* step 1: 100; step 2: until 300, of which 50 idle while it is not submitted */
	static const struct made m[] = {
		{ A, 0, 0, 0, 0, 0, 100, { 0 }, .step = 1, .layer = 1 },
		{ B, 0, 150, 150, 150, 150, 300, { 0 }, .step = 2, .layer = 2 },
	};
	struct trace_series_list l;
	struct trace t;

	if (!MADE(&t, m, 1, 1, NULL))
		return;
	t.step[0].tokens = 10;
	t.step[1].tokens = 50;
	CHECK(trace_series(&t, false, &l) == 0 && l.n == 2 && l.tokens == 30);
	CHECK(!strcmp(l.series[0].name, "step") && l.series[0].value[0] == 100);
	CHECK(l.series[0].value[1] == 150); /* from 150, where it was begun */
	CHECK(!strcmp(l.series[6].name, "a") && l.series[6].value[0] == 100);
	CHECK(l.series[6].value[1] == 0 && l.series[7].value[1] == 150);
	CHECK(!strcmp(l.series[l.n_series - 1].name, "layer.1"));
	CHECK(l.series[l.n_series - 1].value[1] == 150);
	trace_series_free(&l);
	CHECK(trace_series(&t, true, &l) == 0 && l.series[0].value[0] == 10 &&
	      l.series[0].value[1] == 3);
	trace_series_free(&l);
	trace_free(&t);
}

/* ---- rules ---- */

/* Findings per rule: one of that rule, and no other. */
static void expect(const struct trace *t, enum trace_rule rule)
{
	struct trace_verify v = { .most = 10 };

	CHECK(trace_verify(t, &v) == 1 && v.found[rule] == 1);
}

static void expect_good(const struct trace *t)
{
	struct trace_verify v = { .most = 10, .out = stderr };

	CHECK(trace_verify(t, &v) == 0);
}

static void rules(void)
{
	static const struct trace_routing routing = { 1, 10, 4, 8, 1, 0, 0, 3, 0 };
	static const int64_t load[] = { 6, 0, 2 };
	struct trace_task kept;
	struct trace t;

	if (!MADE(&t, layer, 2, 1, NULL))
		return;
	made_routing(&t, &routing, 1, load, 3);
	expect_good(&t);

	kept = t.task[1];
	t.task[1].rows = 5;
	expect(&t, TRACE_RULE_TOKENS);
	t.task[1] = kept;
	t.routing->slots = 7; /* experts have more than there are */
	expect(&t, TRACE_RULE_TOKENS);
	t.routing->slots = 9;
	expect(&t, TRACE_RULE_TOKENS);
	{
		struct trace_verify v = { .skipped_slots = true };

		CHECK(trace_verify(&t, &v) == 0);
	}
	t.routing->slots = 8;

	t.task[1].start = t.task[1].pop - 1; /* 9: also before the plan ends */
	{
		struct trace_verify v = { 0 };

		CHECK(trace_verify(&t, &v) == 3 && v.found[TRACE_RULE_ORDER] == 1);
		CHECK(v.found[TRACE_RULE_DEPS] == 1 && v.found[TRACE_RULE_WORKER] == 1);
	}
	t.task[1] = kept;
	t.task[3].ready = 39;
	expect(&t, TRACE_RULE_DEPS);
	t.task[3].ready = 40;

	t.strict = true;
	t.part_first[1] = 1;
	expect(&t, TRACE_RULE_PLACEMENT); /* task 3 on worker 1 */
	t.strict = false;

	t.ended = false;
	expect(&t, TRACE_RULE_FILE);
	{
		struct trace_verify v = { .partial = true };

		CHECK(trace_verify(&t, &v) == 0);
	}
	t.ended = true;
	t.not_run = 2;
	expect(&t, TRACE_RULE_FILE);
	t.not_run = 0;
	t.bad_rows = 3;
	expect(&t, TRACE_RULE_FILE);
	trace_free(&t);
}

static void lost(void)
{
	struct trace t;

	if (!MADE(&t, layer, 2, 1, NULL))
		return;
	t.counter_name = malloc(2 * sizeof *t.counter_name);
	t.counter_name[0] = strdup("lost_executed");
	t.counter_name[1] = strdup("executed");
	t.n_counter_names = 2;
	t.counter = made_copy((struct trace_counter[]){ { 1, 0, 0 }, { 1, 4, 1 } },
			      2 * sizeof *t.counter);
	t.n_counters = 2;
	expect_good(&t);
	t.counter[0].value = 1;
	expect(&t, TRACE_RULE_FILE);
	t.counter[0].value = 0;
	t.counter[1].value = 5;
	expect(&t, TRACE_RULE_FILE);
	trace_free(&t);
}

/* A task of layer 0. */
#define GROUP(what, worker, begin, end, after, of_group, in_phase)                                 \
	{                                                                                          \
		what, worker, 0, begin, begin, begin, end, { after },                              \
			.layer = 1, .group = of_group, .phase = in_phase                           \
	}

static void repacks(void)
{
	static const struct made m[] = {
		GROUP(REPACK_BWD, 0, 0, 10, 0, 1, 2), GROUP(DOWN_BWD, 1, 10, 20, 1, 1, 2),
		GROUP(DOWN_BWD, 0, 10, 20, 0, 2, 2),  GROUP(REPACK, 0, 20, 30, 0, 1, 3),
		GROUP(GATE_UP, 1, 30, 40, 4, 1, 1),
	};
	struct trace_verify v = { 0 };
	struct trace t;

	if (!MADE(&t, m, 2, 1, NULL))
		return;
	expect_good(&t);
	t.task[1].n_pred = 0; /* in order by luck */
	expect(&t, TRACE_RULE_REPACK);
	t.task[1].n_pred = 1;
	t.task[1].start = t.task[1].pop = 9; /* before its copy is made */
	CHECK(trace_verify(&t, &v) == 3 && v.found[TRACE_RULE_REPACK] == 1);
	CHECK(v.found[TRACE_RULE_ORDER] == 1 && v.found[TRACE_RULE_DEPS] == 1);
	t.task[1].start = t.task[1].pop = 10;
	t.task[4].start = t.task[4].pop = t.task[4].ready =
		29; /* reads what is repacked until 30 */
	t.task[4].n_pred = 0;
	expect(&t, TRACE_RULE_REPACK);
	trace_free(&t);
}

/* What finish() refuses, so that nothing after it has to look. */
static void refused(void)
{
	struct made m[COUNT(layer)];
	struct trace t;
	char error[200];

	if (!MADE(&t, layer, 2, 1, NULL))
		return;
	t.task[1].kind = 99;
	CHECK(trace_finish(&t, error, sizeof error) == -1 && strstr(error, "task 2") &&
	      strstr(error, "kind"));
	t.task[1].kind = GATE_UP;
	t.task[1].stop = t.task[1].start - 1;
	CHECK(trace_finish(&t, error, sizeof error) == -1 && strstr(error, "stops before"));
	t.task[1].stop = t.task[1].start;
	t.pred[t.task[1].first_pred] = 3; /* 2 waits for 4, which waits for 2 */
	CHECK(trace_finish(&t, error, sizeof error) == -1 && strstr(error, "submitted later"));
	t.pred[t.task[1].first_pred] = 0;
	t.task[2].id = 2;
	CHECK(trace_finish(&t, error, sizeof error) == -1 && strstr(error, "ascend"));
	t.task[2].id = 3;
	t.task[2].n_pred = 100;
	CHECK(trace_finish(&t, error, sizeof error) == -1 && strstr(error, "predecessors"));
	trace_free(&t);
	memcpy(m, layer, sizeof m);
	CHECK(made_trace(&t, m, 0, 1, 1, NULL) && t.n_steps == 0 && t.last == 0);
	trace_free(&t);
}

const struct moe_test moe_suite_tests[] = {
	{ "replays with changes", changes },
	{ "parts", parts },
	{ "submission waits", submission },
	{ "the runtime's delays", delays },
	{ "random graphs: replays within bounds", within_bounds },
	{ "differences", differences },
	{ "series over steps", series },
	{ "rules of a good trace", rules },
	{ "lost records", lost },
	{ "repacks before readers", repacks },
	{ "impossible traces are refused", refused },
	{ NULL, NULL },
};
