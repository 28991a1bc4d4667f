/* SPDX-License-Identifier: Apache-2.0 */
/* The table for AVX-512 with BF16: bf16 operands, f32 sums. */
#include "codelets/kernels/avx512_bf16/decode.h"
#include "codelets/kernels/avx512_bf16/ints.h"
#include "codelets/kernels/elementwise/elementwise.h"

static void fence(void)
{
	_mm_sfence();
}

#define DOT(i) "vdpbf16ps %%zmm31, %%zmm31, %%zmm" #i "\n\t"

/* 24 independent sums hide the latency of 6 cycles on every CPU that has the instruction. */
static double peak(int64_t iterations)
{
	__asm__ volatile("vpxorq %%zmm31, %%zmm31, %%zmm31" ::: "xmm31");
	for (int64_t i = 0; i < iterations; i++)
		__asm__ volatile(DOT(0) DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) DOT(7) DOT(8) DOT(
					 9) DOT(10) DOT(11) DOT(12) DOT(13) DOT(14) DOT(15) DOT(16)
					 DOT(17) DOT(18) DOT(19) DOT(20) DOT(21) DOT(22) DOT(23)::
						 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5",
						   "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
						   "xmm12", "xmm13", "xmm14", "xmm15", "xmm16",
						   "xmm17", "xmm18", "xmm19", "xmm20", "xmm21",
						   "xmm22", "xmm23");
	return (double)iterations * 24 * 64; /* 32 multiplications and additions each */
}

extern const struct moe_tiles moe_tiles_avx512_bf16;
const struct moe_tiles moe_tiles_avx512_bf16 = {
	.name = "avx512_bf16",
	.layout = MOE_LAYOUT_BLOCKS8,
	.panel_bytes = 2,
	.pair_bytes = 2,
	.lora_pad = 16,
	.decode = avx512_bf16_decode,
	.fwd_coded = avx512_bf16_fwd_coded,
	.fwd_coded_run = avx512_bf16_fwd_coded_run,
	.ints = avx512_bf16_ints,
	.int16_tile = 16,
	.int16_rows = { 16, 48 },
	.int_block = avx512_bf16_int_block,
	.fwd_ints = avx512_bf16_fwd_ints,
	.fwd_ints_run = avx512_bf16_fwd_ints_run,
	.stream_panel = avx512_bf16_stream_panel,
	.pack_fwd_bf16 = avx512_bf16_pack_fwd_bf16,
	.pack_fwd = avx512_bf16_pack_fwd,
	.pack_bwd = avx512_bf16_pack_bwd,
	.unpack_fwd = avx512_bf16_unpack_fwd,
	.unpack_bwd = avx512_bf16_unpack_bwd,
	.fwd = avx512_bf16_fwd,
	.bwd_columns = avx512_bf16_bwd_columns,
	.bwd_scratch = avx512_bf16_bwd_scratch,
	.bwd = avx512_bf16_bwd,
	.bwd_takes = avx512_bf16_bwd_takes,
	.pairs = avx512_bf16_pairs,
	.pairs_bf16 = avx512_bf16_pairs_bf16,
	.grad = avx512_bf16_grad,
	.swiglu = avx512_bf16_swiglu_tile,
	.swiglu_bwd = avx512_bf16_swiglu_tile_bwd,
	MOE_ELEMENTWISE_TILES,
	.fence = fence,
	.peak = peak,
};

#define MOE_TILES moe_tiles_avx512_bf16
#include "codelets/kernels/packed/table.h"

/* CPUID, and that the operating system saves zmm registers (libgcc asks XGETBV). */
static bool supported(void)
{
	__builtin_cpu_init();
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
	       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
	       __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma");
}

extern const struct moe_kernels moe_kernels_avx512_bf16;
const struct moe_kernels moe_kernels_avx512_bf16 = {
	.name = "avx512_bf16",
	.rank = 30,
	.supported = supported,
	.rank_pad = 16,
	.panel_bytes = 2,
	MOE_PACKED_KERNELS,
};
