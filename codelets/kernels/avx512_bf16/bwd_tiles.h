/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Micro-kernels of the backward, y = g W: the rows of a weight panel are paired by a shuffle
 * (n, n + 1 for 16 columns: one per zmm of weights), g comes as words of two n, broadcast. Every
 * column of y is summed in the order of n, whichever kernel does it.
 */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_BWD_TILES_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_BWD_TILES_H

#include "codelets/kernels/avx512_bf16/bf16.h"

/* n rows of one segment, for one tile. */
struct bwd_run {
	const uint32_t *g; /* [n/2][rows] */
	const uint16_t *w; /* first panel at the first column; decoded: [n/2][32][2] */
	int64_t stride;	   /* elements between panels */
	int n;
	const char *ahead; /* what to prefetch at the same stride, to be read next */
	const struct bwd_codes *coded; /* to be decoded into w (bwd_coded.h); NULL: done, or plain */
	uint16_t *keep; /* of avx512_bf16_bwd_keep: where the decoded slice goes */
};

/* Where sums begin ([rows][32], NULL: at zero) and end. */
struct bwd_target {
	const float *from;
	float *y;
	int64_t ldy;
	enum moe_out out;
	struct coded_tables *tables; /* memory of tiles that decode */
};

/*
 * What to prefetch per panel: none, half or all of the 1 KB of the next slice; decoded slices take at
 * most half. BWD_PAIR: 1 KB too, but the two KB of a pair of slices from every second panel, since
 * memory gives longer runs faster.
 */
enum bwd_ahead { BWD_NOTHING, BWD_HALF, BWD_WHOLE, BWD_PAIR };

typedef void (*bwd_tile_fn)(const struct bwd_run *run, int runs, const struct bwd_target *t);

/* rows x 32 columns of raw panels (6..12 rows) and of a decoded slice (6..14), by rows */
extern const bwd_tile_fn avx512_bf16_bwd_raw[4][BWD_ROWS + 1];
extern const bwd_tile_fn avx512_bf16_bwd_decoded[2][BWD_ROWS + 1];
/* raw panels with BWD_HALF (6..12 rows), which leaves the decoded slice to others */
extern const bwd_tile_fn avx512_bf16_bwd_keep[BWD_ROWS + 1];
/* rows x 16 columns of raw panels (6..14 rows) */
extern const bwd_tile_fn avx512_bf16_bwd_thin[BWD_ROWS + 1];

/* bwd_small.c: up to BWD_SMALL rows; scratch [columns/16][m][16] floats */
void avx512_bf16_bwd_small(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
			   int64_t ldy, enum moe_out out, float *scratch);

/* Word k of a shuffled vector: rows 0, 1 (2, 3) of 4 at column k of 16. */
extern const uint16_t avx512_bf16_rows01[32], avx512_bf16_rows23[32];

/* Row pairs 2 h, 2 h + 1 of the 4 rows at w, for the 16 columns of two neighbouring blocks. */
INLINE __m512i row_pair(const uint16_t *w, __m512i order)
{
	return _mm512_permutex2var_epi16(_mm512_load_si512(w), order, _mm512_load_si512(w + 128));
}

#endif
