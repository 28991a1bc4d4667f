/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 8-bit codes of sign and magnitude (FP8) by byte lookups, which only CPUs with VBMI have: the
 * caller asks avx512_bf16_has_vbmi. The low and the high byte of bf16 come from 128-byte tables;
 * the sign is a bit of the code.
 */
#pragma GCC target("avx512vbmi")
#include "codelets/kernels/avx512_bf16/decode_vbmi.h"

bool avx512_bf16_has_vbmi(void)
{
	static int known; /* 1: no, 2: yes; every thread finds the same */

	if (!__atomic_load_n(&known, __ATOMIC_RELAXED)) {
		__builtin_cpu_init();
		__atomic_store_n(&known, __builtin_cpu_supports("avx512vbmi") ? 2 : 1,
				 __ATOMIC_RELAXED);
	}
	return __atomic_load_n(&known, __ATOMIC_RELAXED) == 2;
}

/* One scale for all rows: it is in the table. */
static void same_scale(const float *values, float scale, int64_t steps, const uint8_t *codes,
		       uint16_t *dst)
{
	struct tables t = tables_of(values, _mm512_set1_ps(scale));
	__m512i v[2];

	for (; steps > 0; steps--, codes += 128, dst += 128) {
		_mm_prefetch((const char *)codes + DECODE_AHEAD, _MM_HINT_T0);
		_mm_prefetch((const char *)codes + DECODE_AHEAD + 64, _MM_HINT_T0);
		look_up(&t, codes, 0, v);
		_mm512_store_si512(dst, v[0]);
		_mm512_store_si512(dst + 32, v[1]);
		look_up(&t, codes, 1, v);
		_mm512_store_si512(dst + 64, v[0]);
		_mm512_store_si512(dst + 96, v[1]);
	}
}

/* 4 rows x 8 columns of bf16 times the rows' scales (4 lanes each) */
INLINE __m512i times(__m512i v, __m512 scale, __m512i order)
{
	__m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
	__m512 odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000u)));
	__m512i pair =
		(__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(odd, scale), _mm512_mul_ps(even, scale));

	return _mm512_permutexvar_epi16(order, pair);
}

static void row_scales(const float *values, const float scale[16], int64_t steps,
		       const uint8_t *codes, uint16_t *dst)
{
	struct tables t = tables_of(values, _mm512_set1_ps(1));
	_Alignas(64) uint16_t index[32];
	_Alignas(64) float lanes[4][16];
	__m512i v[2], order;

	for (int i = 0; i < 32; i++)
		index[i] = (uint16_t)(i / 2 + i % 2 * 16);
	order = _mm512_load_si512(index);
	for (int i = 0; i < 64; i++)
		lanes[i / 16][i % 16] = scale[i / 4];
	for (; steps > 0; steps--, codes += 128, dst += 128) {
		_mm_prefetch((const char *)codes + DECODE_AHEAD, _MM_HINT_T0);
		_mm_prefetch((const char *)codes + DECODE_AHEAD + 64, _MM_HINT_T0);
#pragma GCC unroll 2
		for (int h = 0; h < 2; h++) {
			look_up(&t, codes, h, v);
			_mm512_store_si512(dst + 64 * h,
					   times(v[0], _mm512_load_ps(lanes[2 * h]), order));
			_mm512_store_si512(dst + 64 * h + 32,
					   times(v[1], _mm512_load_ps(lanes[2 * h + 1]), order));
		}
	}
}

void avx512_bf16_decode_magnitudes(const float *values, const float scale[16], int64_t steps,
				   const uint8_t *codes, uint16_t *dst)
{
	__m512 s = _mm512_loadu_ps(scale), first = _mm512_set1_ps(scale[0]);

	if (_mm512_cmp_ps_mask(s, first, _CMP_EQ_OQ) == 0xffff)
		same_scale(values, scale[0], steps, codes, dst);
	else
		row_scales(values, scale, steps, codes, dst);
}
