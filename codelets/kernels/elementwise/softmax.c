/* SPDX-License-Identifier: Apache-2.0 */
/* struct moe_softmax_ops (packed/softmax.h). Sums run in 16 lanes, whatever the vectors are. */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/vecmath.h"
#include "codelets/kernels/packed/softmax.h"

#define LANES 16

/* Pairwise, always in the same order. */
static float sum_lanes(const float lane[LANES])
{
	float half[LANES / 2];

	for (int l = 0; l < LANES / 2; l++)
		half[l] = lane[l] + lane[l + LANES / 2];
	return ((half[0] + half[4]) + (half[2] + half[6])) +
	       ((half[1] + half[5]) + (half[3] + half[7]));
}

/* row[j] = scale row[j], -inf outside of lo..hi; returns the largest. */
static float scale_row(int n, int lo, int hi, float scale, float *row)
{
	for (int j = 0; j < n; j++)
		row[j] = (j >= lo) & (j < hi) ? row[j] * scale : -INFINITY;
	return ref_max(n, row);
}

/* row[j] = e^(row[j] - base); returns their sum */
static float exp_row(int n, float *row, float base)
{
	float lane[LANES] = { 0 };

	for (int j = 0; j < n; j += LANES)
		for (int l = 0; l < LANES; l++) {
			row[j + l] = ref_exp(row[j + l] - base);
			lane[l] += row[j + l];
		}
	return sum_lanes(lane);
}

void OWN(softmax_weights)(const struct moe_score_tile *t, bool first, float *s,
			  struct moe_softmax_state *state)
{
	float base[MOE_TOKEN_BLOCK], keep[MOE_TOKEN_BLOCK], *o = state->o;

	for (int i = 0; i < t->m; i++)
		base[i] = scale_row(t->n, t->lo[i], t->hi[i], t->scale, s + i * MOE_TILE_LD);
	for (int i = 0; i < t->m; i++) {
		float old = state->max[i], max = base[i] > old ? base[i] : old;

		state->max[i] = max;
		base[i] = ref_softmax_base(max);
		keep[i] = ref_exp(old - base[i]);
	}
	for (int i = 0; i < t->m; i++, s += MOE_TILE_LD, o += state->ldo) {
		state->sum[i] = state->sum[i] * keep[i] + exp_row(t->n, s, base[i]);
		if (first || keep[i] == 1.0f)
			continue;
		for (int d = 0; d < state->dim; d++)
			o[d] *= keep[i];
	}
}

void OWN(softmax_finish)(int m, const struct moe_softmax_state *state, float *out, int64_t ld,
			 float *lse)
{
	for (int i = 0; i < m; i++, out += ld) {
		const float *o = state->o + i * state->ldo;
		float inverse = 1.0f / state->sum[i];

		for (int d = 0; d < state->dim; d++)
			out[d] = o[d] * inverse;
		lse[i] = state->max[i] + logf(state->sum[i]);
	}
}

float OWN(softmax_dot)(int n, const float *a, const float *b)
{
	float lane[LANES] = { 0 }, rest = 0.0f;
	int i = 0;

	for (; i + LANES <= n; i += LANES)
		for (int l = 0; l < LANES; l++)
			lane[l] += a[i + l] * b[i + l];
	for (; i < n; i++)
		rest += a[i] * b[i];
	return sum_lanes(lane) + rest;
}

static void spread(float x, float all[MOE_TOKEN_BLOCK])
{
	for (int j = 0; j < MOE_TOKEN_BLOCK; j++)
		all[j] = x;
}

/* From 0 and not from NaN, whatever lies outside of the span. */
static void backward_row(int n, int lo, int hi, float scale, const float *restrict lse,
			 const float *restrict centre, float *restrict p, float *restrict d)
{
	for (int j = 0; j < n; j += LANES)
		for (int l = j; l < j + LANES; l++) {
			bool seen = (l >= lo) & (l < hi);
			float weight = ref_exp(p[l] * scale - lse[l]);
			float grad = scale * (weight * (d[l] - centre[l]));

			p[l] = seen ? weight : 0.0f;
			d[l] = seen ? grad : 0.0f;
		}
}

void OWN(softmax_backward)(const struct moe_score_tile *t, bool by_column, const float *lse,
			   const float *centre, float *p, float *d)
{
	float all_lse[MOE_TOKEN_BLOCK], all_centre[MOE_TOKEN_BLOCK];

	for (int i = 0; i < t->m; i++, p += MOE_TILE_LD, d += MOE_TILE_LD) {
		if (!by_column) {
			spread(lse[i], all_lse);
			spread(centre[i], all_centre);
		}
		backward_row(t->n, t->lo[i], t->hi[i], t->scale, by_column ? lse : all_lse,
			     by_column ? centre : all_centre, p, d);
	}
}
