/* SPDX-License-Identifier: Apache-2.0 */
/* How a trace ends: in order, killed, out of buffers or of disk; and when it may begin. */
#include "tests/graph_check.h"
#include "tests/trace_check.h"
#include "tests/trace_good.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

const char moe_suite_name[] = "trace_ends";

/* ---- ends ---- */

static void dying_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	struct graph g;

	graph_random = 1;
	graph_make(&g, 6, 200, 0);
	graph_register(&g, e);
	trace_start(e, arg, 0);
	for (;;) {
		graph_submit(&g, e, NULL);
		CHECK_OK(moe_engine_wait(e));
		usleep(2000);
	}
}

static void killed(void)
{
	char path[4200];
	struct moe_mxt_reader r = { .fd = -1 };
	struct trace t;
	pid_t pid;

	snprintf(path, sizeof path, "%s", trace_file("killed.mxt"));
	fflush(NULL);
	pid = fork();
	if (!pid) {
		alarm(100);
		dying_child(path);
	}
	for (int i = 0; i < 6000 * SLOW; i++) { /* until it has written tasks twice */
		size_t chunks = 0;

		usleep(10000);
		if (!moe_mxt_open(&r, path))
			continue;
		for (size_t k = 0; k < r.n; k++)
			chunks += r.chunk[k].head.type == MOE_MXT_TASKS;
		moe_mxt_close(&r);
		if (chunks >= 2)
			break;
	}
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	if (!trace_open(&t, path))
		return;
	CHECK(!t.reader.ended && trace_rows(&t, MOE_MXT_TASKS) > 200);
	CHECK(trace_is_good(path, true, false) && !trace_is_good(path, false, false));
	CHECK(trace_rows(&t, MOE_MXT_DEPS) > 200 && moe_mxt_number(&t.reader, "workers", 0) == 2);
	trace_close(&t);
}

static void tiny_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	int64_t tasks = 0, executed;
	struct moe_trace_info info;
	struct graph g;
	struct trace t;

	graph_random = 1;
	graph_make(&g, 6, 500, 0);
	graph_register(&g, e);
	trace_start(e, arg, 1); /* the smallest there is */
	for (int i = 0; i < 4; i++)
		graph_submit(&g, e, NULL);
	info = trace_stop(e);
	CHECK(info.lost > 0);
	graph_verify(&g, 4); /* the work does not suffer */
	CHECK(trace_is_good(arg, true, false) && !trace_is_good(arg, false, false));
	if (trace_open(&t, arg)) {
		tasks = (int64_t)trace_rows(&t, MOE_MXT_TASKS);
		executed = trace_counter(&t, "executed");
		CHECK(executed == 2000 && trace_counter(&t, "submitted") == 2000);
		CHECK(tasks + trace_counter(&t, "lost_executed") == 2000 && tasks == info.tasks);
		CHECK((int64_t)trace_rows(&t, MOE_MXT_DEPS) + trace_counter(&t, "lost_submitted") ==
		      2000);
		CHECK(trace_counter(&t, "lost_executed") + trace_counter(&t, "lost_submitted") ==
		      info.lost);
		trace_close(&t);
	}
	graph_free(&g);
	CHECK_OK(moe_engine_close(e));
}

static void overflow(void)
{
	in_child("overflow", tiny_child, trace_file("tiny.mxt"));
}

static char warning[400];

static void keep_warning(enum moe_log_level level, const char *text, void *user)
{
	(void)user;
	if (level >= MOE_LOG_WARNING)
		snprintf(warning, sizeof warning, "%s", text);
}

static void full_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL);
	struct moe_trace_info info = { .struct_size = sizeof info };
	struct moe_trace_params p = trace_params("/dev/full");
	struct rlimit limit = { 60000, RLIM_INFINITY };
	struct graph g;
	struct trace t;

	moe_log_set(keep_warning, NULL);
	CHECK_ERROR(moe_trace_start(e, &p), MOE_ERR_IO, "No space left");
	CHECK_ERROR(moe_trace_stop(e, NULL), MOE_ERR_STATE, "no trace");
	signal(SIGXFSZ, SIG_IGN);
	CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
	graph_random = 1;
	graph_make(&g, 6, 500, 0);
	graph_register(&g, e);
	trace_start(e, arg, 4 << 20);
	for (int i = 0; i < 60; i++)
		graph_submit(&g, e, NULL);
	CHECK_ERROR(moe_trace_stop(e, &info), MOE_ERR_IO, "File too large");
	CHECK(strstr(info.error, "File too large") && strstr(warning, "File too large"));
	graph_verify(&g, 60);
	CHECK(info.bytes > 0 && info.bytes <= 60000);
	CHECK(trace_is_good(arg, true, false) && !trace_is_good(arg, false, false));
	if (trace_open(&t, arg)) {
		CHECK(!t.reader.ended && !t.reader.lost_bytes && t.reader.bytes == info.bytes);
		trace_close(&t);
	}
	graph_free(&g);
	CHECK_OK(moe_engine_close(e));
}

static void disk_full(void)
{
	in_child("disk full", full_child, trace_file("full.mxt"));
}

/* ---- when it may start ---- */

static void states_child(const void *arg)
{
	struct moe_engine *e = open_with(2, 1, NULL), *dry = NULL;
	struct moe_trace_params p = trace_params(arg), bad = p;
	const char *no_key = "nothing";
	struct graph g;
	struct trace t;
	enum moe_status st;

	graph_random = 1;
	graph_make(&g, 6, 50, 0);
	graph_register(&g, e);
	bad.struct_size = 8;
	CHECK_ERROR(moe_trace_start(e, &bad), MOE_ERR_ARG, "struct_size");
	bad = trace_params(NULL);
	CHECK_ERROR(moe_trace_start(e, &bad), MOE_ERR_ARG, "file");
	bad = p, bad.config = &no_key, bad.n_config = 1;
	CHECK_ERROR(moe_trace_start(e, &bad), MOE_ERR_ARG, "key=value");
	bad = p, bad.ring_bytes = (size_t)1 << 40;
	CHECK_ERROR(moe_trace_start(e, &bad), MOE_ERR_ARG, "ring_bytes");
	CHECK_ERROR(moe_trace_start(NULL, &p), MOE_ERR_ARG, "engine");
	CHECK_OK(moe_engine_open_dry(1, 1, &dry));
	CHECK_ERROR(moe_trace_start(dry, &p), MOE_ERR_ARG, "runs");
	moe_trace_mark(dry, MOE_TRACE_STEP_BEGIN, 1, 1, 1);
	CHECK_OK(moe_engine_close(dry));
	CHECK_OK(moe_engine_hold(e));
	graph_submit(&g, e, NULL);
	CHECK_ERROR(moe_trace_start(e, &p), MOE_ERR_BUSY, "outstanding");
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_engine_wait(e));
	for (int64_t n = 0;; n++) { /* no memory */
		moe_alloc_fail_after(n);
		st = moe_trace_start(e, &p);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK || !CHECK(st == MOE_ERR_NOMEM && n < 300))
			break;
	}
	CHECK_ERROR(moe_trace_start(e, &p), MOE_ERR_STATE, "already");
	/* stopping waits, even while held; what earlier tasks did is no dependency */
	CHECK_OK(moe_engine_hold(e));
	graph_submit(&g, e, NULL);
	CHECK(trace_stop(e).tasks == 50);
	CHECK_OK(moe_engine_release(e));
	if (trace_open(&t, arg)) {
		CHECK(trace_at(&t, MOE_MXT_DEPS, MOE_MXT_DEP_ID, 0) == 51);
		CHECK(trace_at(&t, MOE_MXT_DEPS, MOE_MXT_DEP_COUNT, 0) == 0);
		trace_close(&t);
	}
	trace_start(e, arg, 0);
	graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, 3);
	graph_free(&g);
	CHECK_OK(moe_engine_close(e)); /* stops it */
	if (trace_open(&t, arg)) {
		CHECK(t.reader.ended && trace_rows(&t, MOE_MXT_TASKS) == 50);
		trace_close(&t);
	}
}

static void states(void)
{
	in_child("states", states_child, trace_file("states.mxt"));
}

const struct moe_test moe_suite_tests[] = {
	{ "kill -9", killed },
	{ "full buffers", overflow },
	{ "full disk", disk_full },
	{ "when a trace may start and stop", states },
	{ NULL, NULL },
};
