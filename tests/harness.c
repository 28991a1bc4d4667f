/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness.h"

#include <CUnit/Basic.h>
#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int skipped;
static char temp_dir[PATH_MAX];
static pid_t temp_owner;

void moe_test_skip(const char *fmt, ...)
{
	va_list ap;

	skipped++;
	printf("\nSKIPPED %s: ", moe_suite_name);
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	printf("\n");
}

bool moe_test_full(void)
{
	const char *v = getenv("MOESAIC_TEST_FULL");

	return v && !strcmp(v, "1");
}

bool moe_test_threads_only(void)
{
#ifdef __SANITIZE_THREAD__
	return true;
#else
	return false;
#endif
}

bool moe_test_sanitized(void)
{
#ifdef __SANITIZE_ADDRESS__
	return true;
#else
	return moe_test_threads_only();
#endif
}

static const char *join(const char *root, const char *relative)
{
	static char ring[8][PATH_MAX];
	static unsigned next;
	char *buf = ring[next++ % 8];

	snprintf(buf, PATH_MAX, "%s/%s", root, relative);
	return buf;
}

const char *moe_test_path(const char *relative)
{
	return join(MOESAIC_SOURCE_DIR, relative);
}

const char *moe_test_shared(const char *relative)
{
	const char *path = join(MOESAIC_SOURCE_DIR "/../shared", relative);

	return access(path, R_OK) == 0 ? path : NULL;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st, (void)type, (void)ftw;
	return remove(path);
}

static void remove_temp(void)
{
	if (temp_owner == getpid())
		nftw(temp_dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

const char *moe_test_dir(void)
{
	const char *tmp = getenv("TMPDIR");

	if (!temp_owner) {
		snprintf(temp_dir, sizeof temp_dir, "%s/moesaic-test-XXXXXX", tmp ? tmp : "/tmp");
		if (!mkdtemp(temp_dir)) {
			perror(temp_dir);
			exit(1);
		}
		temp_owner = getpid();
		atexit(remove_temp);
	}
	return temp_dir;
}

unsigned long moe_test_seed(void)
{
	const char *v = getenv("MOESAIC_TEST_SEED");

	return v ? strtoul(v, NULL, 10) : 20261129;
}

int main(void)
{
	CU_pSuite suite;
	unsigned failures;

	setvbuf(stdout, NULL, _IOLBF, 0);
	setenv("MOESAIC_MACHINE", "", 0); /* guessed rates: not what this user once measured */
	if (CU_initialize_registry() != CUE_SUCCESS)
		return 1;
	suite = CU_add_suite(moe_suite_name, NULL, NULL);
	for (const struct moe_test *t = moe_suite_tests; t->name; t++)
		CU_add_test(suite, t->name, t->run);
	printf("seed %lu%s\n", moe_test_seed(), moe_test_full() ? ", full counts" : "");
	CU_basic_set_mode(CU_BRM_VERBOSE);
	CU_basic_run_tests();
	failures = CU_get_number_of_failures() + CU_get_number_of_tests_failed();
	if (!failures && CU_get_number_of_tests_run() == 0)
		failures = 1;
	CU_cleanup_registry();
	if (failures)
		return 1;
	return skipped ? 77 : 0;
}
