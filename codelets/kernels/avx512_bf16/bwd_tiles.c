/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/avx512_bf16/bwd_tiles.h"

#define PIECE_BYTES 1024 /* of a panel: 32 columns */

/* Element 2 k + b: row b (or 2 + b) of the first block's k = 0..7, of the second's 8..15. */
#define ROW(b) 8 * (b)
#define K8(at, b)                                                                                  \
	(at) + ROW(b), (at) + ROW((b) + 1), (at) + 1 + ROW(b), (at) + 1 + ROW((b) + 1),            \
		(at) + 2 + ROW(b), (at) + 2 + ROW((b) + 1), (at) + 3 + ROW(b),                     \
		(at) + 3 + ROW((b) + 1), (at) + 4 + ROW(b), (at) + 4 + ROW((b) + 1),               \
		(at) + 5 + ROW(b), (at) + 5 + ROW((b) + 1), (at) + 6 + ROW(b),                     \
		(at) + 6 + ROW((b) + 1), (at) + 7 + ROW(b), (at) + 7 + ROW((b) + 1)
_Alignas(64) const uint16_t avx512_bf16_rows01[32] = { K8(0, 0), K8(32, 0) };
_Alignas(64) const uint16_t avx512_bf16_rows23[32] = { K8(0, 2), K8(32, 2) };

INLINE void begin(const int rows, const int vectors, __m512 sum[BWD_ROWS][2],
		  const struct bwd_target *t)
{
#pragma GCC unroll 14
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
		for (int j = 0; j < vectors; j++)
			sum[i][j] = t->from ? _mm512_load_ps(t->from + 32 * i + 16 * j)
					    : _mm512_setzero_ps();
}

INLINE void finish(const int rows, const int vectors, __m512 sum[BWD_ROWS][2],
		   const struct bwd_target *t)
{
#pragma GCC unroll 14
	for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
		for (int j = 0; j < vectors; j++)
			put(t->y + i * t->ldy + 16 * j, sum[i][j], t->out);
}

/* One pair of n for all rows */
INLINE void dots(const int rows, const int vectors, __m512 sum[BWD_ROWS][2], __m512i w0, __m512i w1,
		 const uint32_t *g)
{
#pragma GCC unroll 14
	for (int i = 0; i < rows; i++) {
		__m512i v = _mm512_set1_epi32((int)g[i]);

		sum[i][0] = dot_bf16(sum[i][0], w0, v);
		if (vectors == 2)
			sum[i][1] = dot_bf16(sum[i][1], w1, v);
	}
}

/* One pair of n from raw panels, kept if keep is not NULL */
INLINE void raw_dots(const int rows, __m512 sum[BWD_ROWS][2], const uint16_t *w, __m512i order, const uint32_t *g,
		     uint16_t *keep)
{
	__m512i w0 = row_pair(w, order), w1 = row_pair(w + 256, order);

	if (keep) {
		_mm512_store_si512(keep, w0);
		_mm512_store_si512(keep + 32, w1);
	}
	dots(rows, 2, sum, w0, w1, g);
	/* reload the raw rows: there are no registers to keep them in */
	if (rows >= 10)
		__asm__ volatile("" ::: "memory");
}

/* rows x 32 columns, shuffling the raw panels */
INLINE void raw(const int rows, const enum bwd_ahead what, const bool keeps, const struct bwd_run *run, int runs,
		const struct bwd_target *t)
{
	const int lines = what == BWD_NOTHING ? 0 : what == BWD_HALF ? 2 : 4; /* per 4 rows n */
	__m512i first = _mm512_load_si512(avx512_bf16_rows01);
	__m512i second = _mm512_load_si512(avx512_bf16_rows23);
	__m512 sum[BWD_ROWS][2];

	begin(rows, 2, sum, t);
	for (const struct bwd_run *end = run + runs; run < end; run++) {
		const uint32_t *g = run->g;
		const uint16_t *w = run->w;
		const char *ahead = run->ahead;
		uint16_t *keep = keeps ? run->keep : NULL;

		for (int n = 0; n < run->n; n += 16) {
#pragma GCC unroll 4
			for (int q = 0; q < 4; q++) {
				const uint16_t *d = w + 32 * q;

#pragma GCC unroll 4
				for (int l = 0; l < lines; l++)
					_mm_prefetch(ahead + 64 * (q * lines + l), _MM_HINT_T1);
				raw_dots(rows, sum, d, first, g, keeps ? keep : NULL);
				raw_dots(rows, sum, d, second, g + rows, keeps ? keep + 64 : NULL);
				g += 2 * rows;
				keep += keeps ? 128 : 0;
			}
			w += run->stride;
			if (what == BWD_PAIR)
				ahead += n & 16 ? 2 * run->stride - PIECE_BYTES : PIECE_BYTES;
			else
				ahead += 2 * run->stride;
		}
	}
	finish(rows, 2, sum, t);
}

/* rows x 32 columns of a decoded slice */
INLINE void decoded(const int rows, const int lines, const struct bwd_run *run, int runs,
		    const struct bwd_target *t)
{
	__m512 sum[BWD_ROWS][2];

	begin(rows, 2, sum, t);
	for (const struct bwd_run *end = run + runs; run < end; run++) {
		const uint32_t *g = run->g;
		const uint16_t *w = run->w;
		const char *ahead = run->ahead;

		for (int n = 0; n < run->n; n += 16, ahead += 2 * run->stride)
			for (int p = 0; p < 8; p++, w += 64, g += rows) {
				__m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 32);

				if (lines)
					_mm_prefetch(ahead + 64 * p, _MM_HINT_T1);
				dots(rows, 2, sum, w0, w1, g);
			}
	}
	finish(rows, 2, sum, t);
}

/* rows x 16 columns: thin products such as grad_out B, with B's rank as the columns */
INLINE void thin(const int rows, const struct bwd_run *run, int runs, const struct bwd_target *t)
{
	__m512i first = _mm512_load_si512(avx512_bf16_rows01);
	__m512i second = _mm512_load_si512(avx512_bf16_rows23);
	__m512 sum[BWD_ROWS][2];

	begin(rows, 1, sum, t);
	for (const struct bwd_run *end = run + runs; run < end; run++) {
		const uint32_t *g = run->g;
		const uint16_t *w = run->w;

		for (int n = 0; n < run->n; n += 16, w += run->stride)
#pragma GCC unroll 4
			for (int q = 0; q < 4; q++, g += 2 * rows) {
				__m512i w0 = row_pair(w + 32 * q, first);
				__m512i w1 = row_pair(w + 32 * q, second);

				dots(rows, 1, sum, w0, w0, g);
				dots(rows, 1, sum, w1, w1, g + rows);
			}
	}
	finish(rows, 1, sum, t);
}

#define RAW(rows, ahead)                                                                           \
	NOINLINE void raw_##rows##_##ahead(const struct bwd_run *run, int runs,                    \
					   const struct bwd_target *t)                             \
	{                                                                                          \
		raw(rows, ahead, false, run, runs, t);                                             \
	}
#define KEEP(rows)                                                                                 \
	NOINLINE void keep_##rows(const struct bwd_run *run, int runs, const struct bwd_target *t) \
	{                                                                                          \
		raw(rows, BWD_HALF, true, run, runs, t);                                           \
	}
#define DECODED(rows, ahead, lines)                                                                \
	NOINLINE void decoded_##rows##_##ahead(const struct bwd_run *run, int runs,                \
					       const struct bwd_target *t)                         \
	{                                                                                          \
		decoded(rows, lines, run, runs, t);                                                \
	}
#define THIN(rows)                                                                                 \
	NOINLINE void thin_##rows(const struct bwd_run *run, int runs, const struct bwd_target *t) \
	{                                                                                          \
		thin(rows, run, runs, t);                                                          \
	}
#define RAWS(ahead)                                                                                \
	RAW(6, ahead)                                                                              \
	RAW(7, ahead)                                                                              \
	RAW(8, ahead) RAW(9, ahead) RAW(10, ahead) RAW(11, ahead) RAW(12, ahead)
#define RAW_NAMES(ahead)                                                                           \
	{                                                                                          \
		[6] = raw_6_##ahead, [7] = raw_7_##ahead, [8] = raw_8_##ahead,                     \
		[9] = raw_9_##ahead, [10] = raw_10_##ahead, [11] = raw_11_##ahead,                 \
		[12] = raw_12_##ahead                                                              \
	}
#define DECODEDS(ahead, lines)                                                                     \
	DECODED(6, ahead, lines)                                                                   \
	DECODED(7, ahead, lines)                                                                   \
	DECODED(8, ahead, lines)                                                                   \
	DECODED(9, ahead, lines)                                                                   \
	DECODED(10, ahead, lines)                                                                  \
	DECODED(11, ahead, lines)                                                                  \
	DECODED(12, ahead, lines) DECODED(13, ahead, lines) DECODED(14, ahead, lines)
#define DECODED_NAMES(ahead)                                                                       \
	{                                                                                          \
		[6] = decoded_6_##ahead, [7] = decoded_7_##ahead, [8] = decoded_8_##ahead,         \
		[9] = decoded_9_##ahead, [10] = decoded_10_##ahead,                                \
		[11] = decoded_11_##ahead, [12] = decoded_12_##ahead, [13] = decoded_13_##ahead,   \
		[14] = decoded_14_##ahead                                                          \
	}

RAWS(BWD_NOTHING)
RAWS(BWD_HALF)
RAWS(BWD_WHOLE)
RAWS(BWD_PAIR)
const bwd_tile_fn avx512_bf16_bwd_raw[4][BWD_ROWS + 1] = {
	[BWD_NOTHING] = RAW_NAMES(BWD_NOTHING),
	[BWD_HALF] = RAW_NAMES(BWD_HALF),
	[BWD_WHOLE] = RAW_NAMES(BWD_WHOLE),
	[BWD_PAIR] = RAW_NAMES(BWD_PAIR),
};

KEEP(6)
KEEP(7)
KEEP(8)
KEEP(9)
KEEP(10)
KEEP(11)
KEEP(12)
const bwd_tile_fn avx512_bf16_bwd_keep[BWD_ROWS + 1] = {
	[6] = keep_6, [7] = keep_7, [8] = keep_8, [9] = keep_9, [10] = keep_10, [11] = keep_11, [12] = keep_12,
};

DECODEDS(BWD_NOTHING, 0)
DECODEDS(BWD_HALF, 1)
const bwd_tile_fn avx512_bf16_bwd_decoded[2][BWD_ROWS + 1] = {
	[BWD_NOTHING] = DECODED_NAMES(BWD_NOTHING),
	[BWD_HALF] = DECODED_NAMES(BWD_HALF),
};

THIN(6)
THIN(7)
THIN(8) THIN(9) THIN(10) THIN(11) THIN(12) THIN(13)
	THIN(14) const bwd_tile_fn avx512_bf16_bwd_thin[BWD_ROWS + 1] = {
		[6] = thin_6,	[7] = thin_7,	[8] = thin_8,	[9] = thin_9,	[10] = thin_10,
		[11] = thin_11, [12] = thin_12, [13] = thin_13, [14] = thin_14,
	};
