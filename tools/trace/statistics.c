/* SPDX-License-Identifier: Apache-2.0 */
/* Medians, and bootstrap intervals: as many draws with repetition, their median, many times. */
#include "tools/trace/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define RESAMPLES 2000
#define FEWEST 200 /* with so many values that draws take long */

int trace_by_value(const void *a, const void *b)
{
	double p = *(const double *)a, q = *(const double *)b;

	return p < q ? -1 : p > q;
}

static double median(const double *sorted, int n)
{
	if (!n)
		return NAN;
	return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

static uint64_t next(uint64_t *state)
{
	uint64_t x = *state += 0x9e3779b97f4a7c15ull;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

/* What is known of a list, ascending, and room to count draws. */
struct values {
	double *sorted; /* [n]; NULL: no memory */
	uint32_t *drawn;
	int n;
};

static struct values values_of(const double *from, int n)
{
	struct values v = { .sorted = malloc(((size_t)n + 1) * sizeof *v.sorted),
			    .drawn = malloc(((size_t)n + 1) * sizeof *v.drawn) };

	if (!v.sorted || !v.drawn) {
		free(v.sorted), free(v.drawn);
		return (struct values){ 0 };
	}
	for (int i = 0; i < n; i++)
		if (isfinite(from[i]))
			v.sorted[v.n++] = from[i];
	if (v.n)
		qsort(v.sorted, (size_t)v.n, sizeof *v.sorted, trace_by_value);
	return v;
}

static void free_values(struct values *v)
{
	free(v->sorted), free(v->drawn);
}

/* The i-th smallest of the values drawn. */
static double smallest(const struct values *v, uint32_t i)
{
	int k = 0;

	for (uint32_t before = v->drawn[0]; before <= i; before += v->drawn[k])
		k++;
	return v->sorted[k];
}

static double resampled(const struct values *v, uint64_t *state)
{
	uint32_t n = (uint32_t)v->n;

	memset(v->drawn, 0, n * sizeof *v->drawn);
	for (uint32_t i = 0; i < n; i++)
		v->drawn[next(state) % n]++;
	return n % 2 ? smallest(v, n / 2) : (smallest(v, n / 2 - 1) + smallest(v, n / 2)) / 2;
}

static int resamples(int n)
{
	int fewer = n > 1000 ? 1000 * RESAMPLES / n : RESAMPLES;

	return fewer > FEWEST ? fewer : FEWEST;
}

/* What holds the middle 95 % of a list. */
static void middle(double *v, int n, double *low, double *high)
{
	qsort(v, (size_t)n, sizeof *v, trace_by_value);
	*low = v[n / 40];
	*high = v[n - n / 40 - 1];
}

struct trace_interval trace_bootstrap(const double *value, int n)
{
	struct trace_interval out = { NAN, NAN, NAN, 0 };
	struct values v = values_of(value, n);
	double *medians = malloc(RESAMPLES * sizeof *medians);
	uint64_t state = 1;
	int rounds = resamples(v.n);

	out.n = v.n;
	out.median = median(v.sorted, v.n);
	if (medians && v.n >= 3) {
		for (int r = 0; r < rounds; r++)
			medians[r] = resampled(&v, &state);
		middle(medians, rounds, &out.low, &out.high);
	}
	free_values(&v);
	free(medians);
	return out;
}

/* Both lists are drawn anew; a resample whose first median is 0 has no change. */
static void interval(const struct values *a, const struct values *b, struct trace_difference *d)
{
	double *change = malloc(RESAMPLES * sizeof *change);
	int rounds = resamples(a->n > b->n ? a->n : b->n), kept = 0;
	uint64_t state = 1;

	for (int r = 0; change && r < rounds; r++) {
		double x = resampled(a, &state), y = resampled(b, &state);

		if (x > 0)
			change[kept++] = y / x - 1;
	}
	if (kept == rounds)
		middle(change, rounds, &d->low, &d->high);
	free(change);
}

struct trace_difference trace_difference(const double *before, int n_before, const double *after,
					 int n_after)
{
	struct values a = values_of(before, n_before), b = values_of(after, n_after);
	struct trace_difference d = { median(a.sorted, a.n), median(b.sorted, b.n), NAN, NAN, NAN };

	if (d.before > 0)
		d.change = d.after / d.before - 1;
	if (a.n >= 3 && b.n >= 3 && d.before > 0)
		interval(&a, &b, &d);
	free_values(&a);
	free_values(&b);
	return d;
}
