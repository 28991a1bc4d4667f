/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on quantised panels, which a tile decodes straight into pairs of rows: lookups take codes in any order, so
 * no shuffle of results follows. Bits are those of decode and of the plain tiles.
 */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_BWD_CODED_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_BWD_CODED_H

#include "codelets/kernels/avx512_bf16/bwd_tiles.h"
#include "codelets/kernels/avx512_bf16/decode.h"

#define FETCH_PANELS 8	/* from a panel to what is prefetched of quantised ones */
#define SMALL_AHEAD 4096 /* bytes from a read to its prefetch, along a panel */

enum bwd_kind { BWD_PLAIN, BWD_NIBBLES, BWD_INTEGERS, BWD_MAGNITUDES };

/* Columns k..k+32 of the panels of one run */
struct bwd_codes {
	const uint8_t *codes; /* of the first panel */
	ptrdiff_t stride;
	const float *values, *scale, *zero; /* scale, zero: [n/16][16]; zero may be NULL */
	uint16_t *keep; /* [n/2][32][2]; or, where nobody reads it, [8][32][2] */
	bool all;
};

/* How columns k..k+width of the slice's panels are decoded in registers */
enum bwd_kind avx512_bf16_bwd_kind(const struct moe_coded_slice *s, int64_t panel, int64_t panels, int64_t k,
				   int64_t width);
/* Scales and zeros (where there are) of the group of columns k..k+32, [panels][16] each */
void avx512_bf16_bwd_group(const struct moe_coded_slice *s, int64_t panel, int64_t panels, int64_t k, float *scale,
			   float *zero);
/*
 * rows x 32 columns: quantised runs of one kind, and decoded ones; rows 0 only decodes. NULL: no tile of so many rows.
 */
bwd_tile_fn avx512_bf16_bwd_fused(enum bwd_kind kind, int rows);

/* Columns k..k+columns of one panel for up to BWD_SMALL rows, as bwd_small.c takes plain ones; g: the panel's words */
typedef void (*bwd_small_fn)(const struct moe_coded_panel *p, int64_t k, int columns, const uint32_t *g, float *sum,
			     struct coded_tables *tables);
/* NULL: FP8 with several scales in a panel */
bwd_small_fn avx512_bf16_bwd_small_coded(const struct moe_coded_panel *p, int64_t k, int columns, int rows);
bool avx512_bf16_bwd_small_takes(const struct moe_coded_panel *p);

/* bwd_coded_vbmi.c */
bwd_tile_fn avx512_bf16_bwd_fused_magnitudes(int rows);
bwd_small_fn avx512_bf16_bwd_small_magnitudes(int rows);

INLINE __m512 bwd_scales(const struct moe_coded_panel *p, int64_t group)
{
	enum moe_dtype dtype = p->coding->scale;

	if (dtype == MOE_BF16)
		return scales_of(p, MOE_BF16, group);
	if (dtype == MOE_F32)
		return scales_of(p, MOE_F32, group);
	return dtype == MOE_F16 ? scales_of(p, MOE_F16, group)
				: scales_of(p, MOE_SCALE_UE8M0, group);
}

INLINE int64_t bwd_group(const struct moe_coded_panel *p, int64_t k)
{
	return MOE_MIN((p->coding->phase + k) / p->coding->group, p->groups - 1);
}

/* 16 bytes of two (four) blocks of 64 bytes, twice (once) each */
INLINE __m512i chunk2(const uint8_t *codes)
{
	__m512i c = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)codes));

	return _mm512_mask_broadcast_i32x4(c, 0xff00, _mm_load_si128((const __m128i *)(codes + 64)));
}

INLINE __m512i chunk4(const uint8_t *codes)
{
	__m512i c = chunk2(codes);

	c = _mm512_mask_broadcast_i32x4(c, 0x00f0, _mm_load_si128((const __m128i *)(codes + 64)));
	c = _mm512_mask_broadcast_i32x4(c, 0x0f00, _mm_load_si128((const __m128i *)(codes + 128)));
	return _mm512_mask_broadcast_i32x4(c, 0xf000, _mm_load_si128((const __m128i *)(codes + 192)));
}

/*
 * Vectors of lookups, which tiles with all registers in use read again each time: behind a pointer that the compiler
 * does not know, for it would rather keep them on the stack. pair: words of rows h, h + 1 of 4 columns, from bytes.
 */
struct bwd_orders {
	_Alignas(64) uint64_t shift[8], low[8], odd[8], pair[2][8], bytes[8], sign[8];
};
#define QWORDS(a, b) { a, b, a, b, a, b, a, b }
static const struct bwd_orders bwd_constants = {
	.shift = { 0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004, 0x0004000400040004 },
	.low = QWORDS(0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f),
	.odd = QWORDS(0x1010101000000000, 0x1010101000000000),
	.pair = { QWORDS(0xff05ff01ff04ff00, 0xff07ff03ff06ff02),
		  QWORDS(0xff0dff09ff0cff08, 0xff0fff0bff0eff0a) },
	.bytes = QWORDS(0x0703060205010400, 0x0f0b0e0a0d090c08),
	.sign = QWORDS(0x8080808080808080, 0x8080808080808080),
};

INLINE const struct bwd_orders *bwd_orders(void)
{
	const struct bwd_orders *o = &bwd_constants;

	__asm__("" : "+r"(o));
	return o;
}

/* Pairs 2 q and 2 q + 1 of 16 columns */
INLINE void nibbles(const uint8_t *codes, const __m512i table[8], const struct bwd_orders *o, const int q,
		    __m512i w[2])
{
	__m512i both = _mm512_srlv_epi16(chunk2(codes + 16 * q), _mm512_load_si512(o->shift));
	__m512i index = _mm512_ternarylogic_epi64(both, _mm512_load_si512(o->low), _mm512_load_si512(o->odd), 0xea);

#pragma GCC unroll 2
	for (int h = 0; h < 2; h++)
		w[h] = _mm512_permutexvar_epi16(_mm512_shuffle_epi8(index, _mm512_load_si512(o->pair[h])),
						table[2 * q + h]);
}

INLINE __m512 row_values(__m128i codes, const float *scale)
{
	return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), _mm512_set1_ps(*scale));
}

INLINE void paired_integers(const uint8_t *codes, const float *scale, const int q, __m512i w[2])
{
	const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
					       23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
	const __m128i *c = (const __m128i *)(const void *)(codes + 16 * q);
	__m128i a = _mm_unpacklo_epi32(c[0], c[4]), b = _mm_unpacklo_epi32(c[8], c[12]);

	scale += 4 * q;
	w[0] = _mm512_permutexvar_epi16(pairs, two(row_values(_mm_unpacklo_epi64(a, b), scale),
						   row_values(_mm_unpackhi_epi64(a, b), scale + 1)));
	a = _mm_unpackhi_epi32(c[0], c[4]);
	b = _mm_unpackhi_epi32(c[8], c[12]);
	w[1] = _mm512_permutexvar_epi16(pairs, two(row_values(_mm_unpacklo_epi64(a, b), scale + 2),
						   row_values(_mm_unpackhi_epi64(a, b), scale + 3)));
}

/* Bytes of codes of 16 columns */
INLINE int bwd_bytes(const enum bwd_kind kind)
{
	return kind == BWD_NIBBLES ? 128 : 256;
}

#endif
