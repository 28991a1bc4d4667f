/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors writer: what it wrote is read back; what it refuses; full disks lose nothing. */
#include "tests/small_file.h"
#include "tests/harness.h"
#include "model/file.h"
#include "model/readers/safetensors.h"
#include "model/readers/safetensors_sum.h"
#include "model/readers/safetensors_writer.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

const char moe_suite_name[] = "safetensors_writer";

static void test_round_trip(void)
{
	const char *path = temp_path("small.safetensors");
	struct moe_safetensors *st = NULL;
	const struct moe_st_tensor *t;
	uint64_t length = 1;
	char *text;
	size_t n;

	CU_ASSERT_EQUAL_FATAL(write_small(path), MOE_OK);
	check_small(path);
	CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 1 << 20, &text, &n), MOE_OK);
	memcpy(&length, text, 8);
	CU_ASSERT_EQUAL(length % 8, 0);
	moe_free(text);

	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		CU_ASSERT_EQUAL((uintptr_t)moe_safetensors_at(st, i)->data %
					moe_dtype_size(moe_safetensors_at(st, i)->dtype),
				0);
	/* errors name the tensor, what was expected and what was found */
	CU_ASSERT_EQUAL(moe_safetensors_get(st, "weight", 2, (int64_t[]){ 3, 2 }, &t),
			MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "small.safetensors"));
	CU_ASSERT_PTR_NOT_NULL(
		strstr(moe_last_error(), "'weight' has shape [2, 3], expected [3, 2]"));
	CU_ASSERT_EQUAL(moe_safetensors_get(st, "weight", 1, (int64_t[]){ 2 }, &t), MOE_ERR_FORMAT);
	CU_ASSERT_EQUAL(moe_safetensors_get(st, "gone", 1, (int64_t[]){ 2 }, &t), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "'gone' is missing"));
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, "n", 0, NULL, (float[1]){ 0 }),
			MOE_ERR_UNSUPPORTED);
	CU_ASSERT_EQUAL(moe_safetensors_get_typed(st, "n", MOE_I32, 0, NULL, &t), MOE_ERR_FORMAT);
	moe_safetensors_close(st);
}

static void test_writer_refusals(void)
{
	const char *path = temp_path("refused.safetensors");
	const struct moe_st_item good = {
		.name = "a", .dtype = MOE_F32, .ndim = 1, .shape = { 1 }, .data = small_values
	};
	struct moe_st_item bad[6] = { good, good, good, good, good, good };
	struct moe_st_item twice[2] = { good, good }, large[5] = { good, good, good, good, good };
	const struct {
		struct moe_st_meta entry;
		const char *says;
	} meta[] = {
		{ { MOE_ST_SUM_KEY, "0" }, "is the writer's own" },
		{ { "key", "\xff" }, "metadata 'key' is not UTF-8" },
	};

	for (size_t i = 0; i < MOE_COUNT(large); i++)
		large[i].shape[0] = INT64_MAX / 4;
	bad[0].name = "";
	bad[1].name = "__metadata__";
	bad[2].name = "\xff";
	bad[3].data = NULL;
	bad[4].shape[0] = -1;
	bad[5].dtype = MOE_DTYPE_COUNT;
	for (int i = 0; i < 6; i++)
		CU_ASSERT_EQUAL(moe_safetensors_write(path, &bad[i], 1, NULL, 0), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_safetensors_write(path, twice, 2, NULL, 0), MOE_ERR_ARG);
	for (size_t i = 0; i < MOE_COUNT(meta); i++) {
		CU_ASSERT_EQUAL(moe_safetensors_write(path, twice, 1, &meta[i].entry, 1), MOE_ERR_ARG);
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), meta[i].says));
	}
	CU_ASSERT_EQUAL(moe_safetensors_write(path, large, MOE_COUNT(large), NULL, 0), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "the sizes of the tensors overflow"));
	CU_ASSERT(!moe_path_exists(path));
	CU_ASSERT_EQUAL(moe_safetensors_write(temp_path("no/such/dir"), &good, 1, NULL, 0),
			MOE_ERR_IO);
	CU_ASSERT_EQUAL(moe_safetensors_write("/dev/full", &good, 1, NULL, 0), MOE_ERR_IO);
}

static enum moe_status failing_fill(void *user, void *out)
{
	(void)user, (void)out;
	return moe_fail(MOE_ERR_RUNTIME, "filling failed");
}

static int entries_in(const char *dir)
{
	DIR *d = opendir(dir);
	int n = 0;

	while (readdir(d))
		n++;
	closedir(d);
	return n - 2;
}

/* The old file survives a full disk (RLIMIT_FSIZE), a failing producer, and leaves nothing behind.
 */
static void test_full_disk(void)
{
	const char *dir = temp_path("full"), *path = temp_path("full/x.safetensors");
	static float big[65536];
	const struct moe_st_item item = {
		.name = "big", .dtype = MOE_F32, .ndim = 1, .shape = { 65536 }, .data = big
	};
	const struct moe_st_item failing = {
		.name = "big", .dtype = MOE_F32, .ndim = 1, .shape = { 65536 }, .fill = failing_fill
	};
	struct rlimit old, limit;

	CU_ASSERT_EQUAL_FATAL(moe_dir_make(dir), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(write_small(path), MOE_OK);
	signal(SIGXFSZ, SIG_IGN);
	getrlimit(RLIMIT_FSIZE, &old);
	limit = old;
	for (rlim_t at = 1; at < 262144 + 100; at += 20011) {
		limit.rlim_cur = at;
		setrlimit(RLIMIT_FSIZE, &limit);
		CU_ASSERT_EQUAL(moe_safetensors_write(path, &item, 1, NULL, 0), MOE_ERR_IO);
		setrlimit(RLIMIT_FSIZE, &old);
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "x.safetensors"));
	}
	CU_ASSERT_EQUAL(moe_safetensors_write(path, &failing, 1, NULL, 0), MOE_ERR_RUNTIME);
	CU_ASSERT_EQUAL(entries_in(dir), 1);
	check_small(path);
	signal(SIGXFSZ, SIG_DFL);
}

const struct moe_test moe_suite_tests[] = {
	{ "round trip", test_round_trip },
	{ "writer refuses", test_writer_refusals },
	{ "full disk keeps the old file", test_full_disk },
	{ NULL, NULL },
};
