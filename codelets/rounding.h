/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stochastic rounding of f32 to bf16: to one of the two neighbours, each with the probability that
 * makes the expected value right, so that steps below half a unit in the last place are not lost.
 * The random bits are a function of (key, index) and of nothing that was drawn before.
 */
#ifndef MOE_CODELETS_ROUNDING_H
#define MOE_CODELETS_ROUNDING_H

#include "engine/base.h"

static inline uint64_t moe_rounding_key(uint64_t array_key, int64_t step)
{
	return moe_mix(array_key + (uint64_t)step * 0x9e3779b97f4a7c15ull);
}

/* n values, the first of which is element `index` of the array. */
static inline void moe_round_bf16(uint64_t key, int64_t index, int64_t n, const float *v,
				  uint16_t *out)
{
	for (int64_t i = 0; i < n; i++) {
		uint64_t at = (uint64_t)(index + i);
		uint64_t bits = moe_mix(key + (at >> 2) * 0xd1342543de82ef95ull);
		uint32_t u;

		memcpy(&u, &v[i], sizeof u);
		if ((u & 0x7f800000u) == 0x7f800000u) /* Inf and NaN stay what they are */
			moe_from_f32(&out[i], MOE_BF16, &v[i], 1);
		else
			out[i] = (uint16_t)((u + (bits >> 16 * (at & 3) & 0xffff)) >> 16);
	}
}

#endif
