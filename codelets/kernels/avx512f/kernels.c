/* SPDX-License-Identifier: Apache-2.0 */
/* For CPUs with AVX-512 and no bf16 dot products: Skylake-SP, Cascade Lake, Ice Lake. */
#include "codelets/kernels/avx512f/ints.h"
#include "codelets/kernels/fma/fma.h"

#include <limits.h>

static const struct moe_tiles tiles = {
	.name = "avx512f",
	.ints = avx512f_ints,
	.int16_tile = 16,
	.int16_rows = { INT_MAX, INT_MAX }, /* f32 products are half as fast as two planes */
	.int_block = avx512f_int_block,
	.fwd_ints = avx512f_fwd_ints,
	.fwd_ints_run = avx512f_fwd_ints_run,
	FMA_TILES,
};

#define MOE_TILES tiles
#include "codelets/kernels/packed/table.h"

/* gcc's answer includes whether the operating system saves the registers. */
static bool supported(void)
{
	__builtin_cpu_init();
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
	       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

extern const struct moe_kernels moe_kernels_avx512f;
const struct moe_kernels moe_kernels_avx512f = {
	.name = "avx512f",
	.rank = 20,
	.supported = supported,
	.rank_pad = 16,
	.panel_bytes = 4,
	MOE_PACKED_KERNELS,
};
