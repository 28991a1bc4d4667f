/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = x W^T for one weight panel. A zmm of the panel holds 4 rows n x 8 k; x comes as 8 k of one
 * row, broadcast to the four 128-bit lanes. So a lane sums 4 partial sums of one n, which are
 * folded once, after the last segment. A tile is up to 6 rows of x: [k/8][rows][8] in its panel.
 */
#include "codelets/kernels/avx512_bf16/bf16.h"

#define STEP_BYTES 256 /* a step is 8 k: 4 zmm of weights */

/*
 * What is prefetched into L2 while a tile is computed: all of the next panel or, where several
 * tiles read a panel, half of it by each of the first two. (Hints for L1 cost 20 %: a line that is
 * on its way from DRAM then holds one of few buffers for the whole time.) Up to 5 rows read so fast
 * that the CPU's own prefetcher, which sees one long stream, beats any prefetch instruction.
 * Measured on Zen 4 with weights in DRAM.
 */
enum ahead { AHEAD_NOTHING, AHEAD_HALF, AHEAD_WHOLE };
#define UNAIDED_ROWS 5

/* Consecutive steps of a segment, and the bytes to fetch meanwhile. */
struct run {
	const uint16_t *x, *w;
	int steps;
	const char *ahead;
};

/* A few rows have too few sums to hide the latency: `sets` of them take turns along k. */
INLINE void tile(const int rows, const int sets, const enum ahead ahead, const struct run *run,
		 int runs, float *y, int64_t ldy, enum moe_out out)
{
	const int lines = ahead == AHEAD_NOTHING ? 0 : ahead == AHEAD_HALF ? 2 : 4;
	__m512 sum[2][FWD_ROWS][4];

#pragma GCC unroll 2
	for (int s = 0; s < sets; s++)
#pragma GCC unroll 6
		for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
			for (int j = 0; j < 4; j++)
				sum[s][i][j] = _mm512_setzero_ps();
	for (const struct run *end = run + runs; run < end; run++) {
		const uint16_t *x = run->x, *w = run->w;
		const char *far = run->ahead;

		for (int step = 0; step < run->steps; step += sets)
#pragma GCC unroll 2
			for (int s = 0; s < sets; s++) {
				__m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 32);
				__m512i w2 = _mm512_load_si512(w + 64);
				__m512i w3 = _mm512_load_si512(w + 96);

#pragma GCC unroll 4
				for (int l = 0; l < lines; l++)
					_mm_prefetch(far + 64 * l, _MM_HINT_T1);
#pragma GCC unroll 6
				for (int i = 0; i < rows; i++) {
					__m128i part =
						_mm_loadu_si128((const __m128i *)(x + 8 * i));
					__m512i v = _mm512_broadcast_i32x4(part);

					sum[s][i][0] = dot_bf16(sum[s][i][0], w0, v);
					sum[s][i][1] = dot_bf16(sum[s][i][1], w1, v);
					sum[s][i][2] = dot_bf16(sum[s][i][2], w2, v);
					sum[s][i][3] = dot_bf16(sum[s][i][3], w3, v);
				}
				w += STEP_BYTES / 2;
				x += 8 * rows;
				far += 64 * lines;
			}
	}
#pragma GCC unroll 6
	for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
		for (int j = 0; j < 4 && sets == 2; j++)
			sum[0][i][j] = _mm512_add_ps(sum[0][i][j], sum[1][i][j]);
		put(y + i * ldy, fold(sum[0][i]), out);
	}
}

typedef void (*tile_fn)(const struct run *run, int runs, float *y, int64_t ldy, enum moe_out out);

#define TILE(rows, sets, ahead)                                                                    \
	NOINLINE void tile_##rows##_##ahead(const struct run *run, int runs, float *y,             \
					    int64_t ldy, enum moe_out out)                         \
	{                                                                                          \
		tile(rows, sets, ahead, run, runs, y, ldy, out);                                   \
	}
#define TILES(ahead)                                                                               \
	TILE(1, 2, ahead)                                                                          \
	TILE(2, 1, ahead) TILE(3, 1, ahead) TILE(4, 1, ahead) TILE(5, 1, ahead) TILE(6, 1, ahead)
#define TILE_NAMES(ahead)                                                                          \
	{                                                                                          \
		NULL, tile_1_##ahead, tile_2_##ahead, tile_3_##ahead, tile_4_##ahead,              \
			tile_5_##ahead, tile_6_##ahead                                             \
	}

TILES(AHEAD_NOTHING)
TILES(AHEAD_HALF)
TILES(AHEAD_WHOLE)

static const tile_fn tile_of[][FWD_ROWS + 1] = {
	[AHEAD_NOTHING] = TILE_NAMES(AHEAD_NOTHING),
	[AHEAD_HALF] = TILE_NAMES(AHEAD_HALF),
	[AHEAD_WHOLE] = TILE_NAMES(AHEAD_WHOLE),
};

static struct run run_of(const struct moe_fwd_seg *seg, int row, int rows)
{
	const uint16_t *x = (const uint16_t *)seg->x + row * seg->width + seg->col * rows;

	/* prefetching what is just being read costs next to nothing */
	return (struct run){ x, seg->w, seg->k / 8, (const char *)seg->w };
}

/* Of the t-th tile that prefetches at all */
static enum ahead ahead_of(const struct tiles *tiles, int t, int m, const uint16_t *next)
{
	if (!next || m <= UNAIDED_ROWS || t >= 2)
		return AHEAD_NOTHING;
	return tiles->count == 1 ? AHEAD_WHOLE : AHEAD_HALF;
}

void avx512_bf16_fwd_from(int first, int m, const struct moe_fwd_seg *seg, int nseg,
			  const uint16_t *next, float *y, int64_t ldy, enum moe_out out)
{
	struct tiles tiles = fwd_tiles(m);

	MOE_ASSERT(nseg > 0 && nseg <= MOE_MAX_SEGS);
	out = out_mode(out, y, ldy);
	for (int t = 0, row = 0, rows; t < tiles.count; t++, row += rows) {
		enum ahead ahead = ahead_of(&tiles, t - first, m, next);
		struct run run[MOE_MAX_SEGS];

		rows = tile_rows(&tiles, t);
		if (t < first)
			continue;
		for (int s = 0; s < nseg; s++)
			run[s] = run_of(seg + s, row, rows);
		if (ahead != AHEAD_NOTHING)
			run[0].ahead = (const char *)(next + (size_t)(t - first) * (size_t)seg->k * 8);
		tile_of[ahead][rows](run, nseg, y + row * ldy, ldy, out);
	}
}

void avx512_bf16_fwd(int m, const struct moe_fwd_seg *seg, int nseg, const uint16_t *next, float *y,
		     int64_t ldy, enum moe_out out)
{
	avx512_bf16_fwd_from(0, m, seg, nseg, next, y, ldy, out);
}
