/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs in bench/ share: the clock, sorted values, numbers of the command line. */
#ifndef MOE_BENCH_MEASURE_H
#define MOE_BENCH_MEASURE_H

#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

/* CPU time of this thread: other processes' slices do not count. */
static inline double thread_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static inline void sort_values(double *v, int n)
{
	qsort(v, (size_t)n, sizeof *v, by_value);
}

/* Sorts v. */
static inline double median(double *v, int n)
{
	sort_values(v, n);
	return v[n / 2];
}

/* A whole number from `low` to 2^24. */
static inline bool take_number(const char *text, int low, int *out)
{
	char *end;
	long v = strtol(text, &end, 10);

	*out = (int)v;
	return *text && !*end && v >= low && v <= 1 << 24;
}

#endif
