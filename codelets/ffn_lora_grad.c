/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ffn_lora_grad.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

size_t moe_ffn_lora_grad_scratch(const struct moe_ffn *f)
{
	size_t most = 0, H = (size_t)f->H * sizeof(float);

	for (int i = MOE_FFN_GATE; i <= MOE_FFN_DOWN; i++) {
		int64_t n, k;

		moe_ffn_shape(f, i, &n, &k);
		most = MOE_MAX(most, moe_kernels()->linear_scratch(MOE_TOKEN_BLOCK, n, k, f->lora[i].r));
	}
	return MOE_TOKEN_BLOCK * H + most;
}

/* With g = sum of ds x, x as LoRA sees it: da = scale b g, db = scale a . g */
static void sigmoid_grad(const struct moe_token_args *a, float *g)
{
	const struct moe_matrix_lora *l = &a->ffn->lora[MOE_FFN_SIGMOID];
	const struct moe_ffn_state *s = a->ffn_state;
	int64_t H = a->ffn->H;
	float *masked = g + H;
	struct moe_dropout d;
	const struct moe_dropout *drop = moe_ffn_dropout(a, MOE_FFN_SIGMOID, &d);

	memset(g, 0, (size_t)H * sizeof *g);
	for (int64_t t = 0; t < a->t1; t++) {
		memcpy(masked, s->x + t * H, (size_t)H * sizeof *masked);
		if (drop)
			moe_drop(drop, (enum moe_dropped)0, t, 0, H, masked);
		for (int64_t c = 0; c < H; c++)
			g[c] += s->dsigmoid[t] * masked[c];
	}
	for (int64_t j = 0; j < l->r; j++) {
		const float *row = l->a.value + j * H;
		float *da = l->a.grad + j * H, b = l->scale * l->b.value[j];
		double dot = 0;

		for (int64_t c = 0; c < H; c++) {
			dot += (double)row[c] * g[c];
			da[c] += b * g[c];
		}
		l->b.grad[j] += (float)(l->scale * dot);
	}
}

/* grad_out of m tokens times their sigmoid gates: the gradient at down's output. */
static const float *down_grad(const struct moe_token_args *a, int t, int m, float *dy)
{
	int64_t H = a->ffn->H;
	const float *grad = a->residual + t * H;

	if (!a->ffn->sigmoid_weight)
		return grad;
	for (int64_t i = 0; i < m; i++)
		for (int64_t c = 0; c < H; c++)
			dy[i * H + c] = a->ffn_state->sigmoid[t + i] * grad[i * H + c];
	return dy;
}

/* By token blocks in order, so that the sums never depend on how the step was cut. */
static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_matrix_lora *l = &a->ffn->lora[a->matrix];
	const struct moe_ffn_state *s = a->ffn_state;
	float *dy_scratch = worker->scratch, *rest = dy_scratch + (size_t)MOE_TOKEN_BLOCK * (size_t)a->ffn->H;
	struct moe_ffn_lora lora;
	int64_t n, k;

	worker->rows = a->t1;
	if (a->first) {
		memset(l->a.grad, 0, (size_t)l->a.piece * sizeof(float));
		memset(l->b.grad, 0, (size_t)l->b.piece * sizeof(float));
	}
	if (a->matrix == MOE_FFN_SIGMOID) {
		sigmoid_grad(a, worker->scratch);
		return;
	}
	moe_ffn_shape(a->ffn, a->matrix, &n, &k);
	for (int t = 0; t < a->t1; t += MOE_TOKEN_BLOCK) {
		int m = MOE_MIN(MOE_TOKEN_BLOCK, a->t1 - t);
		const float *x = a->matrix == MOE_FFN_DOWN ? s->h : s->x, *dy;

		if (a->matrix == MOE_FFN_DOWN)
			dy = down_grad(a, t, m, dy_scratch);
		else
			dy = (a->matrix == MOE_FFN_GATE ? s->dgate : s->dup) + t * n;
		moe_kernels()->linear_lora_grad(m, n, k, x + t * k, k, dy, n,
						moe_ffn_lora(a, a->matrix, t, &lora), l->a.grad,
						l->b.grad, rest);
	}
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;
	double m = a->t1;
	int64_t n, k;

	moe_ffn_shape(a->ffn, a->matrix, &n, &k);
	/* both thin projections, then both gradients; A and B stay in the cache */
	return moe_task_us() +
	       moe_f32_gemm_us(MOE_GEMM_FORWARD, m, a->ffn->lora[a->matrix].r, 2.0 * (double)(n + k)) +
	       moe_stream_us(m * (double)(n + k) * sizeof(float), 0);
}

MOE_CODELET(ffn_lora_grad, run, cost_us);
