/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on quantised panels: the first tile of rows decodes in registers, multiplies, and leaves what it decoded to
 * the other tiles in a buffer. Decoding hides under multiplying; as a pass of its own it would cost as much as five
 * rows. Sums are those of fwd.c's tiles in the same order, so the bits are the same.
 *
 * Tiles of up to FEW_ROWS rows have registers for the tables. Larger ones keep them in memory: struct coded_tables, in
 * the caller's frame.
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

/* fwd_units.c: the tile for more than FEW_ROWS rows, or NULL */
coded_fn avx512_bf16_fwd_units(int rows, bool keep, const struct moe_coded_panel *p);
/*
 * fwd_coded_vbmi.c, FP8: the tile, or NULL where the panel's rows have different scales, and for up to FEW_ROWS rows that
 * no others follow; those come in runs, struct moe_tiles.fwd_coded_run.
 */
coded_fn avx512_bf16_fwd_magnitudes(int rows, bool keep, const struct moe_coded_panel *p);
int64_t avx512_bf16_fwd_magnitudes_run(int rows, const struct coded_call *c, int64_t count, const struct moe_panel_run *run);

INLINE __m512i coded_x(const uint16_t *x)
{
	return lanes(x);
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

/*
 * Vectors that tiles of more than FEW_ROWS rows read again and again, as they have no registers left: behind a
 * pointer that the compiler does not know, for it would keep them on the stack.
 */
struct fwd_orders {
	_Alignas(64) uint64_t word[8], shift[8], low[8], row[8]; /* of 4 bits */
	uint64_t halves[8];					  /* of 8-bit integers */
	uint32_t blocks[2][16];					  /* of FP8: rows 8 h .. */
	uint64_t sign[8];
	uint16_t twice[8][32]; /* i: 2 i for 16 words, 2 i + 1 for 16 */
};
#define WORDS16(i) (i), (i), (i), (i), (i), (i), (i), (i), (i), (i), (i), (i), (i), (i), (i), (i)
#define WORDS32(i) { WORDS16(2 * (i)), WORDS16(2 * (i) + 1) }
static const struct fwd_orders fwd_constants = {
	.word = { 0x8003800280018000, 0x8003800280018000, 0x8007800680058004, 0x8007800680058004,
		  0x800b800a80098008, 0x800b800a80098008, 0x800f800e800d800c, 0x800f800e800d800c },
	.shift = { 0, 0x0004000400040004, 0, 0x0004000400040004, 0, 0x0004000400040004, 0, 0x0004000400040004 },
	.low = { 0x000f000f000f000f, 0x000f000f000f000f, 0x000f000f000f000f, 0x000f000f000f000f,
		 0x000f000f000f000f, 0x000f000f000f000f, 0x000f000f000f000f, 0x000f000f000f000f },
	.row = { 0, 0, 0x0010001000100010, 0x0010001000100010, 0x0020002000200020, 0x0020002000200020,
		 0x0030003000300030, 0x0030003000300030 },
	.halves = { 0, 4, 1, 5, 2, 6, 3, 7 },
	.blocks = { { 0, 16, 4, 20, 1, 17, 5, 21, 2, 18, 6, 22, 3, 19, 7, 23 },
		    { 8, 24, 12, 28, 9, 25, 13, 29, 10, 26, 14, 30, 11, 27, 15, 31 } },
	.sign = { 0x8080808080808080, 0x8080808080808080, 0x8080808080808080, 0x8080808080808080,
		  0x8080808080808080, 0x8080808080808080, 0x8080808080808080, 0x8080808080808080 },
	.twice = { WORDS32(0), WORDS32(1), WORDS32(2), WORDS32(3), WORDS32(4), WORDS32(5), WORDS32(6), WORDS32(7) },
};

INLINE const struct fwd_orders *fwd_orders(void)
{
	const struct fwd_orders *o = &fwd_constants;

	__asm__("" : "+r"(o));
	return o;
}

/* One step; nothing that was read stays in registers. */
INLINE void coded_step(const int rows, __m512 sum[FWD_ROWS][4], const __m512i w[4], const uint16_t *x,
		       const bool keep, uint16_t *kept)
{
#pragma GCC unroll 4
	for (int j = 0; keep && j < 4; j++)
		_mm512_store_si512(kept + 32 * j, w[j]);
	coded_dots(rows, sum, w, x);
	__asm__ volatile("" ::: "memory");
}

/* The plain segments that follow (LoRA), whose panel lies `elements` behind the call's first, then the results, to y. */
INLINE void coded_finish(const int rows, const int sets, __m512 sum[2][FWD_ROWS][4],
			 const struct coded_call *c, int64_t elements, float *y)
{
	for (int s = 1; s < c->nseg; s++) {
		const uint16_t *x = (const uint16_t *)c->seg[s].x + c->seg[s].col * rows;
		const uint16_t *w = c->seg[s].w + elements;

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
		put(y + i * c->ldy, fold(sum[0][i]), c->out);
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
	return moe_groups_at(p, 16);
}

#endif
