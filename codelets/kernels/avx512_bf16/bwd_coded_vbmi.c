/* SPDX-License-Identifier: Apache-2.0 */
/* FP8 whose 16 rows of a panel share their scales. */
#pragma GCC target("avx512vbmi")
#include "codelets/kernels/avx512_bf16/decode_vbmi.h"
#include "codelets/kernels/avx512_bf16/bwd_fused.h"

INLINE void bwd_prepare(const enum bwd_kind kind, const float *values, const float *scale, const float *zero,
			struct coded_tables *t)
{
	uint32_t bits;

	(void)kind, (void)zero;
	memcpy(&bits, scale, sizeof bits);
	if (bits == t->last)
		return;
	t->last = bits;
	*(struct tables *)(void *)t->table = tables_of(values, _mm512_set1_ps(*scale));
}

INLINE void bwd_vectors(const enum bwd_kind kind, const uint8_t *codes, const float *scale,
			const struct coded_tables *tables, const struct bwd_orders *o, const int q, __m512i w[2])
{
	const struct tables *t = (const struct tables *)(const void *)tables->table;
	__m512i b = _mm512_shuffle_epi8(chunk4(codes + 16 * q), _mm512_load_si512(o->bytes));
	__m512i low = _mm512_permutex2var_epi8(t->low[0], b, t->low[1]);
	__m512i high = _mm512_permutex2var_epi8(t->high[0], b, t->high[1]);

	(void)kind, (void)scale;
	high = _mm512_ternarylogic_epi64(high, b, _mm512_load_si512(o->sign), 0x78); /* high ^ (b & sign) */
	w[0] = _mm512_unpacklo_epi8(low, high);
	w[1] = _mm512_unpackhi_epi8(low, high);
}

FUSEDS(BWD_MAGNITUDES)
SMALLS(BWD_MAGNITUDES)

bwd_tile_fn avx512_bf16_bwd_fused_magnitudes(int rows)
{
	static const bwd_tile_fn of[FUSED_ROWS + 1] = FUSED_NAMES(BWD_MAGNITUDES);

	return of[rows];
}

bwd_small_fn avx512_bf16_bwd_small_magnitudes(int rows)
{
	static const bwd_small_fn of[] = SMALL_NAMES(BWD_MAGNITUDES);

	return of[rows];
}
