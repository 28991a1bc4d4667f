/* SPDX-License-Identifier: Apache-2.0 */
/* One element of struct moe_glu (kernels.h), without branches, so that loops over it vectorise. */
#ifndef MOE_CODELETS_KERNELS_ELEMENTWISE_GLU_H
#define MOE_CODELETS_KERNELS_ELEMENTWISE_GLU_H

#include "codelets/kernels/elementwise/vecmath.h"
#include "codelets/kernels/kernels.h"

/* The comparisons are written so that NaN passes. */
static inline float glu_below(float x, float limit)
{
	return x > limit ? limit : x;
}

static inline float glu_between(float x, float limit)
{
	float y = glu_below(x, limit);

	return y < -limit ? -limit : y;
}

static inline float glu_hidden(float g, float u, float alpha, float shift)
{
	return g / (1.0f + ref_exp(-(alpha * g))) * (u + shift);
}

/*
 * h = (u + shift) silu and its derivatives by g and u. s and 1 - s come from e^-|alpha g|, so that
 * neither overflows nor cancels.
 */
struct glu_slope {
	float silu, h, by_gate;
};

static inline struct glu_slope glu_slope(float g, float u, float alpha, float shift)
{
	float x = alpha * g, e = ref_exp(-fabsf(x));
	float large = 1.0f / (1.0f + e), small = e * large;
	float s = x < 0.0f ? small : large, rest = x < 0.0f ? large : small;
	float silu = g * s, y = u + shift;

	return (struct glu_slope){ silu, silu * y, y * (s * (1.0f + x * rest)) };
}

#endif
