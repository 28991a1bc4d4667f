/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/qkv.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

/* y[m] = norm of each head of pre (or of the whole row), then rope */
static void finish(const struct moe_attn_args *a, int heads, const float *pre, const float *w,
		   int norm_n, float *y)
{
	const struct moe_decoder *d = a->decoder;
	int m = a->t1 - a->t0, width = heads * d->dim;

	for (int n = 0; w && n < width; n += norm_n)
		moe_kernels()->rmsnorm(m, norm_n, pre + n, width, w, d->eps, y + n, width);
	moe_kernels()->rope(m, heads, d->dim, y, width, a->batch.position + a->t0, d->rope, 1);
}

static void project(const struct moe_attn_args *a, enum moe_attn_linear j, const float *x, float *y, void *scratch)
{
	struct moe_dropout drop;

	moe_linear_apply(&a->layer->linear[j], a->t1 - a->t0, x, y,
			 moe_linear_dropout(a->decoder, &a->drop, j, &drop), a->t0, scratch);
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_attn_args *a = args;
	const struct moe_decoder *d = a->decoder;
	const struct moe_decoder_layer *l = a->layer;
	const struct moe_attn_state *s = a->state;
	int m = a->t1 - a->t0;
	size_t wide = (size_t)(d->heads * d->dim), narrow = (size_t)(d->kv_heads * d->dim);
	float *q = s->q + (size_t)a->t0 * wide, *k = s->k + (size_t)(a->batch.past + a->t0) * narrow;
	float *q_pre = l->q_norm ? s->q_pre + (size_t)a->t0 * wide : q;
	float *k_pre = l->k_norm ? s->k_pre + (size_t)a->t0 * narrow : k;
	float *v = s->v + (size_t)(a->batch.past + a->t0) * narrow;
	float *xa = worker->scratch, *rest = xa + (size_t)m * (size_t)d->H;

	worker->rows = m;
	moe_kernels()->rmsnorm(m, d->H, s->x + (size_t)a->t0 * (size_t)d->H, d->H, l->attn_norm,
			       d->eps, xa, d->H);
	project(a, MOE_ATTN_Q, xa, q_pre, rest);
	project(a, MOE_ATTN_K, xa, k_pre, rest);
	project(a, MOE_ATTN_V, xa, v, rest);
	finish(a, d->heads, q_pre, l->q_norm, l->q_norm_n, q);
	finish(a, d->kv_heads, k_pre, l->k_norm, l->k_norm_n, k);
}

static double cost_us(const void *args)
{
	const struct moe_attn_args *a = args;
	double us = moe_task_us();

	for (int i = MOE_ATTN_Q; i <= MOE_ATTN_V; i++)
		us += moe_weight_us(MOE_GEMM_FORWARD, a->t1 - a->t0, &a->layer->linear[i].weight,
				    a->layer->linear[i].r);
	return us;
}

MOE_CODELET_AT(qkv, run, cost_us, MOE_HOME_LAYER);
