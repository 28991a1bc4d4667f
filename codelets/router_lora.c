/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/router_lora.h"
#include "codelets/cost.h"
#include "engine/codelet.h"

/* dB = scale dW A^T, dA = scale B^T dW */
static void run_grad(const void *args, struct moe_worker *worker)
{
	const struct moe_experts *l = ((const struct moe_router_lora_args *)args)->layer;
	const struct moe_router_lora *lora = l->router_lora;
	int64_t H = l->H, r = lora->r;

	(void)worker;
	memset(lora->a.grad, 0, (size_t)(r * H) * sizeof(float));
	for (int64_t e = 0; e < l->E; e++)
		for (int64_t j = 0; j < r; j++) {
			const float *dw = l->grad_router + e * H, *a = lora->a.value + j * H;
			float b = lora->scale * lora->b.value[e * r + j],
			      *da = lora->a.grad + j * H;
			double sum = 0;

			for (int64_t c = 0; c < H; c++) {
				sum += (double)dw[c] * a[c];
				da[c] += b * dw[c];
			}
			lora->b.grad[e * r + j] = (float)(lora->scale * sum);
		}
}

void moe_router_fold(const struct moe_experts *l)
{
	const struct moe_router_lora *lora = l->router_lora;
	float *w = (float *)l->router_weight.data;
	int64_t H = l->H, r = lora->r;

	memcpy(w, lora->base, (size_t)(l->E * H) * sizeof *w);
	for (int64_t e = 0; e < l->E; e++)
		for (int64_t j = 0; j < r; j++) {
			float b = lora->scale * lora->b.value[e * r + j];

			for (int64_t c = 0; c < H; c++)
				w[e * H + c] += b * lora->a.value[j * H + c];
		}
}

static void run_fold(const void *args, struct moe_worker *worker)
{
	(void)worker;
	moe_router_fold(((const struct moe_router_lora_args *)args)->layer);
}

static double cost_us(const void *args)
{
	const struct moe_experts *l = ((const struct moe_router_lora_args *)args)->layer;

	return moe_task_us() + moe_grad_us(l->router_lora->r, l->E, l->H);
}

MOE_CODELET(router_lora_grad, run_grad, cost_us);
MOE_CODELET(router_fold, run_fold, cost_us);
