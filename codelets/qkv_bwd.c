/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/qkv_bwd.h"
#include "codelets/cost.h"
#include "codelets/vector_grad.h"
#include "engine/codelet.h"

/* A block's row of the parts of a norm's gradient, n floats each. */
static float *part_of(const struct moe_attn_args *a, float *part, int n)
{
	return part ? part + (size_t)(a->t0 / MOE_TOKEN_BLOCK) * (size_t)n : NULL;
}

/* grad [m]: through rope and the norm at pre, in place; tmp [m, heads dim]; part: of w's gradient, or NULL */
static void unfinish(const struct moe_attn_args *a, int heads, const float *pre, const float *w,
		     int norm_n, float *grad, float *tmp, float *part)
{
	const struct moe_decoder *d = a->decoder;
	int m = a->t1 - a->t0, width = heads * d->dim;
	size_t at = (size_t)a->t0 * (size_t)width;

	grad += at;
	moe_kernels()->rope(m, heads, d->dim, grad, width, a->batch.position + a->t0, d->rope, -1);
	if (!w)
		return;
	for (int n = 0; part && n < width; n += norm_n)
		moe_norm_part(m, norm_n, pre + at + n, width, d->eps, grad + n, width, n > 0, part);
	for (int n = 0; n < width; n += norm_n)
		moe_kernels()->rmsnorm_bwd(m, norm_n, pre + at + n, width, w, d->eps, grad + n,
					   width, tmp + n, width, false);
	memcpy(grad, tmp, (size_t)m * (size_t)width * sizeof *grad);
}

/* The first one, q, overwrites dx. */
static void project_back(const struct moe_attn_args *a, enum moe_attn_linear j, const float *dy, float *dx,
			 void *scratch)
{
	struct moe_dropout drop;

	moe_linear_back(&a->layer->linear[j], a->t1 - a->t0, dy, dx, j != MOE_ATTN_Q,
			moe_linear_dropout(a->decoder, &a->drop, j, &drop), a->t0, scratch);
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_attn_args *a = args;
	const struct moe_decoder *d = a->decoder;
	const struct moe_decoder_layer *l = a->layer;
	const struct moe_attn_state *s = a->state;
	const struct moe_attn_grad *g = a->grad;
	int m = a->t1 - a->t0;
	size_t at = (size_t)a->t0 * (size_t)d->H, n = (size_t)m * (size_t)d->H;
	size_t q = (size_t)a->t0 * (size_t)(d->heads * d->dim);
	size_t kv = (size_t)a->t0 * (size_t)(d->kv_heads * d->dim);
	float *dxa = worker->scratch, *rest = dxa + n;

	worker->rows = m;
	unfinish(a, d->heads, s->q_pre, l->q_norm, l->q_norm_n, g->grad_q, rest,
		 part_of(a, s->q_norm_part, l->q_norm_n));
	unfinish(a, d->kv_heads, s->k_pre, l->k_norm, l->k_norm_n, g->grad_k, rest,
		 part_of(a, s->k_norm_part, l->k_norm_n));
	if (!a->grad_x)
		return;
	project_back(a, MOE_ATTN_Q, g->grad_q + q, dxa, rest);
	project_back(a, MOE_ATTN_K, g->grad_k + kv, dxa, rest);
	project_back(a, MOE_ATTN_V, g->grad_v + kv, dxa, rest);
	if (s->attn_norm_part)
		moe_norm_part(m, d->H, s->x + at, d->H, d->eps, dxa, d->H, false,
			      part_of(a, s->attn_norm_part, d->H));
	memcpy(a->grad_x + at, a->grad_mid + at, n * sizeof *dxa);
	moe_kernels()->rmsnorm_bwd(m, d->H, s->x + at, d->H, l->attn_norm, d->eps, dxa, d->H,
				   a->grad_x + at, d->H, true);
}

static double cost_us(const void *args)
{
	const struct moe_attn_args *a = args;
	double us = moe_task_us();

	for (int i = MOE_ATTN_Q; i <= MOE_ATTN_V; i++)
		us += moe_weight_us(MOE_GEMM_BACKWARD, a->t1 - a->t0, &a->layer->linear[i].weight,
				    a->layer->linear[i].r);
	return us;
}

MOE_CODELET_AT(qkv_bwd, run, cost_us, MOE_HOME_LAYER);
