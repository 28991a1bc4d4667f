/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients, c = a^T b over the rows. Pair arrays interleave two rows, so that a word holds one
 * column of both; a's words are broadcast, b's are vectors. A reduction runs over all rows in
 * registers, in order; c is touched once.
 */
#include "codelets/kernels/avx512_bf16/bf16.h"

/* 16 columns of rows 2 t and 2 t + 1, rounded to bf16 */
struct row_pair {
	__m256i even, odd;
};

INLINE __m512i interleave(struct row_pair p)
{
	__m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(p.odd), 16);

	return _mm512_or_si512(_mm512_cvtepu16_epi32(p.even), high);
}

#define PAIRS_AHEAD 48 /* rows */

/* Rows found through a list lie anywhere: no prefetcher foresees them. */
INLINE void prefetch_row(const char *row, int bytes)
{
	for (int at = 0; at < bytes; at += 64)
		_mm_prefetch(row + at, _MM_HINT_T0);
}

void avx512_bf16_pairs(int m, const float *src, int64_t ld, const int32_t *token,
		       const float *scale, int cols, void *dst)
{
	uint32_t *out = dst;

	for (int i = 0; i < m; i += 2, out += cols) {
		bool last = i + 1 == m;
		const float *a = src + (token ? token[i] : i) * ld;
		const float *b = last ? a : src + (token ? token[i + 1] : i + 1) * ld;
		__m512 by_a = _mm512_set1_ps(scale ? scale[i] : 1.0f);
		__m512 by_b = _mm512_set1_ps(scale && !last ? scale[i + 1] : 1.0f);
		__mmask16 both = last ? 0 : 0xffff;

		if (token && i + PAIRS_AHEAD + 1 < m) {
			prefetch_row((const char *)(src + token[i + PAIRS_AHEAD] * ld), 4 * cols);
			prefetch_row((const char *)(src + token[i + PAIRS_AHEAD + 1] * ld),
				     4 * cols);
		}
		for (int c = 0; c < cols; c += 16) {
			__m512 va = _mm512_mul_ps(_mm512_loadu_ps(a + c), by_a);
			__m512 vb = _mm512_maskz_mul_ps(both, _mm512_loadu_ps(b + c), by_b);

			_mm512_storeu_si512(
				out + c, interleave((struct row_pair){ to_bf16(va), to_bf16(vb) }));
		}
	}
}

void avx512_bf16_pairs_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols,
			    void *dst)
{
	uint32_t *out = dst;

	for (int i = 0; i < m; i += 2, out += cols) {
		bool last = i + 1 == m;
		const uint16_t *a = src + (token ? token[i] : i) * ld;
		const uint16_t *b = last ? a : src + (token ? token[i + 1] : i + 1) * ld;
		__mmask16 both = last ? 0 : 0xffff;

		if (token && i + PAIRS_AHEAD + 1 < m) {
			prefetch_row((const char *)(src + token[i + PAIRS_AHEAD] * ld), 2 * cols);
			prefetch_row((const char *)(src + token[i + PAIRS_AHEAD + 1] * ld),
				     2 * cols);
		}
		for (int c = 0; c < cols; c += 16) {
			__m256i va = _mm256_loadu_si256((const __m256i *)(a + c));
			__m256i vb = _mm256_maskz_loadu_epi16(both, b + c);

			_mm512_storeu_si512(out + c, interleave((struct row_pair){ va, vb }));
		}
	}
}

/* One tile of c; `keep` has the columns that exist, per vector of 16. */
struct target {
	float *c;
	int64_t ldc;
	int rows;
	__mmask16 keep[2];
	float scale;
	enum moe_out out;
};

INLINE void put_tile(const int rows, const int vectors, __m512 sum[16][2], const struct target *t)
{
	__m512 scale = _mm512_set1_ps(t->scale);

#pragma GCC unroll 16
	for (int i = 0; i < rows; i++) {
		if (i >= t->rows)
			return;
#pragma GCC unroll 2
		for (int j = 0; j < vectors; j++) {
			float *c = t->c + i * t->ldc + 16 * j;
			__mmask16 keep = t->keep[j];

			if (t->out == MOE_OUT_STREAM)
				_mm512_stream_ps(c, _mm512_mul_ps(sum[i][j], scale));
			else if (t->out == MOE_OUT_ADD)
				_mm512_mask_storeu_ps(
					c, keep,
					_mm512_fmadd_ps(sum[i][j], scale,
							_mm512_maskz_loadu_ps(keep, c)));
			else
				_mm512_mask_storeu_ps(c, keep, _mm512_mul_ps(sum[i][j], scale));
		}
	}
}

INLINE void tile(const int rows, const int vectors, int pairs, const uint32_t *a, int64_t lda,
		 const uint32_t *b, int64_t ldb, const struct target *t)
{
	__m512 sum[16][2];

#pragma GCC unroll 16
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
		for (int j = 0; j < vectors; j++)
			sum[i][j] = _mm512_setzero_ps();
	if (t->out == MOE_OUT_ADD) /* c's rows lie pages apart: under way while the sums are made */
		for (int i = 0; i < MOE_MIN(rows, t->rows); i++)
			prefetch_row((const char *)(t->c + i * t->ldc), 64 * vectors);
	for (int p = 0; p < pairs; p++, a += lda, b += ldb) {
		__m512i v[2];

#pragma GCC unroll 2
		for (int j = 0; j < vectors; j++)
			v[j] = _mm512_loadu_si512(b + 16 * j);
#pragma GCC unroll 16
		for (int i = 0; i < rows; i++) {
			__m512i w = _mm512_set1_epi32((int)a[i]);

#pragma GCC unroll 2
			for (int j = 0; j < vectors; j++)
				sum[i][j] = dot_bf16(sum[i][j], v[j], w);
		}
	}
	put_tile(rows, vectors, sum, t);
}

#define TILE(rows, vectors)                                                                        \
	NOINLINE void tile_##rows##x##vectors(int pairs, const uint32_t *a, int64_t lda,           \
					      const uint32_t *b, int64_t ldb,                      \
					      const struct target *t)                              \
	{                                                                                          \
		tile(rows, vectors, pairs, a, lda, b, ldb, t);                                     \
	}
TILE(16, 1) /* thin a: b is read once */
TILE(8, 2)

static bool streams(const float *c, int64_t ldc, enum moe_out out)
{
	return out == MOE_OUT_STREAM && (uintptr_t)c % 64 == 0 && ldc % 16 == 0;
}

void avx512_bf16_grad(int m, const void *a, int64_t lda, int na, const void *b, int64_t ldb, int nb,
		      float scale, float *c, int64_t ldc, enum moe_out out)
{
	int pairs = (m + 1) / 2;
	bool stream = streams(c, ldc, out);

	for (int j = 0; j < nb;) {
		bool wide = na > 16 && nb - j > 16;
		int cols = wide ? 32 : 16, rows = wide ? 8 : 16;
		int live = MOE_MIN(cols, nb - j);
		uint32_t keep = (uint32_t)((UINT64_C(1) << live) - 1);
		const uint32_t *from = (const uint32_t *)b + j;

		for (int i = 0; i < na; i += rows) {
			struct target t = { c + i * ldc + j,
					    ldc,
					    MOE_MIN(rows, na - i),
					    { (__mmask16)keep, (__mmask16)(keep >> 16) },
					    scale,
					    MOE_OUT_STORE };

			if (out == MOE_OUT_ADD)
				t.out = out;
			else if (stream && live == cols)
				t.out = MOE_OUT_STREAM;
			(wide ? tile_8x2 : tile_16x1)(pairs, (const uint32_t *)a + i, lda, from,
						      ldb, &t);
		}
		j += cols;
	}
}
