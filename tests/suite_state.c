/* SPDX-License-Identifier: Apache-2.0 */
/* Training state: complete or absent, whatever happens in between. */
#include "tests/harness.h"
#include "model/file.h"
#include "model/json.h"
#include "model/state.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

const char moe_suite_name[] = "state";

static const char *output_dir(const char *name)
{
	static char ring[4][4096];
	static unsigned next;
	char *buf = ring[next++ % 4];

	snprintf(buf, sizeof ring[0], "%s/%s", moe_test_dir(), name);
	return buf;
}

/* Fills a state directory of step; every array element is step. */
static enum moe_status fill_state(const char *dir, int64_t step)
{
	float m[3] = { (float)step, (float)step, (float)step };
	const struct moe_st_item items[] = {
		{ .name = "m", .dtype = MOE_F32, .ndim = 1, .shape = { 3 }, .data = m },
		{ .name = "order", .dtype = MOE_I64, .ndim = 1, .shape = { 1 }, .data = &step },
	};
	const struct moe_scalar scalars[] = {
		{ .key = "step", .kind = MOE_SCALAR_INT, .i = step },
		{ .key = "seed", .kind = MOE_SCALAR_INT, .i = INT64_MAX },
		{ .key = "low", .kind = MOE_SCALAR_INT, .i = INT64_MIN },
		{ .key = "epoch", .kind = MOE_SCALAR_REAL, .r = 0.1 + 0.2 },
		{ .key = "best", .kind = MOE_SCALAR_REAL, .r = INFINITY },
		{ .key = "config_hash", .kind = MOE_SCALAR_TEXT, .text = "a\"b\n\u00e9" },
	};

	return moe_state_write(dir, items, MOE_COUNT(items), scalars, MOE_COUNT(scalars));
}

static enum moe_status save(const char *output, int64_t step)
{
	struct moe_state_dir dir = { 0 };
	enum moe_status status;

	MOE_TRY(moe_state_begin(output, step, &dir));
	status = fill_state(dir.path, step);
	if (status == MOE_OK)
		return moe_state_commit(&dir);
	moe_state_abort(&dir);
	return status;
}

/* The latest state is that of step (-1: none), and it can be read. */
static void expect_latest(const char *output, int64_t step)
{
	struct moe_state *s = NULL;
	int64_t found = -1, v = 0;
	char *path = NULL;
	float m[3];

	CU_ASSERT_EQUAL(moe_state_latest(output, &found, &path), MOE_OK);
	CU_ASSERT_EQUAL(found, step);
	CU_ASSERT_EQUAL(path != NULL, step >= 0);
	if (!path)
		return;
	CU_ASSERT_EQUAL_FATAL(moe_state_open(path, &s), MOE_OK);
	CU_ASSERT_EQUAL(moe_state_int(s, "step", &v), MOE_OK);
	CU_ASSERT_EQUAL(v, step);
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(moe_state_arrays(s), "m", 1, (int64_t[]){ 3 }, m),
			MOE_OK);
	CU_ASSERT_EQUAL(m[2], (float)step);
	moe_state_close(s);
	moe_free(path);
}

static void test_round_trip(void)
{
	const char *dir = output_dir("plain");
	const struct moe_scalar twice[] = { { .key = "a", .kind = MOE_SCALAR_INT },
					    { .key = "a", .kind = MOE_SCALAR_INT } };
	struct moe_state *s = NULL;
	const char *text;
	int64_t i = 0;
	double r = 0;

	CU_ASSERT_EQUAL(moe_dir_make(dir), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(fill_state(dir, 7), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_state_open(dir, &s), MOE_OK);
	CU_ASSERT(moe_state_int(s, "seed", &i) == MOE_OK && i == INT64_MAX);
	CU_ASSERT(moe_state_int(s, "low", &i) == MOE_OK && i == INT64_MIN);
	CU_ASSERT(moe_state_real(s, "epoch", &r) == MOE_OK && r == 0.1 + 0.2);
	CU_ASSERT(moe_state_real(s, "best", &r) == MOE_OK && isinf(r));
	CU_ASSERT_EQUAL(moe_state_text(s, "config_hash", &text), MOE_OK);
	CU_ASSERT_STRING_EQUAL(text, "a\"b\n\u00e9");
	CU_ASSERT_EQUAL(moe_state_int(s, "absent", &i), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "'absent'"));
	CU_ASSERT_EQUAL(moe_state_int(s, "epoch", &i), MOE_ERR_FORMAT);
	CU_ASSERT_EQUAL(moe_state_real(s, "config_hash", &r), MOE_ERR_FORMAT);
	moe_state_close(s);
	CU_ASSERT_EQUAL(moe_state_write(dir, NULL, 0, twice, 2), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_state_open(output_dir("absent"), &s), MOE_ERR_IO);
}

static void test_latest_and_prune(void)
{
	const char *out = output_dir("run");
	char path[4200];

	expect_latest(out, -1);
	CU_ASSERT_EQUAL(moe_state_clean(out), MOE_OK); /* an absent directory is clean */
	CU_ASSERT_EQUAL(save(out, 9), MOE_OK);
	CU_ASSERT_EQUAL(save(out, 100), MOE_OK);
	CU_ASSERT_EQUAL(save(out, 20), MOE_OK);
	expect_latest(out, 100);
	CU_ASSERT_EQUAL(save(out, 100), MOE_OK); /* replaces */
	expect_latest(out, 100);
	/* directories that are not states do not count: of others, damaged, of another step */
	snprintf(path, sizeof path, "%s/checkpoint-200", out);
	CU_ASSERT_EQUAL(moe_dir_make(path), MOE_OK);
	expect_latest(out, 100);
	CU_ASSERT_EQUAL(fill_state(path, 199), MOE_OK);
	expect_latest(out, 100);
	snprintf(path, sizeof path, "%s/checkpoint-0300", out);
	CU_ASSERT_EQUAL(moe_dir_make(path), MOE_OK);
	CU_ASSERT_EQUAL(fill_state(path, 300), MOE_OK);
	snprintf(path, sizeof path, "%s/checkpoint-400x", out);
	CU_ASSERT_EQUAL(moe_dir_make(path), MOE_OK);
	expect_latest(out, 100);
	snprintf(path, sizeof path, "%s/checkpoint-200", out);
	CU_ASSERT_EQUAL(moe_tree_remove(path), MOE_OK);
	CU_ASSERT_EQUAL(moe_state_prune(out, 0, -1), MOE_OK);
	CU_ASSERT_EQUAL(moe_state_prune(out, 2, -1), MOE_OK);
	snprintf(path, sizeof path, "%s/checkpoint-9", out);
	CU_ASSERT(!moe_path_exists(path));
	snprintf(path, sizeof path, "%s/checkpoint-20", out);
	CU_ASSERT(moe_path_exists(path));
	snprintf(path, sizeof path, "%s/checkpoint-400x", out);
	CU_ASSERT(moe_path_exists(path));
	expect_latest(out, 100);
}

/* Steps 1, 2, 3, 4, then pruned; which are left. */
static void expect_pruned(const char *name, int keep, int64_t best, const char *left)
{
	const char *out = output_dir(name);
	char path[4200], found[8] = "";

	for (int64_t step = 1; step <= 4; step++)
		CU_ASSERT_EQUAL(save(out, step), MOE_OK);
	CU_ASSERT_EQUAL(moe_state_prune(out, keep, best), MOE_OK);
	for (int step = 1; step <= 4; step++) {
		snprintf(path, sizeof path, "%s/checkpoint-%d", out, step);
		if (moe_path_exists(path))
			snprintf(found + strlen(found), sizeof found - strlen(found), "%d", step);
	}
	CU_ASSERT_STRING_EQUAL(found, left);
}

static void flip(const char *path, long at, int bit)
{
	FILE *f = fopen(path, "r+b");
	int c;

	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	fseek(f, at, SEEK_SET);
	c = fgetc(f);
	fseek(f, at, SEEK_SET);
	fputc(c ^ 1 << bit, f);
	fclose(f);
}

/* Every bit of every file counts, and so does its end: the checkpoint before is taken. */
static void test_damage(void)
{
	static const char *const files[] = { "state.safetensors", "state.json", "adapter.safetensors" };
	const float x[2] = { 1, 2 };
	const struct moe_st_item item = { .name = "x", .dtype = MOE_F32, .ndim = 1, .shape = { 2 }, .data = x };
	const char *out = output_dir("damage");
	char path[4300], dir[4200];
	char *text;
	size_t bytes;

	CU_ASSERT_EQUAL(save(out, 1), MOE_OK);
	CU_ASSERT_EQUAL(save(out, 2), MOE_OK);
	snprintf(dir, sizeof dir, "%s/checkpoint-2", out);
	snprintf(path, sizeof path, "%s/%s", dir, files[2]);
	CU_ASSERT_EQUAL(moe_safetensors_write(path, &item, 1, NULL, 0), MOE_OK);
	expect_latest(out, 2);
	for (size_t i = 0; i < MOE_COUNT(files); i++) {
		snprintf(path, sizeof path, "%s/%s", dir, files[i]);
		CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 1 << 20, &text, &bytes), MOE_OK);
		for (long at = 0; at < (long)bytes; at++) {
			bool space = i == 1 && strchr(" \n\t", text[at]); /* between the entries of JSON */

			flip(path, at, (int)at % 8);
			if (!space) {
				CU_ASSERT_NOT_EQUAL(moe_state_check(dir, 2), MOE_OK);
				CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), files[i]));
			}
			flip(path, at, (int)at % 8);
		}
		CU_ASSERT_EQUAL(moe_state_check(dir, 2), MOE_OK);
		CU_ASSERT_EQUAL(moe_state_check(dir, 3), MOE_ERR_FORMAT);
		CU_ASSERT_EQUAL(truncate(path, (off_t)bytes - 3), 0);
		CU_ASSERT_NOT_EQUAL(moe_state_check(dir, -1), MOE_OK);
		expect_latest(out, 1);
		CU_ASSERT_EQUAL(moe_file_write(path, text, bytes), MOE_OK);
		expect_latest(out, 2);
		moe_free(text);
	}
	snprintf(path, sizeof path, "%s/%s", dir, files[0]);
	CU_ASSERT_EQUAL(unlink(path), 0);
	CU_ASSERT_EQUAL(moe_state_check(dir, 2), MOE_ERR_FORMAT);
	expect_latest(out, 1);
}

static void test_best_is_kept(void)
{
	expect_pruned("best-a", 2, 1, "14");
	expect_pruned("best-b", 2, -1, "34");
	expect_pruned("best-c", 2, 4, "34");
	expect_pruned("best-d", 1, 2, "24");
	expect_pruned("best-e", 1, 4, "4");
	expect_pruned("best-f", 3, 2, "234");
	expect_pruned("best-g", 9, 1, "1234");
}

/* What a kill leaves of files that were being written goes; other names stay. */
static void test_temporary_files(void)
{
	static const char *const gone[] = { "README.md.tmp-12-0", "a.tmp-1.tmp-345-17" };
	static const char *const kept[] = { "a.tmp",	   "a.tmp-12", "a.tmp-12-",
					    "a.tmp-12-3x", ".tmp-1-2", "b" };
	const char *out = output_dir("temporary");
	char path[4200];

	CU_ASSERT_EQUAL_FATAL(moe_dir_make(out), MOE_OK);
	for (size_t i = 0; i < MOE_COUNT(gone) + MOE_COUNT(kept); i++) {
		snprintf(path, sizeof path, "%s/%s", out,
			 i < MOE_COUNT(gone) ? gone[i] : kept[i - MOE_COUNT(gone)]);
		CU_ASSERT_EQUAL(moe_file_write(path, "x", 1), MOE_OK);
	}
	CU_ASSERT_EQUAL(moe_state_clean(out), MOE_OK);
	for (size_t i = 0; i < MOE_COUNT(gone) + MOE_COUNT(kept); i++) {
		snprintf(path, sizeof path, "%s/%s", out,
			 i < MOE_COUNT(gone) ? gone[i] : kept[i - MOE_COUNT(gone)]);
		CU_ASSERT_EQUAL(moe_path_exists(path), i >= MOE_COUNT(gone));
	}
}

static void test_abort(void)
{
	const char *out = output_dir("abort");
	struct moe_state_dir dir = { 0 };

	moe_state_abort(&dir);
	CU_ASSERT_EQUAL(save(out, 1), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_state_begin(out, 2, &dir), MOE_OK);
	CU_ASSERT_EQUAL(fill_state(dir.path, 2), MOE_OK);
	expect_latest(out, 1);
	moe_fail(MOE_ERR_IO, "kept");
	moe_state_abort(&dir);
	CU_ASSERT_STRING_EQUAL(moe_last_error(), "kept");
	CU_ASSERT_PTR_NULL(dir.path);
	expect_latest(out, 1);
	CU_ASSERT_EQUAL(moe_state_begin(out, -1, &dir), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_state_begin("/proc/none", 1, &dir), MOE_ERR_IO);
}

/* Does step 2's save in a child and kills it after `us` microseconds or, with -1, before commit. */
static void killed_save(const char *out, int us)
{
	pid_t child = fork();
	int status;

	if (child == 0) {
		struct moe_state_dir dir;

		if (us >= 0)
			for (;;)
				save(out, 2);
		moe_state_begin(out, 2, &dir);
		fill_state(dir.path, 2);
		kill(getpid(), SIGKILL);
		_exit(0);
	}
	if (us >= 0) {
		usleep((useconds_t)us);
		kill(child, SIGKILL);
	}
	waitpid(child, &status, 0);
	CU_ASSERT(WIFSIGNALED(status));
}

static void test_kill(void)
{
	const char *out = output_dir("kill");
	int rounds = moe_test_full() ? 300 : 30;

	CU_ASSERT_EQUAL(save(out, 1), MOE_OK);
	killed_save(out, -1);
	expect_latest(out, 1);
	CU_ASSERT_EQUAL(moe_state_clean(out), MOE_OK);
	expect_latest(out, 1);
	CU_ASSERT_EQUAL(save(out, 2), MOE_OK);
	/* replacing step 2 over and over: a kill at any instant leaves one whole state 2 */
	for (int i = 0; i < rounds; i++) {
		killed_save(out, 500 + i * 211);
		CU_ASSERT_EQUAL(moe_state_clean(out), MOE_OK);
		expect_latest(out, 2);
	}
}

/* A kill between the two renames of a replacement. */
static void test_half_replaced(void)
{
	const char *out = output_dir("half");
	char final[4200], aside[4300], temp[4300];

	snprintf(final, sizeof final, "%s/checkpoint-5", out);
	snprintf(aside, sizeof aside, "%s.old-123", final);
	snprintf(temp, sizeof temp, "%s.tmp-123", final);
	CU_ASSERT_EQUAL(save(out, 5), MOE_OK);
	CU_ASSERT_EQUAL(rename(final, aside), 0);
	CU_ASSERT_EQUAL(moe_dir_make(temp), MOE_OK);
	expect_latest(out, -1);
	CU_ASSERT_EQUAL(moe_state_clean(out), MOE_OK);
	expect_latest(out, 5);
	CU_ASSERT(!moe_path_exists(aside) && !moe_path_exists(temp));
	CU_ASSERT_EQUAL(moe_dir_make(aside), MOE_OK); /* the new one is there: the old goes */
	CU_ASSERT_EQUAL(moe_state_clean(out), MOE_OK);
	CU_ASSERT(!moe_path_exists(aside));
	expect_latest(out, 5);
}

static void test_full_disk(void)
{
	const char *out = output_dir("full");
	struct rlimit old, limit;

	CU_ASSERT_EQUAL(save(out, 1), MOE_OK);
	signal(SIGXFSZ, SIG_IGN);
	getrlimit(RLIMIT_FSIZE, &old);
	limit = old;
	for (rlim_t at = 0; at < 200; at += 37) {
		limit.rlim_cur = at;
		setrlimit(RLIMIT_FSIZE, &limit);
		CU_ASSERT_EQUAL(save(out, 1), MOE_ERR_IO);
		CU_ASSERT_EQUAL(save(out, 2), MOE_ERR_IO);
		setrlimit(RLIMIT_FSIZE, &old);
		expect_latest(out, 1);
	}
	signal(SIGXFSZ, SIG_DFL);
}

static void *hook_alloc(size_t n)
{
	return moe_alloc(n, 1);
}

static void test_failing_allocations(void)
{
	const char *out = output_dir("injected");
	cJSON_Hooks hooks = { hook_alloc, moe_free };
	enum moe_status status = MOE_ERR_NOMEM;
	int n;

	CU_ASSERT_EQUAL(save(out, 1), MOE_OK);
	cJSON_InitHooks(&hooks);
	for (n = 0; status != MOE_OK && n < 10000; n++) {
		moe_alloc_fail_after(n);
		status = save(out, 2);
		moe_alloc_fail_after(-1);
		if (status != MOE_OK)
			expect_latest(out, 1);
	}
	CU_ASSERT_EQUAL(status, MOE_OK);
	expect_latest(out, 2);
	status = MOE_ERR_NOMEM;
	for (n = 0; status != MOE_OK && n < 10000; n++) {
		struct moe_state *s = NULL;
		char *path = NULL;
		int64_t step;

		moe_alloc_fail_after(n);
		status = moe_state_latest(out, &step, &path);
		if (status == MOE_OK && path)
			status = moe_state_open(path, &s);
		moe_alloc_fail_after(-1);
		moe_free(path);
		moe_state_close(s);
	}
	cJSON_InitHooks(NULL);
	CU_ASSERT_EQUAL(status, MOE_OK);
}

const struct moe_test moe_suite_tests[] = {
	{ "round trip", test_round_trip },
	{ "latest and prune", test_latest_and_prune },
	{ "damage", test_damage },
	{ "the best is kept", test_best_is_kept },
	{ "temporary files", test_temporary_files },
	{ "abort", test_abort },
	{ "kill -9", test_kill },
	{ "half replaced", test_half_replaced },
	{ "full disk", test_full_disk },
	{ "failing allocations", test_failing_allocations },
	{ NULL, NULL },
};
