/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/vecmath.h"

#define BLOCK 256

/* silu(x) = x / (1 + e^-x): 0 for very negative x, where e^-x is inf */
void OWN(swiglu)(int64_t n, const float *gate, const float *up, float *h)
{
	for (int64_t i = 0; i < n; i++)
		h[i] = gate[i] / (1.0f + ref_exp(-gate[i])) * up[i];
}

/*
 * silu'(x) = s (1 + x (1 - s)) with s = 1 / (1 + e^-x); s and 1 - s come from e^-|x|, so that
 * neither overflows nor cancels. By blocks, as the outputs may alias dh.
 */
void OWN(swiglu_bwd)(int64_t n, const float *gate, const float *up, const float *dh, float *dgate,
		     float *dup)
{
	float dg[BLOCK], du[BLOCK];

	for (int64_t at = 0; at < n; at += BLOCK) {
		int count = (int)MOE_MIN(BLOCK, n - at);

		for (int i = 0; i < count; i++) {
			float x = gate[at + i], d = dh[at + i], e = ref_exp(-fabsf(x));
			float large = 1.0f / (1.0f + e), small = e * large;
			float s = x < 0.0f ? small : large, rest = x < 0.0f ? large : small;

			dg[i] = d * up[at + i] * (s * (1.0f + x * rest));
			du[i] = d * (x * s);
		}
		memcpy(dgate + at, dg, (size_t)count * sizeof *dg);
		memcpy(dup + at, du, (size_t)count * sizeof *du);
	}
}
