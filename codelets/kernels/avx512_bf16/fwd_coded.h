/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on quantised panels: the first tile of rows decodes in registers, multiplies, and leaves what it decoded to
 * the other tiles in a buffer. Decoding hides under multiplying; as a pass of its own it would cost as much as five
 * rows. Sums are those of fwd.c's tiles in the same order, so the bits are the same.
 *
 * Tiles of up to FEW_ROWS rows have registers for the tables. Larger ones read them from memory: struct coded_tables,
 * in the caller's frame.
 */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_FWD_CODED_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_FWD_CODED_H

#include "codelets/kernels/avx512_bf16/decode.h"

#define FEW_ROWS 4	 /* also the fewest rows of a tile that others follow */
#define FUSED_AHEAD 4096 /* bytes from a read to its prefetch, into the next panel at the end */

struct coded_call {
	const struct moe_coded_panel *p;
	const struct moe_fwd_seg *seg;
	int nseg;
	float *y;
	int64_t ldy;
	enum moe_out out;
	struct coded_tables *tables;
	uint16_t *keep; /* the decoded panel */
};
typedef void (*coded_fn)(const struct coded_call *c);

/* fwd_coded_vbmi.c: the tile of FP8, or NULL where the panel's rows have different scales */
coded_fn avx512_bf16_fwd_magnitudes(int rows, bool keep, const struct moe_coded_panel *p);

INLINE __m512i coded_x(const uint16_t *x)
{
	return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)x));
}

/* One step: 4 vectors of 4 rows n x 8 k against `rows` rows of x */
INLINE void coded_dots(const int rows, __m512 sum[FWD_ROWS][4], const __m512i w[4],
		       const uint16_t *x)
{
#pragma GCC unroll 6
	for (int i = 0; i < rows; i++) {
		__m512i v = coded_x(x + 8 * i);

#pragma GCC unroll 4
		for (int j = 0; j < 4; j++)
			sum[i][j] = dot_bf16(sum[i][j], w[j], v);
	}
}

/* One of the 4 vectors. Nothing that was read stays in registers: there are none. */
INLINE void coded_dot(const int rows, __m512 sum[FWD_ROWS][4], const int j, __m512i w,
		      const uint16_t *x)
{
#pragma GCC unroll 6
	for (int i = 0; i < rows; i++)
		sum[i][j] = dot_bf16(sum[i][j], w, coded_x(x + 8 * i));
	__asm__ volatile("" ::: "memory");
}

/* The plain segments that follow (LoRA), then the results. */
INLINE void coded_finish(const int rows, const int sets, __m512 sum[2][FWD_ROWS][4],
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
#pragma GCC unroll 6
	for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
		for (int j = 0; j < 4 && sets == 2; j++)
			sum[0][i][j] = _mm512_add_ps(sum[0][i][j], sum[1][i][j]);
		put(c->y + i * c->ldy, fold(sum[0][i]), c->out);
	}
}

INLINE void coded_begin(const int rows, const int sets, __m512 sum[2][FWD_ROWS][4])
{
#pragma GCC unroll 2
	for (int s = 0; s < sets; s++)
#pragma GCC unroll 6
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
