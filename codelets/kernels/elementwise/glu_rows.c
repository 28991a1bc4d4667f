/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gated epilogues of struct moe_tiles (contracts in packed/tiles.h). The backward must know
 * what was cut though gate and up are kept rounded: what was is kept as an infinity, and is
 * compared with the limit as rounded. What was not cut lies within it, as rounding keeps the order;
 * so the boundary passes, and forward and backward never disagree.
 */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/glu.h"
#include "codelets/kernels/packed/keep.h"
#include "codelets/kernels/packed/tiles.h"

#define LANES 16

void OWN(glu_rows)(const struct moe_swiglu_rows *r, float *restrict g, const float *restrict u)
{
	float limit = r->glu.limit, alpha = r->glu.alpha, shift = r->glu.shift;

	for (int i = 0; i < r->m; i++, g += LANES, u += LANES) {
		uint16_t *restrict gate = r->gate + i * r->ld, *restrict up = r->up + i * r->ld;

		for (int j = 0; j < LANES; j++) {
			float x = g[j] > limit ? INFINITY : g[j],
			      y = u[j] > limit ? INFINITY : u[j];

			gate[j] = moe_keep(x);
			up[j] = moe_keep(y < -limit ? -INFINITY : y);
		}
		for (int j = 0; j < LANES; j++)
			g[j] = glu_hidden(glu_below(g[j], limit), glu_between(u[j], limit), alpha,
					  shift);
	}
}

/* Outputs are written by the vector (fma/fma_swiglu.h). */
void OWN(glu_rows_bwd)(const struct moe_swiglu_rows *r, const float *restrict dh, int64_t ld_dh,
		       float *restrict dgate, float *restrict dup, float *restrict h,
		       float *restrict dgw)
{
	float limit = r->glu.limit, alpha = r->glu.alpha, shift = r->glu.shift;
	float last = moe_kept(moe_keep(limit));

	for (int i = 0; i < r->m; i++) {
		const uint16_t *restrict gate = r->gate + i * r->ld;
		const uint16_t *restrict up = r->up + i * r->ld;
		float weight = r->weight[i];

		for (int j = 0; j < LANES; j++) {
			float x = moe_kept(gate[j]), y = moe_kept(up[j]), d = dh[j],
			      dw = d * weight;
			struct glu_slope s =
				glu_slope(glu_below(x, limit), glu_between(y, limit), alpha, shift);

			dgate[j] = x > last ? 0.0f : dw * s.by_gate;
			dup[j] = fabsf(y) > last ? 0.0f : dw * s.silu;
			h[j] = s.h;
			dgw[j] += d * s.h;
		}
		dh += ld_dh;
		dgate += LANES;
		dup += LANES;
		h += LANES;
		dgw += LANES;
	}
}
