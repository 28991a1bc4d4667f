/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/router.h"

#include <math.h>

const struct moe_router *moe_router_find(const char *name)
{
	for (int i = 0; moe_router_list[i]; i++)
		if (!strcmp(moe_router_list[i]->name, name))
			return moe_router_list[i];
	return NULL;
}

double moe_aux_loss(int E, int64_t T, const double *prob_sum, const int32_t *offset)
{
	double loss = 0, n = (double)MOE_MAX(T, 1);

	for (int e = 0; e < E; e++)
		loss += (offset[e + 1] - offset[e]) / n * (prob_sum[e] / n);
	return E * loss;
}

void moe_aux_loss_bwd(int E, int64_t T_all, int T, const double *p, const int32_t *offset, double coef,
		      float *grad)
{
	double n = (double)MOE_MAX(T_all, 1), factor = coef * E / (n * n);

	for (int t = 0; t < T; t++, p += E, grad += E) {
		double mean = 0;

		for (int e = 0; e < E; e++)
			mean += p[e] * (offset[e + 1] - offset[e]);
		for (int e = 0; e < E; e++)
			grad[e] += (float)(factor * p[e] * ((offset[e + 1] - offset[e]) - mean));
	}
}

static double log_sum_exp(int E, const float *logits)
{
	double max = (double)logits[0], sum = 0;

	for (int e = 1; e < E; e++)
		max = fmax(max, (double)logits[e]);
	for (int e = 0; e < E; e++)
		sum += exp((double)logits[e] - max);
	return max + log(sum);
}

double moe_z_sum(int E, int T, const float *logits)
{
	double sum = 0;

	for (int t = 0; t < T; t++, logits += E) {
		double lse = log_sum_exp(E, logits);

		sum += lse * lse;
	}
	return sum;
}

void moe_z_loss_bwd(int E, int64_t T_all, int T, const float *logits, double coef, float *grad)
{
	double factor = 2 * coef / (double)MOE_MAX(T_all, 1);

	for (int t = 0; t < T; t++, logits += E, grad += E) {
		double lse = log_sum_exp(E, logits);

		for (int e = 0; e < E; e++)
			grad[e] += (float)(factor * lse * exp((double)logits[e] - lse));
	}
}
