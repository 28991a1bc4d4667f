/* SPDX-License-Identifier: Apache-2.0 */
/* What a pass must give, and how far it may be off. */
#include "tests/random_layers.h"

#include <math.h>

double random_bound(void)
{
	return table_is_packed() ? 3e-2 : 3e-5;
}

double error_of_doubles(const double *got, const double *want, int64_t n, double slack)
{
	double small = table_is_packed() ? .5 : .1; /* of terms near 1, which may cancel */
	double diff = 0, norm = 0;

	for (int64_t i = 0; i < n; i++) {
		diff += (got[i] - want[i]) * (got[i] - want[i]);
		norm += want[i] * want[i];
	}
	diff = sqrt(diff);
	if (!n || diff <= slack)
		return 0;
	return (diff - slack) / (sqrt(norm) + small * sqrt((double)n));
}

double error_of_floats(const float *got, const double *want, int64_t n, double slack)
{
	double *g = doubles_of(got, n), e = error_of_doubles(g, want, n, slack);

	free(g);
	return e;
}

float moved_limit(const struct layer_model *m, int sign)
{
	double off = (table_is_packed() ? .015 : 2e-5) + 4 * m->drift;

	return (float)fmax((double)m->d.c.limit + sign * m->loose * off, 1e-3);
}

static double distance(const double *a, const double *b, int64_t n)
{
	double s = 0;

	for (int64_t i = 0; i < n; i++)
		s += (a[i] - b[i]) * (a[i] - b[i]);
	return sqrt(s);
}

void slack_between(const struct layer_model *m, const struct block_data *d,
		   const struct block_reference *low, const struct block_reference *high,
		   struct slack *s)
{
	int64_t n = (int64_t)d->c.T * d->c.H;

	s->out = distance(low->out, high->out, n);
	s->grad_x = distance(low->grad_x, high->grad_x, n);
	s->grad_weights = distance(low->grad_weights, high->grad_weights, (int64_t)d->c.T * d->c.k);
	for (int i = 0; i < 9; i++)
		s->grad[i] = trained(m, i) ? distance(low->grad[array_of(i)],
						      high->grad[array_of(i)], d->n[array_of(i)])
					   : 0;
}

void pass_reference(const struct layer_model *m, const struct block_data *d,
		    struct block_reference *r, struct slack *s)
{
	struct block_reference moved[2] = { 0 };

	memset(s, 0, sizeof *s);
	block_reference(r, d, d->ids);
	if (d->c.limit == 0)
		return;
	for (int i = 0; i < 2; i++) {
		struct block_data other = *d;

		other.c.limit = moved_limit(m, 2 * i - 1);
		block_reference(&moved[i], &other, d->ids);
	}
	slack_between(m, d, &moved[0], &moved[1], s);
	for (int i = 0; i < 2; i++)
		block_reference_free(&moved[i]);
}
