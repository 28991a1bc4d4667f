/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For suites that check every supported kernel table against plain loops in double: memory of exact
 * size that starts as NaN, repeatable random values, comparison by relative L2 error.
 */
#ifndef MOE_TESTS_KERNEL_CHECK_H
#define MOE_TESTS_KERNEL_CHECK_H

#include "tests/tables.h"

#include <cblas.h>
#undef I /* <complex.h> */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const struct moe_kernels *K; /* table under test */
static bool operands_rounded;	    /* GEMMs take their operands in bf16 */
static double noise;		    /* per element, for what may cancel to 0; else 0 */

#define F32_TOLERANCE 2e-6 /* relative L2 error of an f32 GEMM, and of one whose operands need no rounding */
#define BF16_TOLERANCE 4e-3

/* Memory of exact size, so that ASan sees overruns; without ASan a guard lies behind each block. */

#ifdef __SANITIZE_ADDRESS__
#define GUARD 0
#else
#define GUARD 64
#endif
#define MAX_BLOCKS 256
static struct {
	unsigned char *data;
	size_t bytes;
} blocks[MAX_BLOCKS];
static int block_count;

static inline void *mem_at(size_t bytes, size_t offset)
{
	unsigned char *base = NULL;
	size_t size = offset + bytes + GUARD;

	if (block_count == MAX_BLOCKS || posix_memalign((void **)&base, 64, size ? size : 1))
		abort();
	memset(base, 0xff, size); /* NaN: outputs are not to be read */
	blocks[block_count].data = base;
	blocks[block_count++].bytes = offset + bytes;
	return base + offset;
}

/* Aligned as packed weights and panels are. */
static inline void *mem(size_t bytes)
{
	return mem_at(bytes, 0);
}

/* Rows that a caller gives: aligned as floats only. */
static inline float *floats(int64_t n)
{
	return mem_at((size_t)n * sizeof(float), sizeof(float));
}

static inline void release_to(int kept)
{
	for (; block_count > kept; block_count--) {
		unsigned char *p = blocks[block_count - 1].data;
		size_t bytes = blocks[block_count - 1].bytes;
		int damaged = 0;

		for (int i = 0; i < GUARD; i++)
			damaged += p[bytes + (size_t)i] != 0xff;
		CU_ASSERT_EQUAL(damaged, 0);
		free(p);
	}
}

static inline void release(void)
{
	release_to(0);
}

static uint64_t random_state;

static inline double uniform(void) /* [-1, 1) */
{
	return uniform_of(&random_state);
}

static inline float *randoms(int64_t n, double scale)
{
	float *p = floats(n);

	for (int64_t i = 0; i < n; i++)
		p[i] = (float)(uniform() * scale);
	return p;
}

static inline float *copy(const float *src, int64_t n)
{
	float *p = floats(n);

	memcpy(p, src, (size_t)n * sizeof *p);
	return p;
}

/* Aligned as scratch is: what only kernels hand to each other. */
static inline float *aligned_copy(const float *src, int64_t n)
{
	return memcpy(mem((size_t)n * sizeof *src), src, (size_t)n * sizeof *src);
}

static inline double *doubles(int64_t n)
{
	double *p = mem((size_t)n * sizeof *p);

	memset(p, 0, (size_t)n * sizeof *p);
	return p;
}

static inline double *widen(const float *src, int64_t m, int64_t n, int64_t ld)
{
	double *out = doubles(m * n);

	for (int64_t i = 0; i < m * n; i++)
		out[i] = (double)src[i / n * ld + i % n];
	return out;
}

/* got [m, n] with rows ld apart against want [m, n] */
static inline void check_rows(const char *what, int64_t m, int64_t n, const float *got, int64_t ld,
			      const double *want, double tolerance)
{
	double error = 0, norm = 0;

	for (int64_t i = 0; i < m; i++)
		for (int64_t j = 0; j < n; j++) {
			double w = want[i * n + j], d = (double)got[i * ld + j] - w;

			error += d * d;
			norm += w * w;
		}
	if (!(sqrt(error) <= tolerance * sqrt(norm) + noise * sqrt((double)(m * n)))) {
		printf("\n  %s %s [%lld, %lld]: relative error %.3g > %.3g\n", K->name, what,
		       (long long)m, (long long)n, sqrt(error / norm), tolerance);
		CU_FAIL("relative error");
	}
	CU_PASS("compared");
}

static inline void check(const char *what, int64_t n, const float *got, const double *want,
			 double tolerance)
{
	check_rows(what, 1, n, got, n, want, tolerance);
}

static inline void check_same(const char *what, const void *a, const void *b, size_t bytes)
{
	if (memcmp(a, b, bytes))
		printf("\n  %s %s: other bits\n", K->name, what);
	CU_ASSERT_EQUAL(memcmp(a, b, bytes), 0);
}

static void (*table_cases)(void);

static inline void run_table_cases(void)
{
	openblas_set_num_threads(1);
	K = table();
	operands_rounded = K->panel_bytes == sizeof(uint16_t);
	random_state = moe_test_seed() * 0x9e3779b97f4a7c15u + 1;
	table_cases();
	release();
}

static inline void check_tables(void (*run)(void))
{
	table_cases = run;
	each_table(run_table_cases);
}

#endif
