/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ffn_bwd.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

size_t moe_ffn_scratch(const struct moe_ffn *f)
{
	size_t most = 2 * (size_t)f->H * sizeof(float); /* of the sigmoid gate */

	for (int i = MOE_FFN_GATE; i <= MOE_FFN_DOWN; i++) {
		int64_t n, k;

		moe_ffn_shape(f, i, &n, &k);
		most = MOE_MAX(most, moe_kernels()->linear_scratch(MOE_TOKEN_BLOCK, n, k, f->lora[i].r));
	}
	return (size_t)MOE_TOKEN_BLOCK * (size_t)f->H * sizeof(float) + most;
}

/*
 * With y = s f(x), s = sigmoid(a): ds = dy . f = dh . h for the unscaled dh, so f is never kept; then dh
 * is scaled by s.
 */
static void through_sigmoid(const struct moe_ffn *f, struct moe_ffn_state *s, int t0, int t1)
{
	for (int t = t0; t < t1; t++) {
		float *dh = s->dgate + (size_t)t * (size_t)f->I, g = s->sigmoid[t];
		const float *h = s->h + (size_t)t * (size_t)f->I;
		double dot = 0;

		for (int j = 0; j < f->I; j++) {
			dot += (double)dh[j] * h[j];
			dh[j] *= g;
		}
		s->dsigmoid[t] = (float)dot * g * (1 - g);
	}
}

/* dx [m, H] of rows from t0 on; scratch: what LoRA adds to the weight, and that masked, [H] each */
static void sigmoid_back(const struct moe_token_args *a, float *dx, float *lora)
{
	const struct moe_ffn *f = a->ffn;
	float *row = lora + f->H;
	bool adapted = moe_ffn_sigmoid_lora(f, lora);
	struct moe_dropout d;
	const struct moe_dropout *drop = moe_ffn_dropout(a, MOE_FFN_SIGMOID, &d);

	for (int t = a->t0; t < a->t1; t++, dx += f->H) {
		float ds = a->ffn_state->dsigmoid[t];

		for (int j = 0; j < f->H; j++)
			dx[j] += ds * f->sigmoid_weight[j];
		if (!adapted)
			continue;
		memcpy(row, lora, (size_t)f->H * sizeof *row);
		if (drop)
			moe_drop(drop, (enum moe_dropped)0, t, 0, f->H, row);
		for (int j = 0; j < f->H; j++)
			dx[j] += ds * row[j];
	}
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_ffn *f = a->ffn;
	struct moe_ffn_state *s = a->ffn_state;
	int m = a->t1 - a->t0, H = f->H, I = f->I;
	size_t at = (size_t)a->t0 * (size_t)I;
	float *dx = worker->scratch, *rest = dx + (size_t)m * (size_t)H;
	struct moe_ffn_lora lora;

	worker->rows = m;
	moe_kernels()->linear_bwd(m, &f->down, a->residual + (size_t)a->t0 * (size_t)H, H,
				  moe_ffn_lora(a, MOE_FFN_DOWN, a->t0, &lora), s->dgate + at, I, false, rest);
	moe_ffn_hidden(f, s, a->t0, a->t1);
	if (f->sigmoid_weight)
		through_sigmoid(f, s, a->t0, a->t1);
	moe_ffn_hidden_bwd(f, s, a->t0, a->t1);
	moe_kernels()->linear_bwd(m, &f->gate, s->dgate + at, I, moe_ffn_lora(a, MOE_FFN_GATE, a->t0, &lora), dx, H,
				  false, rest);
	moe_kernels()->linear_bwd(m, &f->up, s->dup + at, I, moe_ffn_lora(a, MOE_FFN_UP, a->t0, &lora), dx, H, true,
				  rest);
	if (f->sigmoid_weight)
		sigmoid_back(a, dx, rest);
	moe_norm_bwd_apply(&a->norm, a->t0, a->t1, H, dx, a->out);
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	const struct moe_ffn *f = a->ffn;
	double m = a->t1 - a->t0, n = m * f->I * sizeof(float);

	return moe_task_us() + moe_weight_us(MOE_GEMM_BACKWARD, m, &f->down, f->lora[MOE_FFN_DOWN].r) +
	       moe_weight_us(MOE_GEMM_BACKWARD, m, &f->gate, f->lora[MOE_FFN_GATE].r) +
	       moe_weight_us(MOE_GEMM_BACKWARD, m, &f->up, f->lora[MOE_FFN_UP].r) + moe_stream_us(3 * n, 3 * n);
}

MOE_CODELET_AT(ffn_bwd, run, cost_us, MOE_HOME_LAYER);
