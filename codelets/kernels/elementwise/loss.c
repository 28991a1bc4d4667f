/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/vecmath.h"

#define SUM_BLOCK 256 /* elements summed in f32 before their sum is added in double */

/* sum of e^(x - base) */
static double exp_sum(int64_t n, const float *x, float base)
{
	double sum = 0.0;

	for (int64_t at = 0; at < n; at += SUM_BLOCK) {
		float e[SUM_BLOCK] = { 0 }, lane[REF_LANES] = { 0 };
		int count = (int)MOE_MIN(SUM_BLOCK, n - at);

		for (int i = 0; i < count; i++)
			e[i] = ref_exp(x[at + i] - base);
		for (int i = 0; i < SUM_BLOCK; i += REF_LANES)
			for (int l = 0; l < REF_LANES; l++)
				lane[l] += e[i + l];
		for (int l = 0; l < REF_LANES; l++)
			sum += (double)lane[l];
	}
	return sum;
}

void OWN(ce_partial)(int m, int64_t v0, int64_t v1, const float *logits, int64_t ld,
		     const int32_t *label, float *max, float *sum, float *tgt)
{
	for (int64_t i = 0; i < m; i++) {
		const float *row = logits + i * ld;

		max[i] = ref_max(v1 - v0, row);
		sum[i] = (float)exp_sum(v1 - v0, row, ref_softmax_base(max[i]));
		if (label[i] >= v0 && label[i] < v1)
			tgt[i] = row[label[i] - v0];
	}
}

void OWN(ce_bwd)(int m, int64_t v0, int64_t v1, float *logits, int64_t ld, const int32_t *label,
		 const float *lse, float scale)
{
	for (int64_t i = 0; i < m; i++) {
		float *row = logits + i * ld;

		for (int64_t j = 0; j < v1 - v0; j++)
			row[j] = scale * ref_exp(row[j] - lse[i]);
		if (label[i] >= v0 && label[i] < v1)
			row[label[i] - v0] -= scale;
	}
}
