/* SPDX-License-Identifier: Apache-2.0 */
/* Files, folders and sums of bytes. */
#include "tests/small_file.h"
#include "tests/harness.h"
#include "model/file.h"
#include "model/sum.h"

#include <stdio.h>
#include <unistd.h>

const char moe_suite_name[] = "files";

static void test_files(void)
{
	const char *dir = temp_path("files/a//b/c/"), *path = temp_path("files/a/b/c/f");
	char *text, *joined;
	size_t n;

	CU_ASSERT_EQUAL_FATAL(write_small(temp_path("small.safetensors")), MOE_OK);
	CU_ASSERT_EQUAL(moe_dir_make(dir), MOE_OK);
	CU_ASSERT_EQUAL(moe_dir_make(dir), MOE_OK);
	CU_ASSERT_EQUAL(moe_file_write(path, "hello", 5), MOE_OK);
	CU_ASSERT_EQUAL(moe_dir_make(path), MOE_ERR_IO);
	CU_ASSERT_EQUAL(moe_file_read(path, 4, &text, &n), MOE_ERR_FORMAT);
	CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 5, &text, &n), MOE_OK);
	CU_ASSERT(n == 5 && !strcmp(text, "hello"));
	moe_free(text);
	CU_ASSERT_EQUAL(moe_file_read(dir, 5, &text, &n), MOE_ERR_IO);
	CU_ASSERT_EQUAL(moe_file_write(dir, "x", 1), MOE_ERR_IO);
	joined = moe_path_join("a/", "b");
	CU_ASSERT_STRING_EQUAL(joined, "a/b");
	moe_free(joined);
	/* a link is removed, what it points to is not */
	CU_ASSERT_EQUAL(symlink(temp_path("small.safetensors"), temp_path("files/link")), 0);
	CU_ASSERT_EQUAL(moe_tree_sync(temp_path("files")), MOE_OK);
	CU_ASSERT_EQUAL(moe_tree_remove(temp_path("files")), MOE_OK);
	CU_ASSERT(!moe_path_exists(temp_path("files")));
	CU_ASSERT(moe_path_exists(temp_path("small.safetensors")));
	CU_ASSERT_EQUAL(moe_tree_remove(temp_path("files")), MOE_OK);
}

/* Pieces give the sum of the whole; every other byte, length and place gives another. */
static void test_sums(void)
{
	unsigned char data[200];
	struct moe_sum s;
	uint64_t whole;

	for (size_t i = 0; i < sizeof data; i++)
		data[i] = (unsigned char)(i * 7);
	moe_sum_begin(&s);
	moe_sum_add(&s, data, sizeof data);
	whole = moe_sum_end(&s);
	for (size_t piece = 1; piece < 100; piece++) {
		moe_sum_begin(&s);
		for (size_t at = 0; at < sizeof data; at += piece)
			moe_sum_add(&s, data + at, MOE_MIN(piece, sizeof data - at));
		CU_ASSERT_EQUAL(moe_sum_end(&s), whole);
	}
	for (size_t n = 0; n < sizeof data; n++) {
		moe_sum_begin(&s);
		moe_sum_add(&s, data, n);
		CU_ASSERT_NOT_EQUAL(moe_sum_end(&s), whole);
		data[n] ^= 1;
		moe_sum_begin(&s);
		moe_sum_add(&s, data, sizeof data);
		CU_ASSERT_NOT_EQUAL(moe_sum_end(&s), whole);
		data[n] ^= 1;
	}
}

const struct moe_test moe_suite_tests[] = {
	{ "files and directories", test_files },
	{ "sums", test_sums },
	{ NULL, NULL },
};
