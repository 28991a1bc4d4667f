/* SPDX-License-Identifier: Apache-2.0 */
/* The SwiGLU epilogues of struct moe_tiles (contracts in packed/tiles.h). */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/vecmath.h"
#include "codelets/kernels/packed/keep.h"
#include "codelets/kernels/packed/tiles.h"

#define LANES 16

void OWN(swiglu_rows)(const struct moe_swiglu_rows *r, float *g, const float *u)
{
	for (int i = 0; i < r->m; i++, g += LANES, u += LANES) {
		uint16_t *restrict gate = r->gate + i * r->ld, *restrict up = r->up + i * r->ld;

		for (int j = 0; j < LANES; j++) {
			gate[j] = moe_keep(g[j]);
			up[j] = moe_keep(u[j]);
		}
		for (int j = 0; j < LANES; j++)
			g[j] = g[j] / (1.0f + ref_exp(-g[j])) * u[j];
	}
}

/* As in swiglu.c: s and 1 - s from e^-|x|, so that neither overflows nor cancels. */
void OWN(swiglu_rows_bwd)(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh,
			  float *dgate, float *dup, float *h, float *dgw)
{
	for (int i = 0; i < r->m; i++) {
		const uint16_t *gate = r->gate + i * r->ld, *up = r->up + i * r->ld;
		const float *d = dh + i * ld_dh;
		float dg[LANES], du[LANES], hidden[LANES], weighted[LANES];

		for (int j = 0; j < LANES; j++) {
			float x = moe_kept(gate[j]), u = moe_kept(up[j]);
			float e = ref_exp(-fabsf(x)), large = 1.0f / (1.0f + e), small = e * large;
			float s = x < 0.0f ? small : large, rest = x < 0.0f ? large : small;
			float wd = d[j] * r->weight[i];

			dg[j] = wd * u * (s * (1.0f + x * rest));
			du[j] = wd * (x * s);
			hidden[j] = x * s * u;
			weighted[j] = d[j] * hidden[j];
		}
		memcpy(dgate + i * LANES, dg, sizeof dg);
		memcpy(dup + i * LANES, du, sizeof du);
		memcpy(h + i * LANES, hidden, sizeof hidden);
		for (int j = 0; j < LANES; j++)
			dgw[i * LANES + j] += weighted[j];
	}
}
