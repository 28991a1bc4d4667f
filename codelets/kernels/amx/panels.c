/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/amx/amx.h"
#include "codelets/kernels/amx/tile.h"

#define BLOCK 32 /* columns of bf16 in a row of a tile */

typedef uint32_t words __attribute__((vector_size(64)));

/* Lane j of rows i and i + s after the s x s blocks off the diagonal changed places. */
#define UPPER(j, s) ((j) & (s) ? 16 + (j) - (s) : (j))
#define LOWER(j, s) ((j) & (s) ? 16 + (j) : (j) + (s))
#define LANES(f, s)                                                                                \
	f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s),  \
		f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)
#define EXCHANGE(row, s)                                                                           \
	for (int i = 0; i < 16; i++) {                                                             \
		if (i & (s))                                                                       \
			continue;                                                                  \
		words a = (row)[i], b = (row)[i + (s)];                                            \
		(row)[i] = __builtin_shufflevector(a, b, LANES(UPPER, s));                         \
		(row)[i + (s)] = __builtin_shufflevector(a, b, LANES(LOWER, s));                   \
	}

void OWN(transpose)(uint32_t word[16][16])
{
	words row[16];

	memcpy(row, word, sizeof row);
	EXCHANGE(row, 1)
	EXCHANGE(row, 2)
	EXCHANGE(row, 4)
	EXCHANGE(row, 8)
	memcpy(word, row, sizeof row);
}

/* 32 columns of up to 16 rows as bf16 */
typedef uint16_t block[AMX_ROWS][BLOCK] __attribute__((aligned(64)));

/* The first `count` columns of a row; zeros from have on. */
static inline void row_f32(uint16_t *restrict to, const float *restrict from, int64_t have,
			   int count)
{
	int n = (int)MOE_MIN(MOE_MAX(have, 0), count);

	if (n == BLOCK) { /* constant bounds, for the compiler */
		for (int j = 0; j < BLOCK; j++)
			to[j] = moe_f32_to_bf16(from[j]);
		return;
	}
	for (int j = 0; j < n; j++)
		to[j] = moe_f32_to_bf16(from[j]);
	memset(to + n, 0, (size_t)(count - n) * sizeof *to);
}

static inline void row_bf16(uint16_t *restrict to, const uint16_t *restrict from, int64_t have,
			    int count)
{
	int n = (int)MOE_MIN(MOE_MAX(have, 0), count);

	memcpy(to, from, (size_t)n * sizeof *to);
	memset(to + n, 0, (size_t)(count - n) * sizeof *to);
}

/* [rows][pairs] words to [pairs][rows] */
static void turn_to_pairs(int rows, int pairs, block b, uint16_t *to)
{
	OWN(transpose)((void *)b);
	for (int p = 0; p < pairs; p++)
		memcpy(to + p * rows * 2, b[p], (size_t)rows * 2 * sizeof *to);
}

#define PACK_FWD(row)                                                                              \
	for (int i = 0; i < m; i += AMX_ROWS) {                                                    \
		int rows = MOE_MIN(AMX_ROWS, m - i);                                               \
		uint16_t *to = (uint16_t *)panel + i * width + col * rows;                         \
                                                                                                   \
		for (int64_t c = 0; c < kp; c += BLOCK) {                                          \
			int count = (int)MOE_MIN(BLOCK, kp - c);                                   \
			block b;                                                                   \
                                                                                                   \
			for (int j = 0; j < rows; j++)                                             \
				row(b[j], src + (token ? token[i + j] : i + j) * ld + c, k - c,    \
				    count);                                                        \
			turn_to_pairs(rows, count / 2, b, to + c * rows);                          \
		}                                                                                  \
	}

void OWN(pack_fwd_bf16)(int m, const uint16_t *src, int64_t ld, const int32_t *token, int64_t k,
			int64_t kp, void *panel, int64_t width, int64_t col)
{
	PACK_FWD(row_bf16)
}

void OWN(pack_fwd)(int m, const float *src, int64_t ld, const int32_t *token, int64_t k, int64_t kp,
		   void *panel, int64_t width, int64_t col)
{
	PACK_FWD(row_f32)
}

/* Steps within the panel's blocks: from a column that is an odd multiple of 16, a half first. */
static inline int step(int64_t col, int64_t left)
{
	return (int)MOE_MIN(BLOCK - col % BLOCK, left);
}

void OWN(pack_bwd)(int m, const float *src, int64_t ld, const int32_t *token, int64_t k, int64_t kp,
		   void *panel, int64_t width, int64_t col)
{
	for (int i = 0; i < m; i += AMX_ROWS) {
		int rows = MOE_MIN(AMX_ROWS, m - i), count;

		for (int64_t c = 0; c < kp; c += count) {
			uint16_t *to = (uint16_t *)panel + amx_bwd_at(i, rows, width, col + c);
			int64_t ldp = amx_bwd_ld(width, col + c);

			count = step(col + c, kp - c);
			for (int j = 0; j < rows; j++)
				row_f32(to + j * ldp, src + (token ? token[i + j] : i + j) * ld + c,
					k - c, count);
		}
	}
}

static inline void widen(float *restrict to, const uint16_t *restrict from, int count)
{
	for (int j = 0; j < count; j++)
		to[j] = moe_bf16_to_f32(from[j]);
}

void OWN(unpack_fwd)(int m, const void *panel, int64_t width, int64_t col, int64_t k, float *dst,
		     int64_t ld)
{
	for (int i = 0; i < m; i += AMX_ROWS) {
		int rows = MOE_MIN(AMX_ROWS, m - i);
		const uint16_t *from = (const uint16_t *)panel + i * width + col * rows;

		for (int64_t c = 0; c < k; c += BLOCK) {
			int count = (int)MOE_MIN(BLOCK, k - c);
			block b;

			for (int p = 0; p < (count + 1) / 2; p++)
				memcpy(b[p], from + c * rows + p * rows * 2,
				       (size_t)rows * 2 * sizeof *from);
			OWN(transpose)((void *)b);
			for (int j = 0; j < rows; j++)
				widen(dst + (i + j) * ld + c, b[j], count);
		}
	}
}

void OWN(unpack_bwd)(int m, const void *panel, int64_t width, int64_t col, int64_t k, float *dst,
		     int64_t ld)
{
	for (int i = 0; i < m; i += AMX_ROWS) {
		int rows = MOE_MIN(AMX_ROWS, m - i), count;

		for (int64_t c = 0; c < k; c += count) {
			const uint16_t *from =
				(const uint16_t *)panel + amx_bwd_at(i, rows, width, col + c);
			int64_t ldp = amx_bwd_ld(width, col + c);

			count = step(col + c, k - c);
			for (int j = 0; j < rows; j++)
				widen(dst + (i + j) * ld + c, from + j * ldp, count);
		}
	}
}

void OWN(pack_s8)(int m, const int8_t *src, int64_t ld, int64_t k, int8_t *panel)
{
	for (int i = 0; i < m; i += AMX_ROWS) {
		int rows = MOE_MIN(AMX_ROWS, m - i);

		for (int64_t c = 0; c < k; c += AMX_ROW_BYTES) {
			block b;

			for (int j = 0; j < rows; j++)
				memcpy(b[j], src + (i + j) * ld + c, AMX_ROW_BYTES);
			turn_to_pairs(rows, AMX_ROW_BYTES / 4, b,
				      (uint16_t *)(panel + i * k + c * rows));
		}
	}
}
