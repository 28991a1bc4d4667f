/* SPDX-License-Identifier: Apache-2.0 */
/* Integers beside the vectors of vec.h, of its width: names of intrinsics, scales of quantised
 * panels, rounding to bf16. */
#ifndef MOE_CODELETS_KERNELS_FMA_VEC_INT_H
#define MOE_CODELETS_KERNELS_FMA_VEC_INT_H

#include "codelets/kernels/fma/vec.h"
#include "codelets/kernels/packed/coded.h"

/* V(add_epi32), and IVEC(and) for those that end with the width; HVEC: vectors half as wide
 */
#if VEC_LANES == 16
#define V(name) _mm512_##name
#define IVEC(name) _mm512_##name##_si512
#define HVEC(name) _mm256_##name##_si256
typedef __m512i ivec;
typedef __m256i hvec;
#else
#define V(name) _mm256_##name
#define IVEC(name) _mm256_##name##_si256
#define HVEC(name) _mm_##name##_si128
typedef __m256i ivec;
typedef __m128i hvec;
#endif

VEC_INLINE ivec ivec_load(const void *p)
{
	return IVEC(loadu)((const ivec *)p);
}

VEC_INLINE void ivec_store(void *p, ivec v)
{
	IVEC(storeu)((ivec *)p, v);
}

/* 16 bytes, or 8, for one vector of dwords */
VEC_INLINE __m128i ivec_bytes(const void *p)
{
	return VEC_LANES == 16 ? _mm_loadu_si128((const __m128i *)p)
			       : _mm_loadl_epi64((const __m128i *)p);
}

/* bf16 bits of normal numbers (or 0, infinities, quiet NaN), rounded to nearest even, in the high
 * half of each dword */
VEC_INLINE ivec vec_rounded(vec v)
{
	ivec bits = IVEC(castps)(v), odd = IVEC(and)(V(srli_epi32)(bits, 16), V(set1_epi32)(1));

	return V(add_epi32)(V(add_epi32)(bits, V(set1_epi32)(0x7fff)), odd);
}

/* In each 128 bits: 4 of a, then 4 of b */
VEC_INLINE ivec vec_bf16(vec a, vec b)
{
	return V(packus_epi32)(V(srli_epi32)(vec_rounded(a), 16),
			       V(srli_epi32)(vec_rounded(b), 16));
}

#if VEC_LANES == 8
/* Each of a beside its neighbour of b: a pair of rows (MOE_LAYOUT_PAIRS16) */
VEC_INLINE ivec vec_bf16_pair(vec a, vec b)
{
	return _mm256_blend_epi16(_mm256_srli_epi32(vec_rounded(a), 16), vec_rounded(b), 0xaa);
}
#endif

/* In each 128 bits: the low bytes of its words, then the high ones */
VEC_INLINE ivec ivec_split_bytes(ivec words)
{
	return V(packus_epi16)(IVEC(and)(words, V(set1_epi16)(255)), V(srli_epi16)(words, 8));
}

/* moe_coded_scales */
VEC_INLINE void vec_scales(const struct moe_coded_panel *p, int64_t group, float scale[16])
{
	const uint8_t *at = p->scale + group * 16 * (int64_t)moe_dtype_size(p->coding->scale);

	if (p->coding->scale == MOE_SCALE_UE8M0) { /* 2^(b - 127): subnormal for 0, NaN for 255 */
		__m128i b = _mm_loadu_si128((const __m128i *)(const void *)at);
		__m128i rare = _mm_or_si128(_mm_cmpeq_epi8(b, _mm_setzero_si128()),
					    _mm_cmpeq_epi8(b, _mm_set1_epi8(-1)));

		if (__builtin_expect(_mm_movemask_epi8(rare), 0)) {
			moe_coded_scales(p, group, scale);
			return;
		}
	}
	for (int i = 0; i < 16; i += VEC_LANES)
		switch (p->coding->scale) {
		case MOE_F32:
			vec_store(scale + i, vec_load((const float *)(const void *)at + i));
			break;
		case MOE_BF16:
			vec_store(scale + i, vec_widen((const uint16_t *)(const void *)at + i, 8));
			break;
		case MOE_F16:
			vec_store(scale + i, V(cvtph_ps)(HVEC(loadu)(
						     (const hvec *)(const void *)(at + 2 * i))));
			break;
		default:
			ivec_store(scale + i,
				   V(slli_epi32)(V(cvtepu8_epi32)(ivec_bytes(at + i)), 23));
		}
}

#endif
