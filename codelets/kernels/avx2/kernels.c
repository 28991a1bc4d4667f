/* SPDX-License-Identifier: Apache-2.0 */
/* For CPUs with AVX2, FMA and F16C: Haswell, Zen and later. */
#include "codelets/kernels/avx2/ints.h"
#include "codelets/kernels/fma/fma.h"

static const struct moe_tiles tiles = {
	.name = "avx2",
	.int16_rows = { 8, 6 },
	.int_block = avx2_int_block,
	.fwd_ints = avx2_fwd_ints,
	FMA_TILES,
};

#define MOE_TILES tiles
#include "codelets/kernels/packed/table.h"

/* gcc's answer includes whether the operating system saves the registers. */
static bool supported(void)
{
	__builtin_cpu_init();
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
	       __builtin_cpu_supports("f16c");
}

extern const struct moe_kernels moe_kernels_avx2;
const struct moe_kernels moe_kernels_avx2 = {
	.name = "avx2",
	.rank = 10,
	.supported = supported,
	.rank_pad = 16,
	.panel_bytes = 4,
	MOE_PACKED_KERNELS,
};
