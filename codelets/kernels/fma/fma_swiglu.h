/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SwiGLU of 16 columns of m rows, in plain C that the compiler vectorises. The formulas and why
 * they hold at any gate are in codelets/kernels/elementwise/swiglu.c.
 */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_SWIGLU_H
#define MOE_CODELETS_KERNELS_FMA_FMA_SWIGLU_H

#include "codelets/kernels/elementwise/vecmath.h"
#include "codelets/kernels/packed/keep.h"
#include "codelets/kernels/packed/layout.h"

static void fma_swiglu(const struct moe_swiglu_rows *r, float *g, const float *u)
{
	for (int i = 0; i < r->m; i++, g += 16, u += 16) {
		uint16_t *restrict gate = r->gate + i * r->ld, *restrict up = r->up + i * r->ld;
		uint16_t g16[16], u16[16];
		float h[16];

		for (int j = 0; j < 16; j++) {
			g16[j] = moe_keep(g[j]);
			u16[j] = moe_keep(u[j]);
		}
		for (int j = 0; j < 16; j++)
			h[j] = g[j] / (1.0f + ref_exp(-g[j])) * u[j];
		memcpy(gate, g16, sizeof g16);
		memcpy(up, u16, sizeof u16);
		memcpy(g, h, sizeof h);
	}
}

static void fma_swiglu_bwd(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh,
			   float *dgate, float *dup, float *h, float *dgw)
{
	for (int i = 0; i < r->m; i++) {
		const uint16_t *gate = r->gate + i * r->ld, *up = r->up + i * r->ld;
		float dg[16], du[16], ha[16], dot[16];

		for (int j = 0; j < 16; j++) {
			float x = moe_kept(gate[j]), y = moe_kept(up[j]);
			float d = dh[i * ld_dh + j], dw = d * r->weight[i];
			float e = ref_exp(-fabsf(x)), large = 1.0f / (1.0f + e), small = e * large;
			float s = x < 0.0f ? small : large, rest = x < 0.0f ? large : small;

			dg[j] = dw * y * (s * (1.0f + x * rest));
			du[j] = dw * (x * s);
			ha[j] = x * s * y;
			dot[j] = dgw[i * 16 + j] + d * ha[j];
		}
		memcpy(dgate + i * 16, dg, sizeof dg);
		memcpy(dup + i * 16, du, sizeof du);
		memcpy(h + i * 16, ha, sizeof ha);
		memcpy(dgw + i * 16, dot, sizeof dot);
	}
}

#endif
