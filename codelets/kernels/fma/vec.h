/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One vector of f32 as the kernels of this folder see it: 16 lanes where the compiler's flags have
 * AVX-512, else 8. Included by codelets/kernels/avx2 and avx512f only.
 */
#ifndef MOE_CODELETS_KERNELS_FMA_VEC_H
#define MOE_CODELETS_KERNELS_FMA_VEC_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#define VEC_INLINE static inline __attribute__((always_inline))

/*
 * c += a * b. As asm, because gcc 12 turns the intrinsic into the 132 and 213 forms, copies
 * accumulators about and spills them (110 -> 75 GFLOP/s).
 */
#define VEC_FMA(c, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b))

/*
 * c[0] += a * b[0], c[1] += a * b[1] with `a` loaded or broadcast from memory: in one piece where
 * there are 16 registers, as gcc hoists one load more than they hold, and copies or spills.
 */
#define VEC_FMA2(load, memory, b, c)                                                               \
	do {                                                                                       \
		vec fma2_;                                                                         \
		__asm__ volatile(load " %3, %2\n\t"                                                \
					   "vfmadd231ps %2, %4, %0\n\t"                            \
					   "vfmadd231ps %2, %5, %1"                                \
				 : "+v"((c)[0]), "+v"((c)[1]), "=&v"(fma2_)                        \
				 : "m"(memory), "v"((b)[0]), "v"((b)[1]));                         \
	} while (0)

/* Keeps the compiler from holding what it can load again: registers are for accumulators. */
#define VEC_RELOAD() __asm__ volatile("" ::: "memory")

VEC_INLINE void vec_prefetch_l1(const void *p)
{
	_mm_prefetch(p, _MM_HINT_T0);
}

VEC_INLINE void vec_prefetch_l2(const void *p)
{
	_mm_prefetch(p, _MM_HINT_T1);
}

#if defined(__AVX512F__)

#define VEC_LANES 16
#define FMA_LAYOUT MOE_LAYOUT_BLOCKS8
#define VEC_HELD 4 /* weight vectors in registers beside the accumulators */
typedef __m512 vec;

VEC_INLINE vec vec_zero(void)
{
	return _mm512_setzero_ps();
}

VEC_INLINE vec vec_load(const float *p)
{
	return _mm512_loadu_ps(p);
}

VEC_INLINE void vec_store(float *p, vec v)
{
	_mm512_storeu_ps(p, v);
}

VEC_INLINE void vec_stream(float *p, vec v)
{
	_mm512_stream_ps(p, v);
}

VEC_INLINE vec vec_add(vec a, vec b)
{
	return _mm512_add_ps(a, b);
}

VEC_INLINE vec vec_mul(vec a, vec b)
{
	return _mm512_mul_ps(a, b);
}

VEC_INLINE vec vec_set1(float f)
{
	return _mm512_set1_ps(f);
}

/* p[0..4) in every 128 bits */
VEC_INLINE vec vec_broadcast4(const float *p)
{
	return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
}

/* The even, or the odd, elements of 2 * VEC_LANES bf16. */
VEC_INLINE vec vec_even(const uint16_t *p)
{
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}

VEC_INLINE vec vec_odd(const uint16_t *p)
{
	__m512i high = _mm512_set1_epi32((int)0xffff0000u);

	return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high));
}

/* 8 bf16 at p and, `step` elements on, 8 more, in order. */
VEC_INLINE vec vec_widen(const uint16_t *p, int step)
{
	__m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p));

	v = _mm256_inserti128_si256(v, _mm_loadu_si128((const __m128i *)(p + step)), 1);
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

/* The first n lanes. */
VEC_INLINE vec vec_load_part(const float *p, int n)
{
	return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}

VEC_INLINE void vec_store_part(float *p, int n, vec v)
{
	_mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
}

/* p: 4 vectors of 4 partial sums each of 4 columns; the 16 sums go to out. */
VEC_INLINE void vec_fold16(const float *p, vec out[1])
{
	vec v[4] = { vec_load(p), vec_load(p + 16), vec_load(p + 32), vec_load(p + 48) };
	const __m512i order =
		_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
	vec ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
	vec cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
	__m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
	__m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));

	out[0] = _mm512_permutexvar_ps(
		order, _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high)));
}

#elif defined(__AVX2__)

#define VEC_LANES 8
#define FMA_LAYOUT MOE_LAYOUT_PAIRS16
#define VEC_HELD 2
typedef __m256 vec;

VEC_INLINE vec vec_zero(void)
{
	return _mm256_setzero_ps();
}

VEC_INLINE vec vec_load(const float *p)
{
	return _mm256_loadu_ps(p);
}

VEC_INLINE void vec_store(float *p, vec v)
{
	_mm256_storeu_ps(p, v);
}

VEC_INLINE void vec_stream(float *p, vec v)
{
	_mm256_stream_ps(p, v);
}

VEC_INLINE vec vec_add(vec a, vec b)
{
	return _mm256_add_ps(a, b);
}

VEC_INLINE vec vec_mul(vec a, vec b)
{
	return _mm256_mul_ps(a, b);
}

VEC_INLINE vec vec_set1(float f)
{
	return _mm256_set1_ps(f);
}

VEC_INLINE vec vec_even(const uint16_t *p)
{
	__m256i v = _mm256_loadu_si256((const __m256i *)p);

	return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
}

VEC_INLINE vec vec_odd(const uint16_t *p)
{
	__m256i v = _mm256_loadu_si256((const __m256i *)p);

	return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000u)));
}

/* The same with the mask in memory, 4 % slower: for tiles that leave no register for it. */
VEC_INLINE vec vec_odd_tight(const uint16_t *p)
{
	static const uint32_t high[8] = { 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
					  0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u };
	__m256i v = _mm256_loadu_si256((const __m256i *)p);

	__asm__("vpand %1, %0, %0" : "+v"(v) : "m"(high));
	return _mm256_castsi256_ps(v);
}

/* 8 bf16 at p, in order. */
VEC_INLINE vec vec_widen(const uint16_t *p, int step)
{
	__m128i v = _mm_loadu_si128((const __m128i *)p);

	(void)step;
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

VEC_INLINE __m256i vec_part_mask(int n)
{
	return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

VEC_INLINE vec vec_load_part(const float *p, int n)
{
	return _mm256_maskload_ps(p, vec_part_mask(n));
}

VEC_INLINE void vec_store_part(float *p, int n, vec v)
{
	_mm256_maskstore_ps(p, vec_part_mask(n), v);
}

/* Sums of every other element of a and b, in turn */
VEC_INLINE vec vec_fold2(vec a, vec b)
{
	return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
}

/* Of 4 vectors, each half on its own */
VEC_INLINE vec vec_fold4(const float *p)
{
	__m256d ab = _mm256_castps_pd(vec_fold2(vec_load(p), vec_load(p + 8)));
	__m256d cd = _mm256_castps_pd(vec_fold2(vec_load(p + 16), vec_load(p + 24)));

	return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
			     _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
}

/* v: a vector of 8 partial sums of each column; the 16 sums go to out. */
VEC_INLINE void vec_fold16(const float *v, vec out[2])
{
	for (int i = 0; i < 2; i++, v += 64) {
		vec a = vec_fold4(v), b = vec_fold4(v + 32);

		out[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
	}
}

#else
#error "the kernels of this folder need AVX2 or AVX-512"
#endif

#define VEC_PANEL (16 / VEC_LANES) /* vectors of 16 columns */

#endif
