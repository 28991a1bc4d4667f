/* SPDX-License-Identifier: Apache-2.0 */
/* Byte lookups of FP8. Only files that begin with `#pragma GCC target("avx512vbmi")` include this.
 */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_DECODE_VBMI_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_DECODE_VBMI_H

#include "codelets/kernels/avx512_bf16/decode.h"

struct tables {
	__m512i low[2], high[2];
};

#define BYTES4(i) (i), (i) + 2, (i) + 4, (i) + 6
#define BYTES16(i) BYTES4(i), BYTES4((i) + 8), BYTES4((i) + 16), BYTES4((i) + 24)
_Alignas(64) static const uint8_t even_bytes[64] = { BYTES16(0), BYTES16(32), BYTES16(64),
						     BYTES16(96) };

/* bf16 of values[0..128) times the scale */
INLINE struct tables tables_of(const float *values, __m512 scale)
{
	__m512i even = _mm512_load_si512(even_bytes), word[4];
	struct tables t;

#pragma GCC unroll 4
	for (int i = 0; i < 4; i++)
		word[i] = (__m512i)_mm512_cvtne2ps_pbh(
			_mm512_mul_ps(_mm512_loadu_ps(values + 32 * i + 16), scale),
			_mm512_mul_ps(_mm512_loadu_ps(values + 32 * i), scale));
#pragma GCC unroll 2
	for (int i = 0; i < 2; i++) {
		__m512i odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));

		t.low[i] = _mm512_permutex2var_epi8(word[2 * i], even, word[2 * i + 1]);
		t.high[i] = _mm512_permutex2var_epi8(word[2 * i], odd, word[2 * i + 1]);
	}
	return t;
}

/* The 8 columns of rows 8 h .. 8 h + 7 (128 codes) as two vectors of bf16 */
INLINE void look_up(const struct tables *t, const uint8_t *codes, const int h, __m512i out[2])
{
	/* lane i: rows i and 4 + i */
	const __m512i order = _mm512_add_epi32(
		_mm512_setr_epi32(0, 16, 4, 20, 1, 17, 5, 21, 2, 18, 6, 22, 3, 19, 7, 23),
		_mm512_set1_epi32(8 * h));
	__m512i b = _mm512_permutex2var_epi32(_mm512_load_si512(codes), order,
					      _mm512_load_si512(codes + 64));
	__m512i low = _mm512_permutex2var_epi8(t->low[0], b, t->low[1]);
	__m512i high = _mm512_permutex2var_epi8(t->high[0], b, t->high[1]);

	high = _mm512_ternarylogic_epi64(high, b, _mm512_set1_epi8((char)0x80), 0x78); /* high ^ (b & sign) */
	out[0] = _mm512_unpacklo_epi8(low, high);
	out[1] = _mm512_unpackhi_epi8(low, high);
}

#endif
