/* SPDX-License-Identifier: Apache-2.0 */
/* Predicted microseconds on the process's machine: what the cost_us of the codelets are made of. */
#ifndef MOE_CODELETS_COST_H
#define MOE_CODELETS_COST_H

#include "codelets/kernels/kernels.h"
#include "engine/cost.h"

/* Cycles of scalar code where neither flops nor bytes decide; orders of magnitude. */
#define MOE_CYCLES_EXP 35.0	  /* one exp in double, with what is around it */
#define MOE_CYCLES_SCATTERED 35.0 /* one read that no prefetcher foresees, from a nearby cache */
#define MOE_CYCLES_STEP 5.0	  /* one dependent step of a loop */

static inline double moe_task_us(void)
{
	return moe_cost_task_us(moe_machine());
}
static inline double moe_stream_us(double read, double written)
{
	return moe_cost_stream_us(moe_machine(), read, written);
}
static inline double moe_cycles_us(double cycles)
{
	return moe_cost_cycles_us(moe_machine(), cycles);
}
/* rows x n x k multiply-adds on f32 operands */
static inline double moe_f32_gemm_us(enum moe_gemm direction, double rows, double n, double k)
{
	return moe_cost_gemm_us(moe_machine(), direction, rows, n, k, sizeof(float));
}
static inline double moe_weight_bytes_each(const struct moe_weight *w)
{
	const struct moe_coding *c = &w->coding;

	return c->format ? c->format->bits / 8.0 + (double)moe_scale_bytes(c) / (double)c->group
			 : (double)moe_dtype_size(w->dtype);
}
/* rows through the whole weight, LoRA of rank r as so much more depth */
static inline double moe_weight_us(enum moe_gemm direction, double rows, const struct moe_weight *w,
				   int r)
{
	return moe_cost_gemm_us(moe_machine(), direction, rows, (double)w->n, (double)w->k + r,
				moe_weight_bytes_each(w));
}
/* g[n, k] += dy^T x over rows, g in memory: read and written */
static inline double moe_grad_us(double rows, double n, double k)
{
	return moe_cost_gemm_us(moe_machine(), MOE_GEMM_FORWARD, rows, n, k, 2 * sizeof(float));
}

#endif
