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
static void decode4(const float *values, const float scale[16], const float zero[16], int64_t steps,
		    const uint8_t *codes, uint16_t *dst)
{
	const __m512i row = _mm512_set_epi64(
		0x0030003000300030, 0x0030003000300030, 0x0020002000200020, 0x0020002000200020,
		0x0010001000100010, 0x0010001000100010, 0, 0);
	const __m512i mask = _mm512_set1_epi16(15);
	__m512 v = _mm512_loadu_ps(values);
	__m512i table[8];

#pragma GCC unroll 8
	for (int i = 0; i < 8; i++) {
		__m512 a = _mm512_sub_ps(v, _mm512_set1_ps(zero[2 * i]));
		__m512 b = _mm512_sub_ps(v, _mm512_set1_ps(zero[2 * i + 1]));

		table[i] = two(_mm512_mul_ps(a, _mm512_set1_ps(scale[2 * i])),
			       _mm512_mul_ps(b, _mm512_set1_ps(scale[2 * i + 1])));
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

/* Scales of 16 rows; the usual dtypes by vectors. */
static void scales_of(const struct moe_coded_panel *p, int64_t group, float scale[16])
{
	const uint8_t *at = p->scale + (size_t)group * 16 * moe_dtype_size(p->coding->scale);

	switch (p->coding->scale) {
	case MOE_F32:
		_mm512_store_ps(scale, _mm512_loadu_ps(at));
		break;
	case MOE_BF16:
		_mm512_store_ps(scale, load_bf16((const uint16_t *)(const void *)at));
		break;
	case MOE_F16:
		_mm512_store_ps(scale, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)));
		break;
	default:
		moe_coded_scales(p, group, scale);
	}
	if (p->coding->scale != MOE_SCALE_UE8M0)
		return;
	/* 2^(b - 127): the byte is the exponent; 0 is subnormal, 255 NaN */
	__m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
	__mmask16 usual = _mm512_cmplt_epu32_mask(
		_mm512_sub_epi32(b, _mm512_set1_epi32(1)), _mm512_set1_epi32(254));

	_mm512_mask_store_ps(scale, usual, _mm512_castsi512_ps(_mm512_slli_epi32(b, 23)));
}

static void decode_group(const struct moe_coded_panel *p, int64_t group, int64_t k0, int64_t k,
			 uint16_t *dst)
{
	const struct moe_format *f = p->coding->format;
	const uint8_t *codes = p->codes + k0 * 16 * f->bits / 8;
	_Alignas(64) float scale[16], zero[16] = { 0 };

	scales_of(p, group, scale);
	if (p->coding->zero)
		moe_coded_zeros(p, group, zero);
	if (f->bits == 4)
		decode4(f->values, scale, zero, k / DECODE_STEP, codes, dst);
	else if (f->codes == MOE_CODES_INTEGER)
		decode8(scale, k / DECODE_STEP, codes, dst);
	else
		avx512_bf16_decode_magnitudes(f->values, scale, k / DECODE_STEP, codes, dst);
}

void avx512_bf16_decode(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst)
{
	const struct moe_coding *c = p->coding;
	int64_t end = k0 + k;

	if (!takes(p)) {
		moe_coded_decode(p, k0, k, dst);
		return;
	}
	while (k0 < end) {
		int64_t group = MOE_MIN((c->phase + k0) / c->group, p->groups - 1);
		int64_t next = group == p->groups - 1
				       ? end
				       : MOE_MIN(end, (group + 1) * c->group - c->phase);

		decode_group(p, group, k0, next - k0, dst);
		dst += 16 * (next - k0);
		k0 = next;
	}
}
