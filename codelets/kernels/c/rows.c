/* SPDX-License-Identifier: Apache-2.0 */
/* Pair arrays and the SwiGLU epilogues. */
#include "codelets/kernels/c/c.h"
#include "codelets/kernels/elementwise/vecmath.h"

#define LANES 16

void c_pairs(int m, const float *src, int64_t ld, const int32_t *token, const float *scale,
	     int cols, void *dst)
{
	float *to = dst;

	for (int i = 0; i < m; i++, to += cols) {
		const float *restrict from = src + (token ? token[i] : i) * ld;
		float s = scale ? scale[i] : 1.0f;

		for (int j = 0; j < cols; j++)
			to[j] = s * from[j];
	}
	if (m % 2)
		memset(to, 0, (size_t)cols * sizeof *to);
}

void c_pairs_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols, void *dst)
{
	float *to = dst;

	for (int i = 0; i < m; i++, to += cols) {
		const uint16_t *restrict from = src + (token ? token[i] : i) * ld;

		for (int j = 0; j < cols; j++)
			to[j] = moe_bf16_to_f32(from[j]);
	}
	if (m % 2)
		memset(to, 0, (size_t)cols * sizeof *to);
}

void c_swiglu_rows(const struct moe_swiglu_rows *r, float *g, const float *u)
{
	for (int i = 0; i < r->m; i++, g += LANES, u += LANES) {
		uint16_t *restrict gate = r->gate + i * r->ld, *restrict up = r->up + i * r->ld;

		for (int j = 0; j < LANES; j++) {
			gate[j] = moe_f32_to_bf16(g[j]);
			up[j] = moe_f32_to_bf16(u[j]);
		}
		for (int j = 0; j < LANES; j++)
			g[j] = g[j] / (1.0f + ref_exp(-g[j])) * u[j];
	}
}

/* As in elementwise/swiglu.c: s and 1 - s from e^-|x|, so that neither overflows nor cancels. */
void c_swiglu_rows_bwd(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh,
		       float *dgate, float *dup, float *h, float *dgw)
{
	for (int i = 0; i < r->m; i++) {
		const uint16_t *gate = r->gate + i * r->ld, *up = r->up + i * r->ld;
		const float *d = dh + i * ld_dh;
		float dg[LANES], du[LANES], hidden[LANES], weighted[LANES];

		for (int j = 0; j < LANES; j++) {
			float x = moe_bf16_to_f32(gate[j]), u = moe_bf16_to_f32(up[j]);
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
