/* SPDX-License-Identifier: Apache-2.0 */
/* Panels: f32 rows as they stand. */
#include "codelets/kernels/c/c.h"
#include "codelets/kernels/packed/ints.h"
#include "codelets/kernels/elementwise/elementwise.h"

static void pack_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token, int64_t k,
		      int64_t kp, void *panel, int64_t width, int64_t col)
{
	float *to = (float *)panel + col;

	for (int i = 0; i < m; i++, to += width) {
		const uint16_t *restrict from = src + (token ? token[i] : i) * ld;

		for (int64_t j = 0; j < k; j++)
			to[j] = moe_bf16_to_f32(from[j]);
		memset(to + k, 0, (size_t)(kp - k) * sizeof *to);
	}
}

static void pack(int m, const float *src, int64_t ld, const int32_t *token, int64_t k, int64_t kp,
		 void *panel, int64_t width, int64_t col)
{
	float *to = (float *)panel + col;

	for (int i = 0; i < m; i++, to += width) {
		memcpy(to, src + (token ? token[i] : i) * ld, (size_t)k * sizeof *to);
		memset(to + k, 0, (size_t)(kp - k) * sizeof *to);
	}
}

static void unpack(int m, const void *panel, int64_t width, int64_t col, int64_t k, float *dst,
		   int64_t ld)
{
	const float *from = (const float *)panel + col;

	for (int i = 0; i < m; i++, from += width)
		memcpy(dst + i * ld, from, (size_t)k * sizeof *dst);
}

static int bwd_columns(int m)
{
	(void)m;
	return 32; /* y of 256 rows stays in L1 */
}

static size_t bwd_scratch(int m, int64_t n, int columns)
{
	(void)m;
	(void)n;
	(void)columns;
	return 0;
}

static void fence(void)
{
}

const struct moe_tiles moe_tiles_c = {
	.name = "c",
	.layout = MOE_LAYOUT_BLOCKS8,
	.panel_bytes = sizeof(float),
	.pair_bytes = sizeof(float),
	.lora_pad = 16,
	.decode = moe_coded_decode,
	.int_block = moe_int_block_plain,
	.fwd_ints = moe_int_forward_plain,
	.pack_fwd_bf16 = pack_bf16,
	.pack_fwd = pack,
	.pack_bwd = pack,
	.unpack_fwd = unpack,
	.unpack_bwd = unpack,
	.fwd = c_fwd,
	.bwd_columns = bwd_columns,
	.bwd_scratch = bwd_scratch,
	.bwd = c_bwd,
	.pairs = c_pairs,
	.pairs_bf16 = c_pairs_bf16,
	.grad = c_grad,
	.swiglu = OWN(swiglu_rows),
	.swiglu_bwd = OWN(swiglu_rows_bwd),
	MOE_ELEMENTWISE_TILES,
	.fence = fence,
};
