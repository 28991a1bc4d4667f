/* SPDX-License-Identifier: Apache-2.0 */
/*
 * DeepSeek-V4's router, which this build lacks: its fixtures give ids and weights to the block.
 * grad_x has the router's path, which is added here: s_e = sqrt(softplus(logit_e)), w_j = c s_j /
 * sum of the chosen s.
 */
#include "tests/fixture.h"

#include "engine/base.h"

#include <math.h>
#include <stdlib.h>

/* grad_logits [T, E] from the gradient of the weights [T, k] */
static void through_scores(const struct fixture *g, const double *logits, const double *ids,
			   const double *w, const double *gw, double *grad)
{
	for (int64_t t = 0; t < g->T;
	     t++, logits += g->E, grad += g->E, ids += g->k, w += g->k, gw += g->k) {
		double sum = 0, mean = 0;

		for (int64_t j = 0; j < g->k; j++) {
			sum += sqrt(log1p(exp(logits[(int)ids[j]])));
			mean += gw[j] * w[j];
		}
		for (int64_t j = 0; j < g->k; j++) {
			double l = logits[(int)ids[j]], s = sqrt(log1p(exp(l)));

			grad[(int)ids[j]] =
				(g->router_scale * gw[j] - mean) / sum / (1 + exp(-l)) / (2 * s);
		}
	}
}

void fixture_router_path(struct fixture *g, const double *grad_weights, double *grad_x)
{
	int64_t n, T = g->T, E = g->E, H = g->H;
	double *logits = fixture_doubles(g, "router_logits", &n),
	       *ids = fixture_doubles(g, "topk_ids", &n);
	double *w = fixture_doubles(g, "topk_weights", &n), *x = fixture_doubles(g, "x", &n);
	double *router = fixture_doubles(g, "router_weight", &n);
	double *grad = calloc((size_t)(T * E) + 1, sizeof *grad),
	       *gr = calloc((size_t)(E * H) + 1, sizeof *gr);

	/* for the choice, which the file gives */
	fixture_find(g, "e_score_correction_bias"), fixture_find(g, "tid2eid"),
		fixture_find(g, "input_ids");
	if (logits && ids && w && x && router)
		through_scores(g, logits, ids, w, grad_weights, grad);
	else
		fixture_fail(g, "an input of the router is missing");
	for (int64_t t = 0; g->ok && t < T; t++)
		for (int64_t e = 0; e < E; e++)
			for (int64_t h = 0; h < H; h++) {
				grad_x[t * H + h] += grad[t * E + e] * router[e * H + h];
				gr[e * H + h] += grad[t * E + e] * x[t * H + h];
			}
	fixture_compare(g, "grad_router_weight", gr, E * H, fixture_tolerance()->grad);
	free(logits), free(ids), free(w), free(x), free(router), free(grad), free(gr);
}
