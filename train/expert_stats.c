/* SPDX-License-Identifier: Apache-2.0 */
#include "train/expert_stats.h"

enum moe_status moe_expert_stats_create(const struct moe_decoder *d, struct moe_expert_stats *s)
{
	size_t n;

	memset(s, 0, sizeof *s);
	s->layer = moe_calloc((size_t)d->n_layers, sizeof *s->layer);
	if (!s->layer)
		goto fail;
	for (int l = 0; l < d->n_layers; l++)
		if (d->layers[l].experts) {
			s->layer[s->n_layers++] = l;
			s->n_experts = d->layers[l].experts->E;
		}
	n = (size_t)MOE_MAX(moe_expert_stats_size(s), 1);
	s->rows = moe_calloc(n, sizeof *s->rows);
	s->step = moe_calloc(n, sizeof *s->step);
	s->load = moe_calloc((size_t)MOE_MAX(s->n_layers, 1), sizeof *s->load);
	s->unused = moe_calloc((size_t)MOE_MAX(s->n_layers, 1), sizeof *s->unused);
	if (s->rows && s->step && s->load && s->unused)
		return MOE_OK;
fail:
	moe_expert_stats_free(s);
	return moe_fail(MOE_ERR_NOMEM, "no memory for the experts' statistics");
}

void moe_expert_stats_free(struct moe_expert_stats *s)
{
	moe_free(s->layer);
	moe_free(s->rows);
	moe_free(s->step);
	moe_free(s->load);
	moe_free(s->unused);
	memset(s, 0, sizeof *s);
}

int64_t moe_expert_stats_size(const struct moe_expert_stats *s)
{
	return (int64_t)s->n_layers * s->n_experts;
}

void moe_expert_stats_bind(const struct moe_expert_stats *s, int64_t *loads,
			   struct moe_router_result *results, int layers, int m)
{
	for (int l = 0; l < s->n_layers; l++)
		results[m * layers + s->layer[l]] =
			(struct moe_router_result){ .load = loads + m * moe_expert_stats_size(s) +
							    (int64_t)l * s->n_experts };
}

void moe_expert_stats_add(struct moe_expert_stats *s, const int64_t *loads, int n)
{
	int64_t size = moe_expert_stats_size(s);

	memset(s->step, 0, (size_t)size * sizeof *s->step);
	for (int64_t i = 0; i < n * size; i++)
		s->step[i % size] += loads[i];
	for (int l = 0; l < s->n_layers; l++) {
		const int64_t *step = s->step + (int64_t)l * s->n_experts;
		int64_t sum = 0, most = 0;

		s->unused[l] = 0;
		for (int e = 0; e < s->n_experts; e++) {
			s->rows[(int64_t)l * s->n_experts + e] += step[e];
			sum += step[e];
			most = MOE_MAX(most, step[e]);
			s->unused[l] += step[e] == 0;
		}
		s->load[l] = (double)most * s->n_experts / (double)MOE_MAX(sum, 1);
	}
}

void moe_expert_stats_publish(const struct moe_expert_stats *s, const struct moe_decoder *d)
{
	for (int l = 0; l < s->n_layers; l++) {
		int64_t *to = d->layers[s->layer[l]].experts->tokens_seen;

		if (to)
			memcpy(to, s->rows + (int64_t)l * s->n_experts,
			       (size_t)s->n_experts * sizeof *to);
	}
}
