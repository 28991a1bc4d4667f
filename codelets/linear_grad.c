/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/linear_grad.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

/* The projection's gradient at its output, [T, n]. */
static const float *output_grad(const struct moe_attn_args *a)
{
	switch (a->linear) {
	case MOE_ATTN_Q:
		return a->grad->grad_q;
	case MOE_ATTN_K:
		return a->grad->grad_k;
	case MOE_ATTN_V:
		return a->grad->grad_v;
	default:
		return a->grad_mid;
	}
}

/* By token blocks in order, so that the sums never depend on how the step was cut. */
static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_attn_args *a = args;
	const struct moe_decoder *d = a->decoder;
	const struct moe_linear *l = &a->layer->linear[a->linear];
	struct moe_lora lora = moe_linear_lora(l);
	struct moe_dropout drop;
	int64_t n = l->weight.n, k = l->weight.k;
	const float *dy = output_grad(a);
	float *xa = worker->scratch, *rest = xa + (size_t)MOE_TOKEN_BLOCK * (size_t)d->H;

	worker->rows = a->batch.T;
	lora.drop = moe_linear_dropout(d, &a->drop, a->linear, &drop);
	if (a->first) {
		memset(l->lora_a.grad, 0, (size_t)l->lora_a.piece * sizeof(float));
		memset(l->lora_b.grad, 0, (size_t)l->lora_b.piece * sizeof(float));
	}
	for (int t = 0; t < a->batch.T; t += MOE_TOKEN_BLOCK) {
		int m = MOE_MIN(MOE_TOKEN_BLOCK, a->batch.T - t);
		const float *x = a->state->o + (size_t)t * (size_t)k;

		lora.token = t;
		if (a->linear != MOE_ATTN_O) {
			moe_kernels()->rmsnorm(m, d->H, a->state->x + (size_t)t * (size_t)d->H,
					       d->H, a->layer->attn_norm, d->eps, xa, d->H);
			x = xa;
		}
		moe_kernels()->linear_lora_grad(m, n, k, x, k, dy + (size_t)t * (size_t)n, n, &lora,
						l->lora_a.grad, l->lora_b.grad, rest);
	}
}

static double cost_us(const void *args)
{
	const struct moe_attn_args *a = args;
	const struct moe_linear *l = &a->layer->linear[a->linear];
	double m = a->batch.T, n = (double)l->weight.n, k = (double)l->weight.k;

	/* both thin projections, then both gradients; A and B stay in the cache */
	return moe_task_us() + moe_f32_gemm_us(MOE_GEMM_FORWARD, m, l->r, 2 * (n + k)) +
	       moe_stream_us(m * (n + k) * sizeof(float), 0);
}

MOE_CODELET(linear_grad, run, cost_us);
