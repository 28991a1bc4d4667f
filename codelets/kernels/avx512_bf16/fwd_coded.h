/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward of up to FUSED_ROWS rows on quantised panels, decoded in registers: for so few rows
 * memory decides, and a decoded panel would be written and read once more. Sums are those of
 * fwd.c's tiles in the same order, so the bits are the same.
 */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_FWD_CODED_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_FWD_CODED_H

#include "codelets/kernels/avx512_bf16/decode.h"

#define FUSED_ROWS 4
#define FUSED_AHEAD 4096 /* bytes from a read to its prefetch, into the next panel at the end */

struct coded_call {
	const struct moe_coded_panel *p;
	const struct moe_fwd_seg *seg;
	int nseg;
	float *y;
	int64_t ldy;
	enum moe_out out;
};

/* One step: 4 vectors of 4 rows n x 8 k against `rows` rows of x */
INLINE void coded_dots(const int rows, __m512 sum[FUSED_ROWS][4], const __m512i w[4],
		       const uint16_t *x)
{
#pragma GCC unroll 4
	for (int i = 0; i < rows; i++) {
		__m512i v = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(x + 8 * i)));

#pragma GCC unroll 4
		for (int j = 0; j < 4; j++)
			sum[i][j] = dot_bf16(sum[i][j], w[j], v);
	}
}

/* The plain segments that follow (LoRA), then the results. */
INLINE void coded_finish(const int rows, const int sets, __m512 sum[2][FUSED_ROWS][4],
			 const struct coded_call *c)
{
	for (int s = 1; s < c->nseg; s++) {
		const uint16_t *x = (const uint16_t *)c->seg[s].x + c->seg[s].col * rows;
		const uint16_t *w = c->seg[s].w;

		for (int step = 0; step < c->seg[s].k / 8; step += sets)
#pragma GCC unroll 2
			for (int t = 0; t < sets; t++, w += 128, x += 8 * rows) {
				__m512i v[4];

#pragma GCC unroll 4
				for (int j = 0; j < 4; j++)
					v[j] = _mm512_load_si512(w + 32 * j);
				coded_dots(rows, sum[t], v, x);
			}
	}
#pragma GCC unroll 4
	for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
		for (int j = 0; j < 4 && sets == 2; j++)
			sum[0][i][j] = _mm512_add_ps(sum[0][i][j], sum[1][i][j]);
		put(c->y + i * c->ldy, fold(sum[0][i]), c->out);
	}
}

INLINE void coded_begin(const int rows, const int sets, __m512 sum[2][FUSED_ROWS][4])
{
#pragma GCC unroll 2
	for (int s = 0; s < sets; s++)
#pragma GCC unroll 4
		for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
			for (int j = 0; j < 4; j++)
				sum[s][i][j] = _mm512_setzero_ps();
}

/* Where a group ends; that of the padding with the last. */
INLINE int64_t coded_end(const struct moe_coded_panel *p, int64_t group, int64_t kp)
{
	return group == p->groups - 1 ? kp : (group + 1) * p->coding->group - p->coding->phase;
}

/* With one row steps take turns: groups must begin at even ones. */
static inline bool coded_even(const struct moe_coded_panel *p)
{
	return p->groups == 1 || (p->coding->group % 16 == 0 && p->coding->phase % 16 == 0);
}

#endif
