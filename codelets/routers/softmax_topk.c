/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax over all experts, the k most probable, weights optionally renormalised
 * (Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE). */
#include "codelets/router.h"

#include <math.h>

#define MAX_E 4096

static enum moe_status check(const struct moe_router_config *c)
{
	if (c->E < 1 || c->E > MAX_E)
		return moe_fail(MOE_ERR_ARG, "%d experts; 1 to %d are possible", c->E, MAX_E);
	if (c->k < 1 || c->k > c->E)
		return moe_fail(MOE_ERR_ARG, "%d experts per token of %d", c->k, c->E);
	return MOE_OK;
}

static void softmax(int E, const float *logits, double *p)
{
	double max = logits[0], sum = 0;

	for (int e = 1; e < E; e++)
		max = MOE_MAX(max, (double)logits[e]);
	for (int e = 0; e < E; e++)
		sum += p[e] = exp(logits[e] - max);
	for (int e = 0; e < E; e++)
		p[e] /= sum;
}

/* k rounds of "largest not yet taken"; a NaN is never larger, so ids stay distinct and valid */
static void top_k(int E, int k, const float *logits, int32_t *ids)
{
	for (int j = 0; j < k; j++) {
		int best = -1;

		for (int e = 0; e < E; e++) {
			bool taken = false;

			for (int i = 0; i < j; i++)
				taken |= ids[i] == e;
			if (!taken && (best < 0 || logits[e] > logits[best]))
				best = e;
		}
		ids[j] = best;
	}
}

static void select_rows(const struct moe_router_config *c, int T, const float *logits, int32_t *ids,
			float *weights)
{
	double p[MAX_E];

	for (int t = 0; t < T; t++, logits += c->E, ids += c->k, weights += c->k) {
		double sum = 0;

		softmax(c->E, logits, p);
		top_k(c->E, c->k, logits, ids);
		for (int j = 0; j < c->k; j++)
			sum += p[ids[j]];
		for (int j = 0; j < c->k; j++)
			weights[j] = (float)(c->normalise ? p[ids[j]] / sum : p[ids[j]]);
	}
}

static void probs(const struct moe_router_config *c, int T, const float *logits, double *p)
{
	for (int t = 0; t < T; t++)
		softmax(c->E, logits + (size_t)t * (size_t)c->E, p + (size_t)t * (size_t)c->E);
}

/*
 * With w_j = p_j / S (S = sum of the chosen p, or 1): dL/dp_j = (g_j - sum_i g_i w_i) / S for chosen
 * j when normalised, g_j otherwise; then through the softmax.
 */
static void backward(const struct moe_router_config *c, int T, const float *logits, const int32_t *ids,
		     const float *weights, const float *grad_weights, float *grad_logits)
{
	double p[MAX_E], dp[MAX_E];

	(void)weights; /* the double values are wanted */
	for (int t = 0; t < T; t++) {
		double S = 0, shared = 0, mean = 0;

		softmax(c->E, logits, p);
		memset(dp, 0, (size_t)c->E * sizeof *dp);
		for (int j = 0; j < c->k; j++)
			S += p[ids[j]];
		for (int j = 0; j < c->k; j++)
			shared += grad_weights[j] * (p[ids[j]] / S);
		for (int j = 0; j < c->k; j++)
			dp[ids[j]] = c->normalise ? (grad_weights[j] - shared) / S : grad_weights[j];
		for (int e = 0; e < c->E; e++)
			mean += dp[e] * p[e];
		for (int e = 0; e < c->E; e++)
			grad_logits[e] = (float)(p[e] * (dp[e] - mean));
		logits += c->E;
		grad_logits += c->E;
		ids += c->k;
		grad_weights += c->k;
	}
}

extern const struct moe_router moe_router_softmax_topk;
const struct moe_router moe_router_softmax_topk = {
	.name = "softmax_topk",
	.check = check,
	.select = select_rows,
	.probs = probs,
	.backward = backward,
};
