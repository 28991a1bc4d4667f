/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/attn_out_bwd.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_attn_args *a = args;
	const struct moe_decoder *d = a->decoder;
	struct moe_attention attention = moe_attention_of(a);
	struct moe_dropout drop;

	worker->rows = a->t1 - a->t0;
	moe_linear_back(&a->layer->linear[MOE_ATTN_O], a->t1 - a->t0,
			a->grad_mid + (size_t)a->t0 * (size_t)d->H,
			a->grad->grad_o + (size_t)a->t0 * (size_t)(d->heads * d->dim), false,
			moe_linear_dropout(d, &a->drop, MOE_ATTN_O, &drop), a->t0, worker->scratch);
	moe_kernels()->attention_centre(&attention, a->t0, a->t1);
}

static double cost_us(const void *args)
{
	const struct moe_attn_args *a = args;
	const struct moe_linear *o = &a->layer->linear[MOE_ATTN_O];

	return moe_task_us() + moe_weight_us(MOE_GEMM_BACKWARD, a->t1 - a->t0, &o->weight, o->r);
}

MOE_CODELET_AT(attn_out_bwd, run, cost_us, MOE_HOME_LAYER);
