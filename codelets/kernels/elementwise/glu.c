/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/glu.h"

#define BLOCK 256

void OWN(glu)(const struct moe_glu *f, int64_t n, const float *gate, const float *up, float *h)
{
	float limit = f->limit, alpha = f->alpha, shift = f->shift;

	for (int64_t i = 0; i < n; i++)
		h[i] = glu_hidden(glu_below(gate[i], limit), glu_between(up[i], limit), alpha,
				  shift);
}

/* By blocks, as the outputs may alias dh. */
void OWN(glu_bwd)(const struct moe_glu *f, int64_t n, const float *gate, const float *up,
		  const float *dh, float *dgate, float *dup)
{
	float limit = f->limit, alpha = f->alpha, shift = f->shift;
	float dg[BLOCK], du[BLOCK];

	for (int64_t at = 0; at < n; at += BLOCK) {
		int count = (int)MOE_MIN(BLOCK, n - at);

		for (int i = 0; i < count; i++) {
			float x = gate[at + i], y = up[at + i], d = dh[at + i];
			struct glu_slope s =
				glu_slope(glu_below(x, limit), glu_between(y, limit), alpha, shift);

			dg[i] = x > limit ? 0.0f : d * s.by_gate;
			du[i] = fabsf(y) > limit ? 0.0f : d * s.silu;
		}
		memcpy(dgate + at, dg, (size_t)count * sizeof *dg);
		memcpy(dup + at, du, (size_t)count * sizeof *du);
	}
}
