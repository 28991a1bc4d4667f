/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/amx/amx.h"
#include "codelets/kernels/amx/tile.h"
#include "codelets/kernels/packed/ints.h"

/* Every CPU with AMX has AVX-512 BF16 and VNNI, whose SwiGLU and rounding of rows are written by hand. */
#ifdef MOE_AMX_EMULATED
#define SWIGLU OWN(swiglu_rows)
#define SWIGLU_BWD OWN(swiglu_rows_bwd)
#define INT_BLOCK moe_int_block_plain
#else
#include "codelets/kernels/avx512_bf16/bf16.h"
#include "codelets/kernels/avx512_bf16/ints.h"
#define SWIGLU avx512_bf16_swiglu_tile
#define SWIGLU_BWD avx512_bf16_swiglu_tile_bwd
#define INT_BLOCK avx512_bf16_int_block
#endif

static int bwd_columns(int m)
{
	(void)m;
	return 32; /* a block of W; y of 256 rows stays in L1 */
}

static void fence(void)
{
#ifdef __AVX512F__
	_mm_sfence();
#endif
}

/* Six sums in turn: more than the latency of one needs. */
static double peak(int64_t iterations)
{
	struct amx_config config = { .palette = 1 };

	for (int i = 0; i < 8; i++)
		amx_shape(&config, i, AMX_ROWS, AMX_ROW_BYTES);
	amx_load_config(&config); /* all tiles are zero */
	for (int64_t i = 0; i < iterations; i++) {
		amx_dp_bf16(0, 6, 7);
		amx_dp_bf16(1, 6, 7);
		amx_dp_bf16(2, 6, 7);
		amx_dp_bf16(3, 6, 7);
		amx_dp_bf16(4, 6, 7);
		amx_dp_bf16(5, 6, 7);
	}
	amx_release();
	return 6.0 * 2 * 16 * 16 * 32 * (double)iterations;
}

#define TEXT(x) #x
#define NAME(x) TEXT(x)

const struct moe_tiles AMX_TILES = {
	.name = NAME(MOE_ISA),
	.layout = MOE_LAYOUT_BLOCKS32,
	.panel_bytes = sizeof(uint16_t),
	.pair_bytes = sizeof(uint16_t),
	.lora_pad = 32,
	.decode = moe_coded_decode,
	.int_block = INT_BLOCK,
	.fwd_ints = OWN(fwd_ints),
	.pack_fwd_bf16 = OWN(pack_fwd_bf16),
	.pack_fwd = OWN(pack_fwd),
	.pack_bwd = OWN(pack_bwd),
	.unpack_fwd = OWN(unpack_fwd),
	.unpack_bwd = OWN(unpack_bwd),
	.fwd = OWN(tile_fwd),
	.bwd_columns = bwd_columns,
	.bwd_scratch = OWN(bwd_scratch),
	.bwd = OWN(tile_bwd),
	.pairs = OWN(pairs),
	.pairs_bf16 = OWN(pairs_bf16),
	.grad = OWN(tile_grad),
	.swiglu = SWIGLU,
	.swiglu_bwd = SWIGLU_BWD,
	MOE_ELEMENTWISE_TILES,
	.fence = fence,
	.peak = peak,
};
