/* SPDX-License-Identifier: Apache-2.0 */
/* Integers beside the vectors of vec.h, of its width: names of intrinsics, scales of quantised
 * panels, rounding to bf16. */
#ifndef MOE_CODELETS_KERNELS_FMA_VEC_INT_H
#define MOE_CODELETS_KERNELS_FMA_VEC_INT_H

#include "codelets/kernels/fma/vec.h"
#include "codelets/kernels/packed/coded.h"

/* V(add_epi32), and IVEC(and) for those that end with the width; H and HVEC: vectors half as wide
 */
#if VEC_LANES == 16
#define V(name) _mm512_##name
#define IVEC(name) _mm512_##name##_si512
#define H(name) _mm256_##name
#define HVEC(name) _mm256_##name##_si256
typedef __m512i ivec;
typedef __m256i hvec;
#else
#define V(name) _mm256_##name
#define IVEC(name) _mm256_##name##_si256
#define H(name) _mm_##name
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

/* bf16 bits of normal numbers (or 0, infinities, quiet NaN), rounded to nearest even, in the low
 * half of each dword */
VEC_INLINE ivec vec_rounded(vec v)
{
	ivec bits = IVEC(castps)(v), odd = IVEC(and)(V(srli_epi32)(bits, 16), V(set1_epi32)(1));

	bits = V(add_epi32)(V(add_epi32)(bits, V(set1_epi32)(0x7fff)), odd);
	return V(srli_epi32)(bits, 16);
}

/* In each 128 bits: 4 of a, then 4 of b */
VEC_INLINE ivec vec_bf16(vec a, vec b)
{
	return V(packus_epi32)(vec_rounded(a), vec_rounded(b));
}

/* In each 128 bits: the low bytes of its words, then the high ones */
VEC_INLINE ivec ivec_split_bytes(ivec words)
{
	return V(packus_epi16)(IVEC(and)(words, V(set1_epi16)(255)), V(srli_epi16)(words, 8));
}

/* moe_coded_scales */
VEC_INLINE void vec_scales(const struct moe_coded_panel *p, int64_t group, float scale[16])
{
	const uint8_t *at = p->scale + group * 16 * (int64_t)moe_dtype_size(p->coding->scale);

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
		default: { /* 2^(b - 127), or NaN for 255 */
			ivec b = V(cvtepu8_epi32)(
				_mm_loadu_si128((const __m128i *)(const void *)(at + i)));
			float *to = scale + i;

			ivec_store(to, V(slli_epi32)(b, 23));
			for (int j = 0; j < VEC_LANES; j++)
				if (__builtin_expect((uint8_t)(at[i + j] - 1) >= 254, 0))
					to[j] = moe_ue8m0(at[i + j]);
		}
		}
}

#endif
