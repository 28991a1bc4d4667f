/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding of quantised panels (packed/coded.h) with tables in registers. A table holds code values
 * times the scale, rounded to bf16: one lookup gives what is multiplied. What these do not take
 * (groups that begin inside a step of 8 columns, other layouts) the plain decoder does.
 */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_DECODE_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_DECODE_H

#include "codelets/kernels/avx512_bf16/bf16.h"

#define DECODE_STEP 8	  /* columns: 128 elements */
#define DECODE_AHEAD 1024 /* bytes from a read to its prefetch, along a panel */

void avx512_bf16_decode(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst);

/* Tables can decode it: every group begins at a step. */
bool avx512_bf16_decodes(const struct moe_coded_panel *p);

/* fwd_coded.c, fwd_coded_vbmi.c: struct moe_tiles.fwd_coded, fwd_coded_run */
bool avx512_bf16_fwd_coded(int m, const struct moe_coded_panel *p, const struct moe_fwd_seg *seg,
			   int nseg, const uint16_t *next, float *y, int64_t ldy, enum moe_out out,
			   uint16_t *buffer);
int64_t avx512_bf16_fwd_coded_run(int m, const struct moe_coded_panel *p, const struct moe_fwd_seg *seg, int nseg,
				  int64_t count, const struct moe_panel_run *run);

/* decode_vbmi.c: 8-bit codes of sign and magnitude; `steps` of one group, for CPUs with AVX512-VBMI
 */
bool avx512_bf16_has_vbmi(void);
void avx512_bf16_decode_magnitudes(const float *values, const float scale[16], int64_t steps,
				   const uint8_t *codes, uint16_t *dst);

/*
 * 16 bytes in each lane. On Zen 4 vbroadcasti32x4 is a load and a shuffle, which decoding has enough of; a broadcast
 * of 8 bytes is a load, or part of a blend. gcc would go by general registers.
 */
INLINE __m512i lanes(const void *p)
{
	const uint64_t *q = p;
	__mmask8 upper = 0xaa;
	__m512i v;

	__asm__("vpbroadcastq %1, %0" : "=v"(v) : "m"(q[0]));
	__asm__("vpblendmq %1%{1to8%}, %0, %0%{%2%}" : "+v"(v) : "m"(q[1]), "Yk"(upper));
	return v;
}

INLINE __m512i two(__m512 low, __m512 high)
{
	return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Scales of 16 rows */
INLINE __m512 scales_of(const struct moe_coded_panel *p, const enum moe_dtype dtype, int64_t group)
{
	const uint8_t *at = p->scale + group * 16 *
					       (dtype == MOE_F32	   ? 4
						: dtype == MOE_SCALE_UE8M0 ? 1
									   : 2);
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

/* Zeros of 16 rows */
INLINE __m512 zeros_of(const struct moe_coded_panel *p, int64_t group)
{
	__m128i z = _mm_loadu_si128((const __m128i *)(p->zero + group * 16));

	return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(z));
}

/*
 * 4 bits: the 16 values of each row, times its scale, are 16 words of a table; the tables of 4 rows
 * are two vectors, and a word's index in them is 16 * row + code.
 */
INLINE void tables4(const bool zeros, __m512 values, __m512 scale, __m512 zero, __m512i table[8])
{
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
}

/* What the vectors of a group are made with: 4 bits, words of rows 2 i and 2 i + 1; 8-bit integers, their scales;
 * FP8, low and high bytes. */
struct coded_tables {
	_Alignas(64) float scale[16];
	float zero[16];
	__m512i table[8];
	uint16_t values[32]; /* what exponents are added to */
	uint32_t last; /* bits of the scale that FP8's are of */
};

/* tables4 of scales and zeros (NULL: none) in memory; one after the other, with the few registers that tiles leave */
INLINE void memory_tables4(__m512 values, const float *scale, const float *zero, __m512i table[8])
{
#pragma GCC unroll 8
	for (int i = 0; i < 8; i++) {
		__m512 a = values, b = values;

		if (zero) {
			a = _mm512_sub_ps(a, _mm512_set1_ps(zero[2 * i]));
			b = _mm512_sub_ps(b, _mm512_set1_ps(zero[2 * i + 1]));
		}
		a = _mm512_mul_ps(a, _mm512_set1_ps(scale[2 * i]));
		b = _mm512_mul_ps(b, _mm512_set1_ps(scale[2 * i + 1]));
		table[i] = two(a, b);
		__asm__ volatile("" ::: "memory");
	}
}

/* Rows 4 z .. 4 z + 3 of a step's 64 bytes */
INLINE __m512i look_up4(const __m512i table[8], const uint8_t *codes, const int z)
{
	const __m512i row =
		_mm512_set_epi64(0x0030003000300030, 0x0030003000300030, 0x0020002000200020,
				 0x0020002000200020, 0x0010001000100010, 0x0010001000100010, 0, 0);
	/* lane i: a word for each byte of row i, twice */
	const __m512i word = _mm512_set_epi64(0x800f800e800d800c, 0x800f800e800d800c, 0x800b800a80098008,
					      0x800b800a80098008, 0x8007800680058004, 0x8007800680058004,
					      0x8003800280018000, 0x8003800280018000);
	const __m512i nibble = _mm512_broadcast_i64x2(_mm_set_epi64x(0x0004000400040004, 0));
	__m512i rows = lanes(codes + 16 * z);
	__m512i index = _mm512_ternarylogic_epi64(
		_mm512_srlv_epi16(_mm512_shuffle_epi8(rows, word), nibble), _mm512_set1_epi16(15), row,
		0xea);

	return _mm512_permutex2var_epi16(table[2 * z], index, table[2 * z + 1]);
}

/* Scales of rows 4 j .. 4 j + 3, four lanes each */
INLINE void scales8(__m512 scale, __m512 s[4])
{
	const __m512i each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);

	s[0] = _mm512_permutevar_ps(_mm512_shuffle_f32x4(scale, scale, 0x00), each);
	s[1] = _mm512_permutevar_ps(_mm512_shuffle_f32x4(scale, scale, 0x55), each);
	s[2] = _mm512_permutevar_ps(_mm512_shuffle_f32x4(scale, scale, 0xaa), each);
	s[3] = _mm512_permutevar_ps(_mm512_shuffle_f32x4(scale, scale, 0xff), each);
}

/* 8-bit integers, 8 columns of rows 4 j .. 4 j + 3 */
INLINE __m512i integers(const uint8_t *codes, const __m512 s[4], const int j)
{
	const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
	__m512 f[2];

#pragma GCC unroll 2
	for (int h = 0; h < 2; h++) {
		__m128i c = _mm_load_si128((const __m128i *)(codes + 64 * h + 16 * j));

		f[h] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c)), s[j]);
	}
	return _mm512_permutexvar_epi64(order, two(f[0], f[1]));
}

#endif
