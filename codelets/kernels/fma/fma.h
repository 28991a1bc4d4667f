/* SPDX-License-Identifier: Apache-2.0 */
/*
 * struct moe_tiles for CPUs with f32 multiply-add and no bf16 dot products: bf16 weights are
 * widened in registers, activations are f32. codelets/kernels/avx2 and avx512f include it once
 * each; what differs between them (width and number of registers) is in vec.h and in #if VEC_LANES.
 */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_H
#define MOE_CODELETS_KERNELS_FMA_FMA_H

#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/fma/fma_decode.h"
#include "codelets/kernels/fma/fma_grad.h"
#include "codelets/kernels/fma/fma_swiglu.h"

static void fma_fence(void)
{
	_mm_sfence();
}

static double fma_peak(int64_t iterations)
{
	vec c[12], a = vec_set1(1e-30f);

#pragma GCC unroll 12
	for (int i = 0; i < 12; i++)
		c[i] = vec_zero();
	for (int64_t k = 0; k < iterations; k++)
#pragma GCC unroll 12
		for (int i = 0; i < 12; i++)
			__asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(c[i]) : "v"(a));
	return (double)iterations * 12 * VEC_LANES * 2;
}

#define FMA_TILES                                                                                  \
	.layout = FMA_LAYOUT, .panel_bytes = 4, .pair_bytes = 4, .lora_pad = 16,           \
	.decode = fma_decode, .pack_fwd_bf16 = fma_pack_fwd_bf16, .pack_fwd = fma_pack_fwd,        \
	.pack_bwd = fma_pack_bwd,                                                                  \
	.unpack_fwd = fma_unpack_fwd, .unpack_bwd = fma_unpack_bwd, .fwd = fma_fwd,                \
	.bwd_columns = fma_bwd_columns, .bwd_scratch = fma_bwd_scratch, .bwd = fma_bwd,            \
	.pairs = fma_pairs, .pairs_bf16 = fma_pairs_bf16, .grad = fma_grad, .swiglu = fma_swiglu,  \
	.swiglu_bwd = fma_swiglu_bwd, MOE_ELEMENTWISE_TILES, .fence = fma_fence, .peak = fma_peak

#endif
