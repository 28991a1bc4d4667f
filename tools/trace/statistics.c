/* SPDX-License-Identifier: Apache-2.0 */
/* Medians of few values, and bootstrap intervals: draws of as many with repetition, many times. */
#include "tools/trace/compare.h"

#include <math.h>
#include <stdlib.h>

#define RESAMPLES 2000

static int by_value(const void *a, const void *b)
{
	double p = *(const double *)a, q = *(const double *)b;

	return p < q ? -1 : p > q;
}

static double median(double *v, int n)
{
	if (!n)
		return NAN;
	qsort(v, (size_t)n, sizeof *v, by_value);
	return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static uint64_t next(uint64_t *state)
{
	uint64_t x = *state += 0x9e3779b97f4a7c15ull;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

static int known(const double *from, int n, double *to)
{
	int kept = 0;

	for (int i = 0; i < n; i++)
		if (isfinite(from[i]))
			to[kept++] = from[i];
	return kept;
}

static double resampled(const double *v, int n, double *draw, uint64_t *state)
{
	for (int i = 0; i < n; i++)
		draw[i] = v[next(state) % (uint64_t)n];
	return median(draw, n);
}

/* What holds the middle 95 % of the resamples. */
static void bounds_of(double v[RESAMPLES], double *low, double *high)
{
	qsort(v, RESAMPLES, sizeof *v, by_value);
	*low = v[RESAMPLES / 40];
	*high = v[RESAMPLES - RESAMPLES / 40 - 1];
}

struct trace_interval trace_bootstrap(const double *value, int n)
{
	struct trace_interval out = { NAN, NAN, NAN, 0 };
	double *v = malloc(((size_t)n + 1) * sizeof *v),
	       *draw = malloc(((size_t)n + 1) * sizeof *draw);
	double *medians = malloc(RESAMPLES * sizeof *medians);
	uint64_t state = 1;

	if (v && draw && medians) {
		out.n = known(value, n, v);
		out.median = median(v, out.n);
	}
	if (out.n >= 3) {
		for (int r = 0; r < RESAMPLES; r++)
			medians[r] = resampled(v, out.n, draw, &state);
		bounds_of(medians, &out.low, &out.high);
	}
	free(v), free(draw), free(medians);
	return out;
}

/* Both steps' medians are drawn anew, many times. */
static void interval(const double *a, int na, const double *b, int nb, double *draw, double *change,
		     struct trace_difference *d)
{
	uint64_t state = 1;
	int kept = 0;

	for (int r = 0; r < RESAMPLES; r++) {
		double x = resampled(a, na, draw, &state), y = resampled(b, nb, draw, &state);

		if (x > 0)
			change[kept++] = y / x - 1;
	}
	if (kept == RESAMPLES)
		bounds_of(change, &d->low, &d->high);
}

struct trace_difference trace_difference(const double *before, int n_before, const double *after,
					 int n_after)
{
	struct trace_difference d = { NAN, NAN, NAN, NAN, NAN };
	size_t most = (size_t)(n_before > n_after ? n_before : n_after) + 1;
	double *a = malloc(most * sizeof *a), *b = malloc(most * sizeof *b);
	double *draw = malloc(most * sizeof *draw), *change = malloc(RESAMPLES * sizeof *change);

	if (a && b && draw && change) {
		int na = known(before, n_before, a), nb = known(after, n_after, b);

		d.before = median(a, na);
		d.after = median(b, nb);
		if (d.before > 0)
			d.change = d.after / d.before - 1;
		if (na >= 3 && nb >= 3 && d.before > 0)
			interval(a, na, b, nb, draw, change, &d);
	}
	free(a), free(b), free(draw), free(change);
	return d;
}
