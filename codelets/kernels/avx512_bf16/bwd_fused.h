/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of bwd_coded.c and bwd_coded_vbmi.c, which define bwd_prepare and bwd_vectors before. */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_BWD_FUSED_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_BWD_FUSED_H

#include "codelets/kernels/avx512_bf16/bwd_coded.h"

#define NO_SCALE 0x7fc00000u /* NaN */

/* What bwd_vectors needs of a panel's scales and zeros (NULL: none) */
INLINE void bwd_prepare(const enum bwd_kind kind, const float *values, const float *scale, const float *zero,
			struct coded_tables *t);
/* Pairs 2 q and 2 q + 1 of 16 columns */
INLINE void bwd_vectors(const enum bwd_kind kind, const uint8_t *codes, const float *scale,
			const struct coded_tables *t, const struct bwd_orders *o, const int q, __m512i w[2]);

INLINE void fused_run(const int rows, const enum bwd_kind kind, const struct bwd_run *run,
		      __m512 sum[FUSED_ROWS][2], struct coded_tables *t)
{
	const struct bwd_codes *c = run->coded;
	const struct bwd_orders *o = bwd_orders();
	const int bytes = bwd_bytes(kind);
	const uint8_t *codes = c->codes;
	const float *scale = c->scale, *zero = c->zero;
	int left = run->n / 16;
	ptrdiff_t far = FETCH_PANELS * c->stride, next = 2 * bytes - left * c->stride;
	const uint32_t *g = run->g;
	uint16_t *keep = c->keep;

	t->last = NO_SCALE;
	for (; left > 0; left--) {
		/* at the end the next columns of the first panels */
		const char *ahead = (const char *)codes + far + (left > FETCH_PANELS ? 0 : next);

#pragma GCC unroll 8
		for (int l = 0; l < 2 * bytes / 64; l++)
			_mm_prefetch(ahead + 64 * l, _MM_HINT_T0);
		bwd_prepare(kind, c->values, scale, zero, t);
#pragma GCC unroll 4
		for (int q = 0; q < 4; q++) {
#pragma GCC unroll 2
			for (int v = 0; v < 2; v++) {
				__m512i w[2];

				bwd_vectors(kind, codes + v * bytes, scale, t, o, q, w);
				_mm512_store_si512(keep + 128 * q + 32 * v, w[0]);
				_mm512_store_si512(keep + 128 * q + 32 * v + 64, w[1]);
#pragma GCC unroll 12
				for (int i = 0; i < rows; i++)
					sum[i][v] = dot_bf16(sum[i][v], w[0],
							     _mm512_set1_epi32((int)g[i]));
#pragma GCC unroll 12
				for (int i = 0; i < rows; i++)
					sum[i][v] = dot_bf16(sum[i][v], w[1],
							     _mm512_set1_epi32((int)g[rows + i]));
				/* nothing stays in registers: there are none */
				if (rows >= 8)
					__asm__ volatile("" ::: "memory");
			}
			g += 2 * rows;
		}
		keep += c->all ? 16 * 32 : 0;
		codes += c->stride;
		scale += 16;
		zero += zero ? 16 : 0;
	}
}

INLINE void decoded_run(const int rows, const struct bwd_run *run, __m512 sum[FUSED_ROWS][2])
{
	const uint32_t *g = run->g;
	const uint16_t *w = run->w;

	for (int n = 0; n < run->n; n += 2, w += 64, g += rows) {
		__m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 32);

#pragma GCC unroll 12
		for (int i = 0; i < rows; i++) {
			__m512i v = _mm512_set1_epi32((int)g[i]);

			sum[i][0] = dot_bf16(sum[i][0], w0, v);
			sum[i][1] = dot_bf16(sum[i][1], w1, v);
		}
	}
}

INLINE void fused(const int rows, const enum bwd_kind kind, const struct bwd_run *run, int runs,
		  const struct bwd_target *t)
{
	__m512 sum[FUSED_ROWS][2];

#pragma GCC unroll 12
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
		for (int j = 0; j < 2; j++)
			sum[i][j] = t->from ? _mm512_load_ps(t->from + 32 * i + 16 * j)
					    : _mm512_setzero_ps();
	for (const struct bwd_run *end = run + runs; run < end; run++)
		if (run->coded)
			fused_run(rows, kind, run, sum, t->tables);
		else if (rows)
			decoded_run(rows, run, sum);
#pragma GCC unroll 12
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
		for (int j = 0; j < 2; j++)
			put(t->y + i * t->ldy + 16 * j, sum[i][j], t->out);
}

INLINE void small(const int rows, const enum bwd_kind kind, const struct moe_coded_panel *p, int64_t k,
		  int columns, const uint32_t *g, float *sum, struct coded_tables *t)
{
	const int bytes = bwd_bytes(kind);
	const struct bwd_orders *o = bwd_orders();
	const uint8_t *codes = p->codes + k / 16 * bytes;
	const float *values = p->coding->format->values, *zero = p->coding->zero ? t->zero : NULL;
	int64_t group = bwd_group(p, k), end = k + columns;

	t->last = NO_SCALE;
	for (int64_t next; k < end; group++) {
		next = group == p->groups - 1
			       ? end
			       : MOE_MIN(end, (group + 1) * p->coding->group - p->coding->phase);
		_mm512_store_ps(t->scale, bwd_scales(p, group));
		if (zero)
			_mm512_store_ps(t->zero, zeros_of(p, group));
		bwd_prepare(kind, values, t->scale, zero, t);
		for (; k < next; k += 16, codes += bytes, sum += 16 * rows) {
			__m512 even[BWD_SMALL], odd[BWD_SMALL];

#pragma GCC unroll 4
			for (int l = 0; l < bytes / 64; l++)
				_mm_prefetch((const char *)codes + SMALL_AHEAD + 64 * l, _MM_HINT_T0);
#pragma GCC unroll 5
			for (int i = 0; i < rows; i++) {
				even[i] = _mm512_load_ps(sum + 16 * i);
				odd[i] = _mm512_setzero_ps();
			}
#pragma GCC unroll 4
			for (int q = 0; q < 4; q++) {
				const uint32_t *word = g + 2 * q * rows;
				__m512i w[2];

				bwd_vectors(kind, codes, t->scale, t, o, q, w);
#pragma GCC unroll 5
				for (int i = 0; i < rows; i++) {
					even[i] = dot_bf16(even[i], w[0], _mm512_set1_epi32((int)word[i]));
					odd[i] = dot_bf16(odd[i], w[1],
							  _mm512_set1_epi32((int)word[rows + i]));
				}
			}
#pragma GCC unroll 5
			for (int i = 0; i < rows; i++)
				_mm512_store_ps(sum + 16 * i, _mm512_add_ps(even[i], odd[i]));
		}
	}
}

#define FUSED(rows, kind)                                                                          \
	NOINLINE void fused_##kind##_##rows(const struct bwd_run *run, int runs,                   \
					    const struct bwd_target *t)                            \
	{                                                                                          \
		fused(rows, kind, run, runs, t);                                                   \
	}
#define FUSEDS(kind)                                                                               \
	FUSED(0, kind)                                                                             \
	FUSED(6, kind)                                                                             \
	FUSED(7, kind)                                                                             \
	FUSED(8, kind)                                                                             \
	FUSED(9, kind)                                                                             \
	FUSED(10, kind)                                                                            \
	FUSED(11, kind)                                                                            \
	FUSED(12, kind)
#define FUSED_NAMES(kind)                                                                          \
	{                                                                                          \
		[0] = fused_##kind##_0, [6] = fused_##kind##_6, [7] = fused_##kind##_7,            \
		[8] = fused_##kind##_8, [9] = fused_##kind##_9, [10] = fused_##kind##_10,          \
		[11] = fused_##kind##_11, [12] = fused_##kind##_12                                 \
	}
#define SMALL(rows, kind)                                                                          \
	NOINLINE void small_##kind##_##rows(const struct moe_coded_panel *p, int64_t k,            \
					    int columns, const uint32_t *g, float *sum,            \
					    struct coded_tables *tables)                           \
	{                                                                                          \
		small(rows, kind, p, k, columns, g, sum, tables);                                  \
	}
#define SMALLS(kind)                                                                               \
	SMALL(1, kind)                                                                             \
	SMALL(2, kind)                                                                             \
	SMALL(3, kind)                                                                             \
	SMALL(4, kind)                                                                             \
	SMALL(5, kind)
#define SMALL_NAMES(kind)                                                                          \
	{                                                                                          \
		NULL, small_##kind##_1, small_##kind##_2, small_##kind##_3, small_##kind##_4,      \
			small_##kind##_5                                                           \
	}

#endif
