/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ffn_up.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

#include <math.h>

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_ffn *f = a->ffn;
	struct moe_ffn_state *s = a->ffn_state;
	int m = a->t1 - a->t0;
	size_t at = (size_t)a->t0 * (size_t)f->I;
	const float *x = s->x + (size_t)a->t0 * (size_t)f->H, *gate;
	struct moe_lora lora;

	worker->rows = m;
	moe_kernels()->linear(m, &f->gate, 0, f->I, x, f->H, NULL, moe_ffn_lora(f, MOE_FFN_GATE, &lora),
			      s->gate + at, f->I, worker->scratch);
	moe_kernels()->linear(m, &f->up, 0, f->I, x, f->H, NULL, moe_ffn_lora(f, MOE_FFN_UP, &lora),
			      s->up + at, f->I, worker->scratch);
	moe_kernels()->swiglu((int64_t)m * f->I, s->gate + at, s->up + at, s->h + at);
	gate = moe_ffn_sigmoid(f, worker->scratch);
	for (int t = 0; gate && t < m; t++) {
		double dot = 0;

		for (int j = 0; j < f->H; j++)
			dot += (double)x[(size_t)t * (size_t)f->H + (size_t)j] * gate[j];
		s->sigmoid[a->t0 + t] = (float)(1 / (1 + exp(-dot)));
	}
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	double m = a->t1 - a->t0, n = m * a->ffn->I * sizeof(float);

	return moe_task_us() +
	       moe_weight_us(MOE_GEMM_FORWARD, m, &a->ffn->gate, a->ffn->lora[MOE_FFN_GATE].r) +
	       moe_weight_us(MOE_GEMM_FORWARD, m, &a->ffn->up, a->ffn->lora[MOE_FFN_UP].r) +
	       moe_stream_us(2 * n, n);
}

MOE_CODELET_AT(ffn_up, run, cost_us, MOE_HOME_LAYER);
