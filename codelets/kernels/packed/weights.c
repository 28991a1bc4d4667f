/* SPDX-License-Identifier: Apache-2.0 */
/* Packing of weights and LoRA matrices into panels of 16 rows, and back. */
#include "codelets/kernels/packed/packed.h"

#define STRIP 256 /* columns converted at a time; a multiple of MOE_PACK_K */

static int64_t block_k(const struct moe_tiles *t)
{
	return t->layout == MOE_LAYOUT_BLOCKS32 ? 32 : 8;
}

static int64_t lora_width(const struct moe_tiles *t, enum moe_lora_side side, int64_t k)
{
	return moe_round_up(k, side == MOE_LORA_A ? MOE_PACK_K : t->lora_pad);
}

/*
 * 16 rows (ld apart, NULL: zero) of k columns into one panel's blocks; k a multiple of MOE_PACK_K
 * or, from a converted strip, of 16. Reads whole cache lines of each row, writes one or four
 * blocks.
 */
static void pack_panel(int64_t block, const uint16_t *const row[MOE_PACK_N], int64_t k,
		       uint16_t *dst)
{
	int64_t line = MOE_MAX(block, 16);

	for (int64_t k0 = 0; k0 < k; k0 += line, dst += MOE_PACK_N * line)
		for (int n = 0; n < MOE_PACK_N; n++)
			for (int64_t b = 0; b < line; b += block) {
				uint16_t *to = dst + b * MOE_PACK_N + n * block;

				if (row[n])
					memcpy(to, row[n] + k0 + b, (size_t)block * sizeof *to);
				else
					memset(to, 0, (size_t)block * sizeof *to);
			}
}

/* Columns k0..k0+width of `rows` rows as bf16, zero beyond k; one line per row of STRIP elements.
 */
static void convert_strip(const char *src, enum moe_dtype dtype, int rows, int64_t k, int64_t ld,
			  int64_t k0, int64_t width, uint16_t strip[MOE_PACK_N][STRIP])
{
	size_t size = moe_dtype_size(dtype);
	int64_t inside = MOE_MIN(width, k - k0);
	float wide[STRIP];

	for (int n = 0; n < rows; n++) {
		const char *from = src + (size_t)(n * ld + k0) * size;

		if (dtype == MOE_BF16)
			memcpy(strip[n], from, (size_t)inside * sizeof **strip);
		else {
			moe_to_f32(wide, from, dtype, (size_t)inside);
			moe_from_f32(strip[n], MOE_BF16, wide, (size_t)inside);
		}
		memset(strip[n] + inside, 0, (size_t)(width - inside) * sizeof **strip);
	}
}

/* One panel: rows first..first+16 of src (those below n), columns padded to kp. */
static void pack_rows(int64_t block, const char *src, enum moe_dtype dtype, int64_t n, int64_t k,
		      int64_t ld, int64_t first, int64_t kp, uint16_t *dst)
{
	uint16_t strip[MOE_PACK_N][STRIP];
	const uint16_t *row[MOE_PACK_N];
	int rows = (int)MOE_MIN(MOE_PACK_N, n - first);
	int64_t whole = 0; /* columns copied straight from the source */

	src += (size_t)(first * ld) * moe_dtype_size(dtype);
	if (dtype == MOE_BF16 && ((uintptr_t)src & 1) == 0) {
		whole = k / MOE_PACK_K * MOE_PACK_K;
		for (int i = 0; i < MOE_PACK_N; i++)
			row[i] = i < rows ? (const uint16_t *)(const void *)src + i * ld : NULL;
		pack_panel(block, row, whole, dst);
	}
	for (int i = 0; i < MOE_PACK_N; i++)
		row[i] = i < rows ? strip[i] : NULL;
	for (int64_t k0 = whole; k0 < kp; k0 += STRIP) {
		int64_t width = MOE_MIN(STRIP, kp - k0);

		convert_strip(src, dtype, rows, k, ld, k0, width, strip);
		pack_panel(block, row, width, dst + MOE_PACK_N * k0);
	}
}

size_t moe_packed_weight_bytes(const struct moe_tiles *t, enum moe_dtype src, int64_t n, int64_t k,
			       enum moe_weight_use use)
{
	(void)t;
	if (use == MOE_USE_EXACT)
		return ref_weight_bytes(src, n, k, use);
	return moe_packed_bytes(n, moe_round_up(k, MOE_PACK_K));
}

void moe_packed_weight_pack(const struct moe_tiles *t, struct moe_weight *W, const void *src,
			    enum moe_dtype dtype, int64_t n, int64_t k, int64_t ld,
			    enum moe_weight_use use)
{
	int64_t kp = moe_round_up(k, MOE_PACK_K);
	uint16_t *dst = W->data;

	if (use == MOE_USE_EXACT) {
		ref_weight_pack(W, src, dtype, n, k, ld, use);
		return;
	}
	W->layout = t->layout;
	W->dtype = MOE_BF16;
	W->n = n;
	W->k = k;
	if (!src)
		return;
	for (int64_t first = 0; first < n; first += MOE_PACK_N) {
		pack_rows(block_k(t), src, dtype, n, k, ld, first, kp, dst);
		dst += moe_packed_stride(kp);
	}
}

void moe_packed_weight_unpack(const struct moe_tiles *t, const struct moe_weight *W, int64_t n0,
			      int64_t n1, float *dst)
{
	int64_t block = block_k(t), kp = moe_round_up(W->k, MOE_PACK_K);

	if (W->layout == MOE_LAYOUT_ROWS) {
		ref_weight_unpack(W, n0, n1, dst);
		return;
	}
	for (int64_t n = n0; n < n1; n++, dst += W->k) {
		const uint16_t *panel = (const uint16_t *)W->data +
					n / MOE_PACK_N * moe_packed_stride(kp) +
					n % MOE_PACK_N * block;

		for (int64_t k0 = 0; k0 < W->k; k0 += block)
			moe_to_f32(dst + k0, panel + k0 * MOE_PACK_N, MOE_BF16,
				   (size_t)MOE_MIN(block, W->k - k0));
	}
}

size_t moe_packed_lora_bytes(const struct moe_tiles *t, enum moe_lora_side side, int64_t n,
			     int64_t k)
{
	return moe_packed_bytes(n, lora_width(t, side, k));
}

void moe_packed_lora_pack(const struct moe_tiles *t, moe_pack_rows *pack, enum moe_lora_side side,
			  const float *src, int64_t n, int64_t k, int64_t n0, int64_t n1,
			  float scale, void *dst)
{
	int64_t kp = lora_width(t, side, k), end = MOE_MIN(n1, n);

	MOE_ASSERT(n0 % MOE_PACK_N == 0);
	for (int64_t first = n0; first < end; first += MOE_PACK_N)
		pack(block_k(t), (int)MOE_MIN(MOE_PACK_N, n - first), k, kp, src + first * k, k,
		     scale, (uint16_t *)dst + first / MOE_PACK_N * moe_packed_stride(kp));
}
