/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A suite is one file tests/suite_<name>.c that defines moe_suite_name and moe_suite_tests; CMake
 * makes one program and one ctest entry of it. Exit code 77 = skipped (the reason is printed).
 */
#ifndef MOE_TESTS_HARNESS_H
#define MOE_TESTS_HARNESS_H

#include <CUnit/CUnit.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

struct moe_test {
	const char *name;
	void (*run)(void);
};

extern const char moe_suite_name[];
extern const struct moe_test moe_suite_tests[]; /* ends with a NULL name */

/* The larger of two errors, and NaN from the first NaN on: fmax drops it, and a maximum of nothing but NaN would be 0. */
static inline double worst_of(double worst, double off)
{
	return isnan(worst) || off <= worst ? worst : off;
}

/* [-1, 1), repeatable (xorshift64); *state is not 0. */
static inline double uniform_of(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return (double)(*state >> 11) * 0x1p-52 - 1.0;
}

/* Marks the running test program as skipped for a named reason (missing input or tool). */
void moe_test_skip(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* true when MOESAIC_TEST_FULL=1: full counts instead of reduced ones. */
bool moe_test_full(void);
/* true under ThreadSanitizer, where tasks and their order count: fewer numbers are compared, kinds of calls stay. */
bool moe_test_threads_only(void);
/* true under ThreadSanitizer and AddressSanitizer, which make programs 5 to 20 times slower. */
bool moe_test_sanitized(void);
/* Path of a file of the project (tests/fixtures/...), in a static ring of buffers. */
const char *moe_test_path(const char *relative);
/* Path below ../shared of the checkout, or NULL if that is absent. */
const char *moe_test_shared(const char *relative);
/* A fresh empty directory that is removed at exit. */
const char *moe_test_dir(void);
/* The suite's seed (MOESAIC_TEST_SEED or a constant), printed at start. */
unsigned long moe_test_seed(void);

#endif
