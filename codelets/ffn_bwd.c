/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ffn_bwd.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

size_t moe_ffn_scratch(const struct moe_ffn *f)
{
	size_t most = (size_t)f->H * sizeof(float); /* the sigmoid gate's weight */

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

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_ffn *f = a->ffn;
	struct moe_ffn_state *s = a->ffn_state;
	int m = a->t1 - a->t0, H = f->H, I = f->I;
	size_t at = (size_t)a->t0 * (size_t)I;
	float *dx = worker->scratch, *rest = dx + (size_t)m * (size_t)H;
	const float *gate;
	struct moe_lora lora;

	worker->rows = m;
	moe_kernels()->linear_bwd(m, &f->down, a->residual + (size_t)a->t0 * (size_t)H, H,
				  moe_ffn_lora(f, MOE_FFN_DOWN, &lora), s->dgate + at, I, false, rest);
	moe_kernels()->swiglu((int64_t)m * I, s->gate + at, s->up + at, s->h + at);
	if (f->sigmoid_weight)
		through_sigmoid(f, s, a->t0, a->t1);
	moe_kernels()->swiglu_bwd((int64_t)m * I, s->gate + at, s->up + at, s->dgate + at, s->dgate + at,
				  s->dup + at);
	moe_kernels()->linear_bwd(m, &f->gate, s->dgate + at, I, moe_ffn_lora(f, MOE_FFN_GATE, &lora), dx, H,
				  false, rest);
	moe_kernels()->linear_bwd(m, &f->up, s->dup + at, I, moe_ffn_lora(f, MOE_FFN_UP, &lora), dx, H, true,
				  rest);
	gate = moe_ffn_sigmoid(f, rest);
	for (int t = 0; gate && t < m; t++)
		for (int j = 0; j < H; j++)
			dx[(size_t)t * (size_t)H + (size_t)j] += s->dsigmoid[a->t0 + t] * gate[j];
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
