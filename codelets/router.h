/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routers: from logits [T, E] to k experts and weights per token, and back. One file each in
 * codelets/routers/, found by name. Pure functions on rows; arithmetic in double.
 */
#ifndef MOE_CODELETS_ROUTER_H
#define MOE_CODELETS_ROUTER_H

#include "engine/base.h"

struct moe_router_config {
	int E, k;
	bool normalise; /* the k weights are divided by their sum */
};

struct moe_router {
	const char *name;
	/* MOE_ERR_ARG for a configuration that this router cannot have */
	enum moe_status (*check)(const struct moe_router_config *c);
	/* ids [T, k] distinct within a token, best first, ties to the lowest index; weights [T, k] */
	void (*select)(const struct moe_router_config *c, int T, const float *logits, int32_t *ids,
		       float *weights);
	/* probs [T, E]: what the auxiliary loss averages; NULL: the router has no such loss */
	void (*probs)(const struct moe_router_config *c, int T, const float *logits, double *probs);
	/* grad_logits [T, E] from grad_weights [T, k] */
	void (*backward)(const struct moe_router_config *c, int T, const float *logits,
			 const int32_t *ids, const float *weights, const float *grad_weights,
			 float *grad_logits);
};

extern const struct moe_router *const moe_router_list[];
/* NULL if there is none of that name. */
const struct moe_router *moe_router_find(const char *name);

/*
 * Load-balancing loss of one layer (Switch Transformer, as load_balancing_loss_func of transformers):
 * E sum_e (count_e / T) mean_t p_te. prob_sum [E] = sum over tokens of p; count [E] = slots.
 */
double moe_aux_loss(int E, int64_t T, const double *prob_sum, const int32_t *offset);
/* grad [T, E] += coef d(aux)/d(logits), for softmax probabilities p [T rows, E] */
void moe_aux_loss_bwd(int E, int64_t T_all, int T, const double *p, const int32_t *offset, double coef,
		      float *grad);

/*
 * Router z-loss of one layer (Zoph et al. 2022, ST-MoE, equation 5): mean_t (log sum_e exp(logits_te))^2. This is the
 * sum over T rows.
 */
double moe_z_sum(int E, int T, const float *logits);
/* grad [T, E] += coef d(z-loss)/d(logits) of T of T_all rows */
void moe_z_loss_bwd(int E, int64_t T_all, int T, const float *logits, double coef, float *grad);

#endif
