/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ffn_down.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_ffn *f = a->ffn;
	const struct moe_ffn_state *s = a->ffn_state;
	int m = a->t1 - a->t0, H = f->H;
	float *out = a->out + (size_t)a->t0 * (size_t)H;
	struct moe_ffn_lora lora;

	worker->rows = m;
	moe_kernels()->linear(m, &f->down, 0, H, s->h + (size_t)a->t0 * (size_t)f->I, f->I, NULL,
			      moe_ffn_lora(a, MOE_FFN_DOWN, a->t0, &lora), out, H, worker->scratch);
	for (int t = 0; t < m; t++, out += H) {
		const float *res = a->residual ? a->residual + (size_t)(a->t0 + t) * (size_t)H : NULL;

		for (int j = 0; f->sigmoid_weight && j < H; j++)
			out[j] *= s->sigmoid[a->t0 + t];
		for (int j = 0; res && j < H; j++)
			out[j] += res[j];
	}
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;

	return moe_task_us() + moe_weight_us(MOE_GEMM_FORWARD, a->t1 - a->t0, &a->ffn->down,
					       a->ffn->lora[MOE_FFN_DOWN].r);
}

MOE_CODELET_AT(ffn_down, run, cost_us, MOE_HOME_LAYER);
