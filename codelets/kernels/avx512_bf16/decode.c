/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/avx512_bf16/decode.h"

INLINE __m512i two(__m512 low, __m512 high)
{
	return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/*
 * 4 bits: the 16 values of each row, times its scale, are 16 words of a table; the tables of 4 rows
 * are two vectors, and a word's index in them is 16 * row + code.
 */
INLINE void decode4(const bool zeros, __m512 values, __m512 scale, __m512 zero, int64_t steps,
		    const uint8_t *codes, uint16_t *dst)
{
	const __m512i row = _mm512_set_epi64(
		0x0030003000300030, 0x0030003000300030, 0x0020002000200020, 0x0020002000200020,
		0x0010001000100010, 0x0010001000100010, 0, 0);
	const __m512i mask = _mm512_set1_epi16(15);
	__m512i table[8];

#pragma GCC unroll 8
	for (int i = 0; i < 8; i++) {
		const __m512i even = _mm512_set1_epi32(2 * i), odd = _mm512_set1_epi32(2 * i + 1);
		__m512 a = values, b = values;

		if (zeros) {
			a = _mm512_sub_ps(a, _mm512_permutexvar_ps(even, zero));
			b = _mm512_sub_ps(b, _mm512_permutexvar_ps(odd, zero));
		}
		table[i] = two(_mm512_mul_ps(a, _mm512_permutexvar_ps(even, scale)),
			       _mm512_mul_ps(b, _mm512_permutexvar_ps(odd, scale)));
	}
	for (; steps > 0; steps--, codes += 64, dst += 128) {
		__m512i w = _mm512_load_si512(codes);

		_mm_prefetch((const char *)codes + DECODE_AHEAD, _MM_HINT_T0);
#pragma GCC unroll 4
		for (int z = 0; z < 4; z++) {
			__m512i index = _mm512_ternarylogic_epi64(
				_mm512_srli_epi16(w, 4 * (unsigned)z), mask, row, 0xea);

			_mm512_store_si512(dst + 32 * z,
					   _mm512_permutex2var_epi16(table[2 * z], index,
								     table[2 * z + 1]));
		}
	}
}

/* 8-bit integers: 16 bytes are 8 codes each of rows j and 4 + j. */
static void decode8(const float scale[16], int64_t steps, const uint8_t *codes, uint16_t *dst)
{
	const __m512i first = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13);
	const __m512i second = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
	__m512 s[8];

#pragma GCC unroll 8
	for (int i = 0; i < 8; i++) {
		int r = i / 4 * 8 + i % 4;

		s[i] = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(scale[r]),
					    _mm512_set1_ps(scale[r + 4]));
	}
	for (; steps > 0; steps--) {
		_mm_prefetch((const char *)codes + DECODE_AHEAD, _MM_HINT_T0);
		_mm_prefetch((const char *)codes + DECODE_AHEAD + 64, _MM_HINT_T0);
#pragma GCC unroll 2
		for (int h = 0; h < 2; h++, codes += 64, dst += 64) {
			__m512 f[4];
			__m512i a, b;

#pragma GCC unroll 4
			for (int j = 0; j < 4; j++) {
				__m128i c = _mm_load_si128((const __m128i *)(codes + 16 * j));

				f[j] = _mm512_mul_ps(
					_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c)), s[4 * h + j]);
			}
			a = two(f[0], f[1]);
			b = two(f[2], f[3]);
			_mm512_store_si512(dst, _mm512_permutex2var_epi64(a, first, b));
			_mm512_store_si512(dst + 32, _mm512_permutex2var_epi64(a, second, b));
		}
	}
}

/* Every group begins at a step. */
static bool whole_steps(const struct moe_coded_panel *p)
{
	const struct moe_coding *c = p->coding;

	return p->block == DECODE_STEP &&
	       (p->groups == 1 || (c->group % DECODE_STEP == 0 && c->phase % DECODE_STEP == 0));
}

static bool takes(const struct moe_coded_panel *p)
{
	const struct moe_format *f = p->coding->format;

	if (!whole_steps(p))
		return false;
	if (f->bits == 4)
		return true;
	if (p->coding->zero)
		return false;
	return f->codes == MOE_CODES_INTEGER ||
	       (f->codes == MOE_CODES_SIGN_MAGNITUDE && avx512_bf16_has_vbmi());
}

/* Scales of 16 rows */
INLINE __m512 scales_of(const struct moe_coded_panel *p, const enum moe_dtype dtype, int64_t group)
{
	const uint8_t *at = p->scale + group * 16 * (dtype == MOE_F32 ? 4 : dtype == MOE_SCALE_UE8M0 ? 1 : 2);
	_Alignas(64) float rare[16];

	if (dtype == MOE_F32)
		return _mm512_loadu_ps(at);
	if (dtype == MOE_BF16)
		return load_bf16((const uint16_t *)(const void *)at);
	if (dtype == MOE_F16)
		return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
	/* 2^(b - 127): the byte is the exponent, but for 0 (subnormal) and 255 (NaN) */
	__m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
	__m512i less = _mm512_sub_epi32(b, _mm512_set1_epi32(1));

	if (__builtin_expect(_mm512_cmplt_epu32_mask(less, _mm512_set1_epi32(254)) == 0xffff, 1))
		return _mm512_castsi512_ps(_mm512_slli_epi32(b, 23));
	moe_coded_scales(p, group, rare);
	return _mm512_load_ps(rare);
}

INLINE void decode_groups(const struct moe_coded_panel *p, const int bits, const enum moe_dtype dtype,
			  int64_t k0, int64_t k, uint16_t *dst)
{
	const struct moe_coding *c = p->coding;
	const struct moe_format *f = c->format;
	int64_t end = k0 + k, group = MOE_MIN((c->phase + k0) / c->group, p->groups - 1);
	__m512 values = _mm512_loadu_ps(f->values);
	_Alignas(64) float memory[16];

	for (int64_t next; k0 < end; k0 = next, group++) {
		const uint8_t *codes = p->codes + k0 * 16 * bits / 8;
		__m512 scale = scales_of(p, dtype, group), zero = scale;
		int64_t steps;

		next = group == p->groups - 1 ? end : MOE_MIN(end, (group + 1) * c->group - c->phase);
		steps = (next - k0) / DECODE_STEP;
		if (bits == 4 && c->zero) {
			moe_coded_zeros(p, group, memory);
			zero = _mm512_load_ps(memory);
			decode4(true, values, scale, zero, steps, codes, dst);
		} else if (bits == 4) {
			decode4(false, values, scale, zero, steps, codes, dst);
		} else {
			_mm512_store_ps(memory, scale);
			if (f->codes == MOE_CODES_INTEGER)
				decode8(memory, steps, codes, dst);
			else
				avx512_bf16_decode_magnitudes(f->values, memory, steps, codes, dst);
		}
		dst += 16 * (next - k0);
	}
}

#define GROUPS(bits, dtype)                                                                        \
	NOINLINE void groups_##bits##_##dtype(const struct moe_coded_panel *p, int64_t k0,         \
					      int64_t k, uint16_t *dst)                            \
	{                                                                                          \
		decode_groups(p, bits, dtype, k0, k, dst);                                         \
	}
GROUPS(4, MOE_F32)
GROUPS(4, MOE_BF16)
GROUPS(4, MOE_F16)
GROUPS(4, MOE_SCALE_UE8M0)
GROUPS(8, MOE_F32)
GROUPS(8, MOE_BF16)
GROUPS(8, MOE_F16)
GROUPS(8, MOE_SCALE_UE8M0)

void avx512_bf16_decode(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst)
{
	enum moe_dtype scale = p->coding->scale;

	if (!takes(p))
		moe_coded_decode(p, k0, k, dst);
	else if (p->coding->format->bits == 4)
		(scale == MOE_F32    ? groups_4_MOE_F32
		 : scale == MOE_BF16 ? groups_4_MOE_BF16
		 : scale == MOE_F16  ? groups_4_MOE_F16
				     : groups_4_MOE_SCALE_UE8M0)(p, k0, k, dst);
	else
		(scale == MOE_F32    ? groups_8_MOE_F32
		 : scale == MOE_BF16 ? groups_8_MOE_BF16
		 : scale == MOE_F16  ? groups_8_MOE_F16
				     : groups_8_MOE_SCALE_UE8M0)(p, k0, k, dst);
}
