/* SPDX-License-Identifier: Apache-2.0 */
/* Where the tokens went: load of the experts of each MoE layer. */
#ifndef MOE_TRAIN_EXPERT_STATS_H
#define MOE_TRAIN_EXPERT_STATS_H

#include "graphs/decoder.h"

struct moe_expert_stats {
	int n_layers, n_experts;
	int *layer;    /* [n_layers] of the decoder */
	int64_t *rows; /* [n_layers][n_experts] slots since the run began, resumed parts included */
	int64_t *step; /* the same of one step */
	double *load;  /* [n_layers] slots of the busiest expert over the mean, of one step */
	int32_t *unused; /* [n_layers] experts without a slot in one step */
};

/* A decoder without MoE layers has n_layers 0. */
enum moe_status moe_expert_stats_create(const struct moe_decoder *d, struct moe_expert_stats *s);
void moe_expert_stats_free(struct moe_expert_stats *s);
/* Where micro-batch m of a step reports: loads as below, results [micro-batches][layers of the
 * decoder]. */
void moe_expert_stats_bind(const struct moe_expert_stats *s, int64_t *loads,
			   struct moe_router_result *results, int layers, int m);
/* Elements of one micro-batch's loads. */
int64_t moe_expert_stats_size(const struct moe_expert_stats *s);
/* Adds a step of n micro-batches [n][n_layers][n_experts]; fills load and unused. */
void moe_expert_stats_add(struct moe_expert_stats *s, const int64_t *loads, int n);
/* rows into the layers' tokens_seen, where they are wanted. */
void moe_expert_stats_publish(const struct moe_expert_stats *s, const struct moe_decoder *d);

#endif
