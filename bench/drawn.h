/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers and routing that bench_layer and bench_pipeline draw: functions of a counter, so every run and machine has the same. */
#ifndef MOE_BENCH_DRAWN_H
#define MOE_BENCH_DRAWN_H

#include "engine/base.h"

#include <math.h>

/* splitmix64 of a counter. The peers' programs draw the same numbers. */
static inline uint64_t drawn_bits(uint64_t counter)
{
	uint64_t z = (counter + 1) * 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

/* n values of dtype F32 or BF16, uniform with standard deviation `scale`. */
static inline void drawn_fill(void *dst, enum moe_dtype dtype, int64_t n, uint64_t seed, double scale)
{
	double unit = scale * sqrt(3) * 0x1p-31;

	for (int64_t i = 0; i < n; i++) {
		uint64_t bits = drawn_bits(seed << 40 | (uint64_t)i >> 1);
		float v = (float)(unit * (int32_t)(i & 1 ? bits >> 32 : bits));

		if (dtype == MOE_BF16)
			((uint16_t *)dst)[i] = moe_f32_to_bf16(v);
		else
			((float *)dst)[i] = v;
	}
}

#define DRAWN_MAX_TOP 64 /* experts per token */

/*
 * The k highest of E scores of a token into ids, and their softmax into weights. Scores are uniform in [0, 1) plus the
 * skew, which favours low indices; k at most DRAWN_MAX_TOP and E.
 */
static inline void drawn_route(int E, int k, double skew, uint64_t seed, int64_t token, int32_t *ids, float *weights)
{
	double score[DRAWN_MAX_TOP], sum = 0;

	for (int j = 0; j < k; j++)
		score[j] = -INFINITY;
	for (int e = 0; e < E; e++) {
		uint64_t bits = drawn_bits(seed << 40 | (uint64_t)(token * E + e));
		double s = (double)(bits >> 40) * 0x1p-24 + skew * (E - 1 - e) / E;
		int j = k - 1;

		if (s <= score[j])
			continue;
		for (; j > 0 && s > score[j - 1]; j--) {
			score[j] = score[j - 1];
			ids[j] = ids[j - 1];
		}
		score[j] = s;
		ids[j] = e;
	}
	for (int j = 0; j < k; j++)
		sum += exp(score[j]);
	for (int j = 0; j < k; j++)
		weights[j] = (float)(exp(score[j]) / sum);
}

#endif
