/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/attn_out.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_attn_args *a = args;
	const struct moe_decoder *d = a->decoder;
	const struct moe_attn_state *s = a->state;
	int m = a->t1 - a->t0;
	size_t at = (size_t)a->t0 * (size_t)d->H, n = (size_t)m * (size_t)d->H;
	const float *x = s->x + at;
	float *out = s->x_mid + at;
	struct moe_dropout drop;

	worker->rows = m;
	moe_linear_apply(&a->layer->linear[MOE_ATTN_O], m,
			 s->o + (size_t)a->t0 * (size_t)(d->heads * d->dim), out,
			 moe_linear_dropout(d, &a->drop, MOE_ATTN_O, &drop), a->t0, worker->scratch);
	for (size_t i = 0; i < n; i++)
		out[i] += x[i];
	moe_kernels()->rmsnorm(m, d->H, out, d->H, a->layer->ffn_norm, d->eps, s->xn + at, d->H);
	if (a->xn16)
		moe_kernels()->to_bf16(m, d->H, s->xn + at, d->H,
				       a->xn16 + (int64_t)a->t0 * moe_width(d->H), moe_width(d->H));
}

static double cost_us(const void *args)
{
	const struct moe_attn_args *a = args;
	const struct moe_linear *o = &a->layer->linear[MOE_ATTN_O];

	return moe_task_us() + moe_weight_us(MOE_GEMM_FORWARD, a->t1 - a->t0, &o->weight, o->r);
}

MOE_CODELET_AT(attn_out, run, cost_us, MOE_HOME_LAYER);
