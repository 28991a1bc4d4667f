/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/sample.h"

#include <math.h>
#include <stdlib.h>

/* splitmix64 as a number in [0, 1) */
static double uniform(struct sampler *s)
{
	uint64_t z = s->state += 0x9e3779b97f4a7c15ull;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	z ^= z >> 31;
	return (double)(z >> 11) * 0x1p-53;
}

static void penalise(const struct sampler *s, float *logits, int64_t vocab, const int32_t *seen,
		     int64_t n)
{
	float penalty = (float)s->repetition_penalty;

	for (int64_t i = 0; i < n; i++) {
		int32_t id = seen[i];
		int64_t j = 0;

		while (j < i && seen[j] != id)
			j++;
		if (j < i || id < 0 || id >= vocab) /* once per token */
			continue;
		logits[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
	}
}

static int by_probability(const void *a, const void *b)
{
	const struct candidate *x = a, *y = b;

	if (x->p != y->p)
		return x->p < y->p ? 1 : -1;
	return x->id < y->id ? -1 : 1;
}

static int32_t draw(struct sampler *s, const float *logits, int64_t vocab, float largest)
{
	double sum = 0, kept = 0, at;
	int64_t n = 0;

	for (int64_t i = 0; i < vocab; i++) {
		double p = exp(((double)logits[i] - largest) / s->temperature);

		s->candidates[i] = (struct candidate){ isnan(p) ? 0 : p, (int32_t)i };
		sum += s->candidates[i].p;
	}
	qsort(s->candidates, (size_t)vocab, sizeof *s->candidates, by_probability);
	while (n < vocab && (n == 0 || kept < s->top_p * sum))
		kept += s->candidates[n++].p;
	at = uniform(s) * kept;
	for (int64_t i = 0; i < n; i++) {
		at -= s->candidates[i].p;
		if (at < 0)
			return s->candidates[i].id;
	}
	return s->candidates[0].id;
}

int32_t sample_token(struct sampler *s, float *logits, int64_t vocab, const int32_t *seen,
		     int64_t n_seen)
{
	int64_t best = 0;

	if (s->repetition_penalty != 1)
		penalise(s, logits, vocab, seen, n_seen);
	for (int64_t i = 1; i < vocab; i++)
		if (logits[i] > logits[best] || isnan(logits[best]))
			best = i;
	if (s->temperature <= 0)
		return (int32_t)best;
	return draw(s, logits, vocab, logits[best]);
}
