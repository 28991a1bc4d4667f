/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ffn_grad.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_token_args *a = args;
	const struct moe_ffn *f = a->ffn;
	const struct moe_ffn_state *s = a->ffn_state;
	int T = a->t1, H = f->H, I = f->I;
	float *dy = worker->scratch; /* one row: grad_out times the sigmoid gate */

	worker->rows = T;
	if (a->first) {
		size_t bytes = (size_t)H * (size_t)I * sizeof(float);

		memset(f->grad_gate, 0, bytes);
		memset(f->grad_up, 0, bytes);
		memset(f->grad_down, 0, bytes);
		if (f->grad_sigmoid)
			memset(f->grad_sigmoid, 0, (size_t)H * sizeof(float));
	}
	moe_kernels()->linear_weight_grad(T, I, H, s->x, H, s->dgate, I, f->grad_gate);
	moe_kernels()->linear_weight_grad(T, I, H, s->x, H, s->dup, I, f->grad_up);
	for (int t = 0; t < T; t++) {
		float g = f->sigmoid_weight ? s->sigmoid[t] : 1.0f;

		for (int j = 0; j < H; j++)
			dy[j] = g * a->residual[(size_t)t * (size_t)H + (size_t)j];
		moe_kernels()->linear_weight_grad(1, H, I, s->h + (size_t)t * (size_t)I, I, dy, H,
						  f->grad_down);
		for (int j = 0; f->grad_sigmoid && j < H; j++)
			f->grad_sigmoid[j] += s->dsigmoid[t] * s->x[(size_t)t * (size_t)H + (size_t)j];
	}
}

static double cost_us(const void *args)
{
	const struct moe_token_args *a = args;

	return moe_task_us() + moe_grad_us(a->t1, a->ffn->H, 3.0 * a->ffn->I);
}

MOE_CODELET(ffn_grad, run, cost_us);
