/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ffn_up.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

#include <math.h>

/* Scratch: what LoRA adds to the weight, and a masked row, [H] each. */
static void sigmoid_rows(const struct moe_token_args *a, float *lora)
{
	const struct moe_ffn *f = a->ffn;
	float *row = lora + f->H;
	bool adapted = moe_ffn_sigmoid_lora(f, lora);
	struct moe_dropout d;
	const struct moe_dropout *drop = moe_ffn_dropout(a, MOE_FFN_SIGMOID, &d);

	for (int t = a->t0; t < a->t1; t++) {
		const float *x = a->ffn_state->x + (size_t)t * (size_t)f->H;
		double dot = 0;

		for (int j = 0; j < f->H; j++)
			dot += (double)x[j] * f->sigmoid_weight[j];
		memcpy(row, x, (size_t)f->H * sizeof *row);
		if (drop)
			moe_drop(drop, (enum moe_dropped)0, t, 0, f->H, row);
		for (int j = 0; adapted && j < f->H; j++)
			dot += (double)row[j] * lora[j];
		a->ffn_state->sigmoid[t] = (float)(1 / (1 + exp(-dot)));
	}
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_ffn *f = a->ffn;
	struct moe_ffn_state *s = a->ffn_state;
	int m = a->t1 - a->t0;
	size_t at = (size_t)a->t0 * (size_t)f->I;
	const float *x = s->x + (size_t)a->t0 * (size_t)f->H;
	struct moe_ffn_lora lora;

	worker->rows = m;
	moe_kernels()->linear(m, &f->gate, 0, f->I, x, f->H, NULL, moe_ffn_lora(a, MOE_FFN_GATE, a->t0, &lora),
			      s->gate + at, f->I, worker->scratch);
	moe_kernels()->linear(m, &f->up, 0, f->I, x, f->H, NULL, moe_ffn_lora(a, MOE_FFN_UP, a->t0, &lora),
			      s->up + at, f->I, worker->scratch);
	moe_ffn_hidden(f, s, a->t0, a->t1);
	if (f->sigmoid_weight)
		sigmoid_rows(a, worker->scratch);
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
