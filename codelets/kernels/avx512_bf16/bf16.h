/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of this folder share: how rows are split into tiles, bf16 vectors and how results
 * leave registers. vdpbf16ps and vcvtneps2bf16 take subnormals as zero and round to nearest even;
 * NaN stays NaN.
 */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_H

#include "codelets/kernels/packed/coded.h"

#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

/*
 * Tiles. 24 accumulators of a forward tile are 6 rows x 16 n (4 partial sums each), those of a
 * backward tile 12 rows x 32 columns beside the shuffles, or 14 where the weights are decoded.
 */
#define FWD_ROWS 6
#define BWD_ROWS 14
#define FUSED_ROWS 12 /* more leave no registers to shuffle or to decode in */
#define BWD_SMALL 5   /* up to so many rows the backward walks the weights in memory order */
#define BWD_DECODE 25 /* from so many rows on it decodes a slice of 32 columns once */

struct tiles {
	int count, rows, longer; /* the first `longer` tiles have rows + 1 */
	int first;		 /* rows of a tile before those; 0: there is none */
};

static inline struct tiles split_rows(int m, int limit)
{
	int count = (m + limit - 1) / limit;

	return (struct tiles){ count, count ? m / count : 0, count ? m % count : 0, 0 };
}

static inline int tile_rows(const struct tiles *t, int i)
{
	if (i == 0 && t->first)
		return t->first;
	return t->rows + (i < t->longer + (t->first > 0));
}

static inline struct tiles fwd_tiles(int m)
{
	return split_rows(m, FWD_ROWS);
}

/* The first of longer tiles is one that can decode quantised weights (bwd_coded.h), where that makes no tile more. */
static inline struct tiles bwd_tiles(int m)
{
	struct tiles t = split_rows(m, m < BWD_DECODE ? FUSED_ROWS : BWD_ROWS), rest;

	if (tile_rows(&t, 0) <= FUSED_ROWS)
		return t;
	rest = split_rows(m - FUSED_ROWS, BWD_ROWS);
	if (rest.count == t.count)
		return t;
	rest.count++;
	rest.first = FUSED_ROWS;
	return rest;
}

INLINE __m512 dot_bf16(__m512 sum, __m512i a, __m512i b)
{
	return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

INLINE __m512 load_bf16(const uint16_t *p)
{
	__m256i v = _mm256_loadu_si256((const __m256i *)p);

	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

INLINE __m256i to_bf16(__m512 v)
{
	return (__m256i)_mm512_cvtneps_pbh(v);
}

/* 16 columns of one row */
INLINE void put(float *y, __m512 v, enum moe_out out)
{
	if (out == MOE_OUT_STREAM)
		_mm512_stream_ps(y, v);
	else
		_mm512_storeu_ps(y, out == MOE_OUT_ADD ? _mm512_add_ps(_mm512_loadu_ps(y), v) : v);
}

/* Lanes hold 4 partial sums of n = 4 j + lane in vector j; returns the sums in order of n. */
INLINE __m512 fold(const __m512 v[4])
{
	const __m512i order =
		_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
	__m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
	__m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
	__m512d lo = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd);
	__m512d hi = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);

	return _mm512_permutexvar_ps(order, _mm512_add_ps((__m512)lo, (__m512)hi));
}

/* STREAM needs whole cache lines. */
static inline enum moe_out out_mode(enum moe_out out, const float *y, int64_t ldy)
{
	bool aligned = (uintptr_t)y % 64 == 0 && ldy % 16 == 0;

	return out == MOE_OUT_STREAM && !aligned ? MOE_OUT_STORE : out;
}

/* fwd.c */
void avx512_bf16_fwd(int m, const struct moe_fwd_seg *seg, int nseg, const uint16_t *next, float *y,
		     int64_t ldy, enum moe_out out);

/* Tiles from `tile` on: those before are done, without having prefetched `next`. */
void avx512_bf16_fwd_from(int tile, int m, const struct moe_fwd_seg *seg, int nseg,
			  const uint16_t *next, float *y, int64_t ldy, enum moe_out out);

/* bwd.c */
int avx512_bf16_bwd_columns(int m);
bool avx512_bf16_bwd_takes(int m, const struct moe_coded_panel *p);
size_t avx512_bf16_bwd_scratch(int m, int64_t n, int columns);
void avx512_bf16_bwd(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
		     int64_t ldy, enum moe_out out, void *scratch);

/* pack.c, pack_bwd.c */
void avx512_bf16_stream_panel(const float *src, int64_t k, uint16_t *dst);
void avx512_bf16_pack_fwd_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token,
			       int64_t k, int64_t kp, void *panel, int64_t width, int64_t col);
void avx512_bf16_pack_fwd(int m, const float *src, int64_t ld, const int32_t *token, int64_t k,
			  int64_t kp, void *panel, int64_t width, int64_t col);
void avx512_bf16_unpack_fwd(int m, const void *panel, int64_t width, int64_t col, int64_t k,
			    float *dst, int64_t ld);
void avx512_bf16_pack_bwd(int m, const float *src, int64_t ld, const int32_t *token, int64_t k,
			  int64_t kp, void *panel, int64_t width, int64_t col);
void avx512_bf16_unpack_bwd(int m, const void *panel, int64_t width, int64_t col, int64_t k,
			    float *dst, int64_t ld);

/* grad.c */
void avx512_bf16_pairs(int m, const float *src, int64_t ld, const int32_t *token,
		       const float *scale, int cols, void *dst);
void avx512_bf16_pairs_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols,
			    void *dst);
void avx512_bf16_grad(int m, const void *a, int64_t lda, int na, const void *b, int64_t ldb, int nb,
		      float scale, float *c, int64_t ldc, enum moe_out out);

/* swiglu.c */
void avx512_bf16_swiglu_tile(const struct moe_swiglu_rows *r, float *g, const float *u);
void avx512_bf16_swiglu_tile_bwd(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh,
				 float *dgate, float *dup, float *h, float *dgw);

#endif
