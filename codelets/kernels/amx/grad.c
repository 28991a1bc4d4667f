/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/amx/amx.h"
#include "codelets/kernels/amx/tile.h"

#define INLINE static inline __attribute__((always_inline))

/* Pairs of rows whose share of a is transposed at a time: 32 columns take 16 KB of stack. */
#define CHUNK 128
#define STEP 16 /* pairs of rows in a tile */

/* ---- pair arrays [ceil(m/2)][cols][2] ---- */

static inline void pair(int cols, const float *restrict a, float sa, const float *restrict b,
			float sb, uint32_t *restrict to)
{
	for (int j = 0; j < cols; j++)
		to[j] = moe_f32_to_bf16(sa * a[j]) | (uint32_t)moe_f32_to_bf16(sb * b[j]) << 16;
}

static inline void lone(int cols, const float *restrict a, float sa, uint32_t *restrict to)
{
	for (int j = 0; j < cols; j++)
		to[j] = moe_f32_to_bf16(sa * a[j]);
}

void OWN(pairs)(int m, const float *src, int64_t ld, const int32_t *token, const float *scale,
		int cols, void *dst)
{
	uint32_t *to = dst;

	for (int i = 0; i < m; i += 2, to += cols) {
		const float *a = src + (token ? token[i] : i) * ld;
		float sa = scale ? scale[i] : 1.0f;

		if (i + 1 == m)
			lone(cols, a, sa, to);
		else
			pair(cols, a, sa, src + (token ? token[i + 1] : i + 1) * ld,
			     scale ? scale[i + 1] : 1.0f, to);
	}
}

void OWN(pairs_bf16)(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols,
		     void *dst)
{
	uint32_t *restrict to = dst;

	for (int i = 0; i < m; i += 2, to += cols) {
		const uint16_t *a = src + (token ? token[i] : i) * ld;
		const uint16_t *b = i + 1 == m ? NULL : src + (token ? token[i + 1] : i + 1) * ld;

		for (int j = 0; j < cols; j++)
			to[j] = a[j] | (b ? (uint32_t)b[j] << 16 : 0);
	}
}

/* ---- gradients ---- */

/* 16 columns by 16 pairs of rows of a, transposed: a left operand */
typedef uint32_t left[16][16];

/* Columns of a at words `a`, `count` pairs; those that are missing in the last tile are zero. */
static void turn(int count, const uint32_t *a, int64_t lda, left *to)
{
	for (int p = 0; p < count; p += STEP, to++) {
		for (int i = 0; i < STEP; i++) {
			if (p + i < count)
				memcpy((*to)[i], a + (p + i) * lda, sizeof(*to)[i]);
			else
				memset((*to)[i], 0, sizeof(*to)[i]);
		}
		OWN(transpose)(*to);
	}
}

/* The last pairs of 32 (or 16) columns of b as a whole right operand, zeros behind. */
static void fill_up(int count, int cols, const uint32_t *b, int64_t ldb, uint32_t to[STEP][32])
{
	memset(to, 0, STEP * sizeof *to);
	for (int i = 0; i < count; i++)
		memcpy(to[i], b + i * ldb, (size_t)cols * sizeof *b);
}

/* Up to 32 x 32 sums over `count` pairs. sum: tiles [2 of a][2 of b]. */
INLINE void grad_group(const bool rows2, const bool cols2, int count, left a[2][CHUNK / STEP],
		       const uint32_t *b, int64_t ldb, uint32_t sum[2][2][16][16])
{
	uint32_t tail[STEP][32] __attribute__((aligned(64)));
	int64_t stride = ldb * 4;

	amx_zero(0);
	amx_zero(1);
	amx_zero(2);
	amx_zero(3);
	for (int p = 0; p < count; p += STEP, b += STEP * ldb) {
		if (count - p < STEP) {
			fill_up(count - p, cols2 ? 32 : 16, b, ldb, tail);
			b = tail[0];
			stride = sizeof tail[0];
		}
		amx_load(4, a[0][p / STEP], AMX_ROW_BYTES);
		amx_load(6, b, stride);
		amx_dp_bf16(0, 4, 6);
		if (cols2) {
			amx_load(7, b + 16, stride);
			amx_dp_bf16(1, 4, 7);
		}
		if (rows2) {
			amx_load(5, a[1][p / STEP], AMX_ROW_BYTES);
			amx_dp_bf16(2, 5, 6);
		}
		if (rows2 && cols2)
			amx_dp_bf16(3, 5, 7);
	}
	amx_store(0, sum[0][0], AMX_ROW_BYTES);
	amx_store(1, sum[0][1], AMX_ROW_BYTES);
	amx_store(2, sum[1][0], AMX_ROW_BYTES);
	amx_store(3, sum[1][1], AMX_ROW_BYTES);
}

/* c[na <= 32, nb <= 32] (+)= scale * sum */
static void put(int na, int nb, float scale, const float sum[2][2][16][16], float *c, int64_t ldc,
		bool add)
{
	for (int i = 0; i < na; i++)
		for (int h = 0; h < nb; h += 16) {
			const float *restrict from = sum[i / 16][h / 16][i % 16];
			float *restrict to = c + i * ldc + h;
			int n = MOE_MIN(16, nb - h);

			for (int j = 0; j < n; j++)
				to[j] = (add ? to[j] : 0.0f) + scale * from[j];
		}
}

/* 32 columns of a by all of b */
static void grad_rows(int count, left a[2][CHUNK / STEP], int na, const uint32_t *b, int64_t ldb,
		      int nb, float scale, float *c, int64_t ldc, bool add)
{
	union {
		uint32_t word[2][2][16][16];
		float value[2][2][16][16];
	} sum __attribute__((aligned(64)));

	for (int j = 0; j < nb; j += 32) {
		if (na > 16 && nb - j > 16)
			grad_group(true, true, count, a, b + j, ldb, sum.word);
		else if (na > 16)
			grad_group(true, false, count, a, b + j, ldb, sum.word);
		else if (nb - j > 16)
			grad_group(false, true, count, a, b + j, ldb, sum.word);
		else
			grad_group(false, false, count, a, b + j, ldb, sum.word);
		put(na, MOE_MIN(32, nb - j), scale, sum.value, c + j, ldc, add);
	}
}

/* Chunks of pairs outermost: c holds the sums between them. */
void OWN(tile_grad)(int m, const void *a, int64_t lda, int na, const void *b, int64_t ldb, int nb,
		    float scale, float *c, int64_t ldc, enum moe_out out)
{
	left turned[2][CHUNK / STEP] __attribute__((aligned(64)));
	const uint32_t *wa = a, *wb = b;
	struct amx_config config = { .palette = 1 };
	int pairs = (m + 1) / 2, p = 0;

	for (int i = 0; i < 8; i++)
		amx_shape(&config, i, AMX_ROWS, AMX_ROW_BYTES);
	amx_load_config(&config);
	do { /* once even without rows: c is to be written */
		int count = MOE_MIN(CHUNK, pairs - p);

		for (int i = 0; i < na; i += 32) {
			turn(count, wa + p * lda + i, lda, turned[0]);
			if (na - i > 16)
				turn(count, wa + p * lda + i + 16, lda, turned[1]);
			grad_rows(count, turned, MOE_MIN(32, na - i), wb + p * ldb, ldb, nb, scale,
				  c + i * ldc, ldc, p > 0 || out == MOE_OUT_ADD);
		}
		p += CHUNK;
	} while (p < pairs);
	amx_release();
}
