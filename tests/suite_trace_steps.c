/* SPDX-License-Identifier: Apache-2.0 */
/* Metrics over steps, of experts and of outliers against values computed by hand. */
#include "tests/trace_build.h"

const char moe_suite_name[] = "trace_steps";

/* ---- steps ---- */

/* A step of one task with 1000 flops and 500 bytes. */
#define STEP(number, begin, end)                                                                   \
	{                                                                                          \
		A, 0, begin, begin, begin, begin, end, { 0 }, .step = number, .flops = 1000,       \
							      .read = 400, .written = 100          \
	}

static void rates(void)
{
	/* 100, 200, 100 and, after 50 of nothing, 400 ns */
	static const struct made m[] = { STEP(1, 0, 100), STEP(2, 100, 300), STEP(3, 300, 400),
					 STEP(4, 450, 850) };
	struct trace_rates r;
	struct trace_window w;
	struct trace t;

	if (!MADE(&t, m, 1, 1, NULL))
		return;
	for (int i = 0; i < 4; i++) {
		t.step[i].tokens = 10;
		t.step[i].trained = NA;
	}
	CHECK(trace_rates(&t, &r) == 0 && r.n == 3 && r.step[0].step == 2);
	CHECK(r.step[0].time == 200 && r.step[1].time == 100 && r.step[2].time == 400);
	CHECK(near(r.tokens.median, 5e7) && isnan(r.trained.median)); /* 10 / 200 ns */
	CHECK(near(r.tokens.low, 2.5e7) && near(r.tokens.high, 1e8)); /* of three: 7/27 each end */
	CHECK(near(r.gflops.median, 5) && near(r.gbps.median, 2.5));
	trace_rates_free(&r);
	CHECK(trace_window_steady(&t, &w) == 0 && w.begin == 100 && w.end == 850);
	CHECK(w.tokens == 30 && w.trained == NA && w.first_step == 2 && w.last_step == 4);
	trace_window_free(&w);
	trace_free(&t);
}

/* The tasks' steps are 3, 4, 5; who marked them counted 1, 2, 3. */
static void marks(void)
{
	static const struct made m[] = { STEP(3, 10, 100), STEP(4, 210, 300), STEP(5, 310, 400) };
	static const struct trace_mark mark[] = {
		{ 5, 7, NA, MOE_MXT_STEP_BEGIN, 1 },   { 105, 7, 70, MOE_MXT_STEP_END, 1 },
		{ 205, 8, NA, MOE_MXT_STEP_BEGIN, 2 }, { 305, 8, 80, MOE_MXT_STEP_END, 2 },
		{ 306, 9, NA, MOE_MXT_STEP_BEGIN, 3 }, { 405, 9, 90, MOE_MXT_STEP_END, 3 },
		{ 500, 1, 1, MOE_MXT_STEP_BEGIN, 4 },
	};
	struct trace t;
	char error[100];

	if (!MADE(&t, m, 1, 1, NULL))
		return;
	t.mark = made_copy(mark, sizeof mark);
	t.n_marks = COUNT(mark);
	CHECK(trace_finish(&t, error, sizeof error) == 0 && t.n_steps == 3);
	for (int i = 0; i < 3; i++)
		CHECK(t.step[i].tokens == 7 + i && t.step[i].trained == 70 + 10 * i);
	CHECK(t.step[0].begin == 5 && t.step[1].begin == 205 && t.step[2].begin == 306);
	CHECK(t.step[2].from == 306 && t.first == 5);
	for (uint32_t i = 0; i < t.n_marks; i++)
		t.mark[i].step += 2; /* the same numbers */
	CHECK(trace_finish(&t, error, sizeof error) == 0 && t.step[2].tokens == 9);
	trace_free(&t);
}

static void bootstrap(void)
{
	const double same[] = { 7, NAN, 7, 7, 7 }, two[] = { 1, 3 };
	double many[1000];
	struct trace_interval i = trace_bootstrap(same, 5), k;

	CHECK(i.n == 4 && i.median == 7 && i.low == 7 && i.high == 7);
	i = trace_bootstrap(two, 2);
	CHECK(i.median == 2 && isnan(i.low) && isnan(i.high));
	for (int n = 0; n < 1000; n++)
		many[n] = n;
	i = trace_bootstrap(many, 1000);
	k = trace_bootstrap(many, 1000);
	CHECK(i.median == 499.5 && i.low == k.low && i.high == k.high);
	/* ranks of the median's interval: 500 -+ 1.96 sqrt(1000) / 2 = 500 -+ 31 */
	CHECK(fabs(i.low - 469) < 6 && fabs(i.high - 531) < 6);
}

/* ---- experts ---- */

/* A task of step 3, layer 4. */
#define PART(what, worker, begin, end, after, of_group, direction)                                 \
	{                                                                                          \
		what, worker, 0, begin, begin, begin, end, { after },                              \
			.step = 3, .layer = 5, .group = of_group,                                  \
			.phase = MOE_MXT_PHASE_##direction                                         \
	}

static void experts(void)
{
	static const struct made m[] = {
		PART(PLAN, 0, 0, 10, 0, 0, FORWARD),	  PART(GATE_UP, 0, 10, 40, 1, 1, FORWARD),
		PART(GATE_UP, 1, 10, 20, 1, 2, FORWARD),  PART(DOWN, 0, 40, 50, 2, 1, FORWARD),
		PART(DOWN, 1, 20, 30, 3, 2, FORWARD),	  PART(DOWN_BWD, 0, 50, 65, 4, 1, BACKWARD),
		PART(DOWN_BWD, 1, 50, 55, 5, 2, BACKWARD)
	}; /* two micro-batches: 6, 2, 0, 4 together */
	static const struct trace_routing r[] = { { 1, 10, 6, 6, 3, 4, 0, 4, 0 },
						  { 1, 11, 6, 6, 3, 4, 1, 4, 4 } };
	static const int64_t load[] = { 2, 2, 0, 2, 4, 0, 0, 2 };
	struct trace_experts x;
	struct trace_window w;
	struct trace t;

	if (!MADE(&t, m, 2, 1, NULL) || !CHECK(trace_window(&t, 0, 65, &w) == 0))
		return;
	made_routing(&t, r, 2, load, 8);
	CHECK(trace_experts(&w, &x) == 0 && x.n == 2);
	CHECK(x.row[0].step == 3 && x.row[0].layer == 4 && x.row[0].direction == TRACE_FORWARD);
	CHECK(near(x.row[0].tokens_ratio, 2));	      /* 6 / 3 */
	CHECK(near(x.row[0].tokens_cv, sqrt(5) / 3)); /* (9 + 1 + 9 + 1) / 4 = 5 */
	CHECK(x.row[0].dead == 1 && x.row[0].experts == 4 && x.row[0].groups == 2);
	CHECK(x.row[0].top[0] == 0 && x.row[0].top[1] == 3 && x.row[0].top[2] == 1);
	CHECK(x.row[0].top_tokens[0] == 6 && x.row[0].top_tokens[2] == 2);
	/* groups 30 + 10 and 10 + 10: 40 / 30, 10 / 30; backward 15 and 5: 15 / 10 */
	CHECK(near(x.row[0].time_ratio, 4. / 3) && near(x.row[0].time_cv, 1. / 3));
	CHECK(near(x.row[1].time_ratio, 1.5) && x.row[1].direction == TRACE_BACKWARD);
	CHECK(x.worst == 1 && near(x.time_ratio[TRACE_FORWARD].median, 4. / 3));
	CHECK(near(x.tokens_ratio[TRACE_BACKWARD].p95, 2) && x.dead[TRACE_FORWARD].median == 1);
	CHECK(!trace_is_expert(&t, 0) && trace_is_expert(&t, 1));
	trace_experts_free(&x);
	/* a window that stands for step 3 and begins at 45: its layers are whole all the same */
	w.begin = 45;
	w.first_step = w.last_step = 3;
	CHECK(trace_experts(&w, &x) == 0 && x.n == 2 && near(x.row[0].time_ratio, 4. / 3));
	trace_experts_free(&x);
	trace_window_free(&w);
	trace_free(&t);
}

/* ---- outliers ---- */

static void outliers(void)
{
	/* nine of 10 ns and one of 40; eight others of 10..17 ns with more rows; three too few */
	struct made m[21] = { 0 };
	int64_t at = 0, length;
	struct trace_outliers o;
	struct trace_window w;
	struct trace t;

	for (int i = 0; i < 21; i++) {
		length = i == 4 ? 40 : i < 10 ? 10 : i < 18 ? i : 1000 * i;
		m[i] = (struct made){ .kind = i < 18 ? A : B,
				      .rows = i < 10 ? 5 : 100,
				      .start = at,
				      .stop = at + length,
				      .cpu = i == 4 ? 8 : 0 };
		at += length;
	}
	if (!MADE(&t, m, 1, 1, NULL) || !CHECK(trace_window(&t, 0, at, &w) == 0))
		return;
	CHECK(trace_outliers(&w, &o) == 0 && o.n == 1 && o.list[0].task == 4);
	CHECK(o.list[0].expected == 10 && o.excess == 30 && o.list[0].preempted &&
	      o.preempted == 1);
	trace_outliers_free(&o);
	trace_window_free(&w);
	trace_free(&t);
}

const struct moe_test moe_suite_tests[] = {
	{ "rates over steady steps", rates },
	{ "marks that count otherwise", marks },
	{ "bootstrap", bootstrap },
	{ "expert imbalance", experts },
	{ "outliers", outliers },
	{ NULL, NULL },
};
