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

/* row[j] = scale row[j], -inf outside of lo..hi; returns the largest. NaN is passed over: its
 * exponential shows it. */
static float scale_row(int n, int lo, int hi, float scale, float *row)
{
	float lane[LANES], max = -INFINITY;

	for (int l = 0; l < LANES; l++)
		lane[l] = -INFINITY;
	for (int j = 0; j < n; j += LANES)
		for (int l = 0; l < LANES; l++) {
			float x = row[j + l] * scale;

			x = (j + l >= lo) & (j + l < hi) ? x : -INFINITY;
			lane[l] = x > lane[l] ? x : lane[l];
			row[j + l] = x;
		}
	for (int l = 0; l < LANES; l++)
		max = lane[l] > max ? lane[l] : max;
	return max;
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
	float *o = state->o;

	for (int i = 0; i < t->m; i++, s += MOE_TILE_LD, o += state->ldo) {
		float new_max = scale_row(t->n, t->lo[i], t->hi[i], t->scale, s), base, keep;

		new_max = new_max > state->max[i] ? new_max : state->max[i];
		base = ref_softmax_base(new_max);
		keep = ref_exp(state->max[i] - base);
		state->sum[i] = state->sum[i] * keep + exp_row(t->n, s, base);
		state->max[i] = new_max;
		if (first || keep == 1.0f)
			continue;
		for (int d = 0; d < state->dim; d++)
			o[d] *= keep;
	}
}

void OWN(softmax_finish)(int m, struct moe_softmax_state *state, float *lse)
{
	float *o = state->o;

	for (int i = 0; i < m; i++, o += state->ldo) {
		float inverse = 1.0f / state->sum[i];

		for (int d = 0; d < state->dim; d++)
			o[d] *= inverse;
		lse[i] = state->max[i] + logf(state->sum[i]);
	}
}

void OWN(softmax_dots)(int m, int dim, const float *a, const float *b, int64_t ld, float *out)
{
	for (int i = 0; i < m; i++, a += ld, b += ld) {
		float lane[LANES] = { 0 };
		int d = 0;

		for (; d + LANES <= dim; d += LANES)
			for (int l = 0; l < LANES; l++)
				lane[l] += a[d + l] * b[d + l];
		for (; d < dim; d++)
			lane[d % LANES] += a[d] * b[d];
		out[i] = sum_lanes(lane);
	}
}

static void spread(float x, float all[MOE_TOKEN_BLOCK])
{
	for (int j = 0; j < MOE_TOKEN_BLOCK; j++)
		all[j] = x;
}

/* From 0 and not from NaN, whatever lies outside of the span. */
static void backward_row(int n, int lo, int hi, float scale, const float *restrict lse,
			 const float *restrict dot, float *restrict p, float *restrict d)
{
	for (int j = 0; j < n; j += LANES)
		for (int l = j; l < j + LANES; l++) {
			bool seen = (l >= lo) & (l < hi);
			float weight = ref_exp(p[l] * scale - lse[l]);
			float grad = scale * (weight * (d[l] - dot[l]));

			p[l] = seen ? weight : 0.0f;
			d[l] = seen ? grad : 0.0f;
		}
}

void OWN(softmax_backward)(const struct moe_score_tile *t, bool by_column, const float *lse,
			   const float *dot, float *p, float *d)
{
	float all_lse[MOE_TOKEN_BLOCK], all_dot[MOE_TOKEN_BLOCK];

	for (int i = 0; i < t->m; i++, p += MOE_TILE_LD, d += MOE_TILE_LD) {
		if (!by_column) {
			spread(lse[i], all_lse);
			spread(dot[i], all_dot);
		}
		backward_row(t->n, t->lo[i], t->hi[i], t->scale, by_column ? lse : all_lse,
			     by_column ? dot : all_dot, p, d);
	}
}
