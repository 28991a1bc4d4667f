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

/* Outputs are written by the vector: copies of 64 bytes from arrays that 32-byte stores have just
 * filled wait for the stores to retire. */
static void fma_swiglu(const struct moe_swiglu_rows *r, float *restrict g, const float *restrict u)
{
	for (int i = 0; i < r->m; i++, g += 16, u += 16) {
		uint16_t *restrict gate = r->gate + i * r->ld, *restrict up = r->up + i * r->ld;

		for (int j = 0; j < 16; j++) {
			gate[j] = moe_keep(g[j]);
			up[j] = moe_keep(u[j]);
		}
		for (int j = 0; j < 16; j++)
			g[j] = g[j] / (1.0f + ref_exp(-g[j])) * u[j];
	}
}

static void fma_swiglu_bwd(const struct moe_swiglu_rows *r, const float *restrict dh, int64_t ld_dh,
			   float *restrict dgate, float *restrict dup, float *restrict h,
			   float *restrict dgw)
{
	for (int i = 0; i < r->m; i++) {
		const uint16_t *restrict gate = r->gate + i * r->ld;
		const uint16_t *restrict up = r->up + i * r->ld;
		float weight = r->weight[i];

		for (int j = 0; j < 16; j++) {
			float x = moe_kept(gate[j]), y = moe_kept(up[j]);
			float d = dh[j], dw = d * weight, e = ref_exp(-fabsf(x));
			float large = 1.0f / (1.0f + e), small = e * large;
			float s = x < 0.0f ? small : large, rest = x < 0.0f ? large : small;
			float silu = x * s, out = silu * y;

			dgate[j] = dw * y * (s * (1.0f + x * rest));
			dup[j] = dw * silu;
			h[j] = out;
			dgw[j] += d * out;
		}
		dh += ld_dh;
		dgate += 16;
		dup += 16;
		h += 16;
		dgw += 16;
	}
}

#endif
