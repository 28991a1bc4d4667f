/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backward of a few rows is bound by memory: panels are walked in memory order, 16 columns at a
 * time, and the sums of all columns wait in L1. Up to 3 rows the CPU's own prefetcher is best, if
 * whole panels make one stream (GB/s of 33, m = 1: 33; with 8 KB of each panel 13); beyond, and in
 * parts of panels, instructions fetch 8 KB ahead (22 in either case).
 */
#include "codelets/kernels/avx512_bf16/bwd_coded.h"

#define STEP_BYTES 512	 /* 16 rows n x 16 columns */
#define FETCH_BYTES 8192 /* from a read to its prefetch, in the order of reading */
#define UNAIDED_ROWS 3

/* `steps` times 16 columns of one panel; g is the panel's [8][rows] words */
INLINE void steps_of(const int rows, const bool fetch, int steps, const uint32_t *g,
		     const uint16_t *w, const char *ahead, float *sum)
{
	__m512i first = _mm512_load_si512(avx512_bf16_rows01);
	__m512i second = _mm512_load_si512(avx512_bf16_rows23);

	for (; steps > 0; steps--, w += STEP_BYTES / 2, ahead += STEP_BYTES, sum += 16 * rows) {
		__m512 even[BWD_SMALL], odd[BWD_SMALL];

#pragma GCC unroll 5
		for (int i = 0; i < rows; i++) {
			even[i] = _mm512_load_ps(sum + 16 * i);
			odd[i] = _mm512_setzero_ps();
		}
#pragma GCC unroll 4
		for (int q = 0; q < 4; q++) {
			__m512i w0 = row_pair(w + 32 * q, first), w1 = row_pair(w + 32 * q, second);
			const uint32_t *word = g + 2 * q * rows;

			if (fetch) {
				_mm_prefetch(ahead + 128 * q, _MM_HINT_T1);
				_mm_prefetch(ahead + 128 * q + 64, _MM_HINT_T1);
			}
#pragma GCC unroll 5
			for (int i = 0; i < rows; i++) {
				__m512i v0 = _mm512_set1_epi32((int)word[i]);
				__m512i v1 = _mm512_set1_epi32((int)word[rows + i]);

				even[i] = dot_bf16(even[i], w0, v0);
				odd[i] = dot_bf16(odd[i], w1, v1);
			}
		}
#pragma GCC unroll 5
		for (int i = 0; i < rows; i++)
			_mm512_store_ps(sum + 16 * i, _mm512_add_ps(even[i], odd[i]));
	}
}

typedef void (*steps_fn)(int steps, const uint32_t *g, const uint16_t *w, const char *ahead,
			 float *sum);

#define STEPS(rows, fetch)                                                                         \
	NOINLINE void steps_##rows##_##fetch(int steps, const uint32_t *g, const uint16_t *w,      \
					     const char *ahead, float *sum)                        \
	{                                                                                          \
		steps_of(rows, fetch, steps, g, w, ahead, sum);                                    \
	}
STEPS(1, false)
STEPS(2, false) STEPS(3, false) STEPS(1, true) STEPS(2, true) STEPS(3, true) STEPS(4, true)
	STEPS(5, true) static const steps_fn unaided[] = { NULL, steps_1_false, steps_2_false,
							   steps_3_false };
static const steps_fn fetching[] = { NULL,	   steps_1_true, steps_2_true,
				     steps_3_true, steps_4_true, steps_5_true };

#define PLAIN_COLUMNS 128

/* A quantised segment; sums of `columns` columns */
static void coded_segment(int m, const struct moe_bwd_seg *seg, int columns, const uint32_t *g, float *sum)
{
	struct moe_coded_panel p = seg->coded->first;
	size_t stride = seg->coded->stride;
	int64_t col = seg->coded->col;
	struct coded_tables tables;

	for (int n = 0; n < seg->n; n += 16, g += 8 * m) {
		bwd_small_fn run = avx512_bf16_bwd_small_coded(&p, col, columns, m);

		if (run)
			run(&p, col, columns, g, sum, &tables);
		for (int k = 0, width; !run && k < columns; k += width) {
			_Alignas(64) uint16_t plain[PLAIN_COLUMNS * 16];

			width = MOE_MIN(PLAIN_COLUMNS, columns - k);
			avx512_bf16_decode(&p, col + k, width, plain);
			fetching[m](width / 16, g, plain, (const char *)plain, sum + k * m);
		}
		p.scale += stride;
		p.zero += stride;
		p.codes += stride;
	}
}

void avx512_bf16_bwd_small(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
			   int64_t ldy, enum moe_out out, float *scratch)
{
	int steps = columns / 16, far = MOE_MIN(FETCH_BYTES / STEP_BYTES, steps);
	int near = steps - far;
	const uint16_t *after = seg->after || seg->coded ? seg->after : seg->w + 16 * columns;
	bool whole = moe_packed_stride(columns) == seg->stride;
	steps_fn run = whole && m <= UNAIDED_ROWS ? unaided[m] : fetching[m];

	memset(scratch, 0, (size_t)m * (size_t)columns * sizeof *scratch);
	for (int s = 0; s < nseg; s++) {
		const uint32_t *g = (const uint32_t *)seg[s].g + seg[s].col / 2 * m;
		const uint16_t *w = seg[s].w;

		if (seg[s].coded) {
			coded_segment(m, seg + s, columns, g, scratch);
			continue;
		}
		for (int n = 0; n < seg[s].n; n += 16, g += 8 * m, w += seg[s].stride) {
			const uint16_t *next = n + 16 < seg[s].n ? w + seg[s].stride
					       : s + 1 < nseg	 ? seg[s + 1].w
					       : after		 ? after
								 : w;
			const uint16_t *rest = w + (size_t)near * STEP_BYTES / 2;

			run(near, g, w, (const char *)w + (size_t)far * STEP_BYTES, scratch);
			run(far, g, rest, (const char *)next, scratch + near * 16 * m);
		}
	}
	for (int c = 0; c < steps; c++)
		for (int i = 0; i < m; i++)
			put(y + i * ldy + 16 * c, _mm512_load_ps(scratch + (c * m + i) * 16), out);
}
