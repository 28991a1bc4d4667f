/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Activation panels: forward [k/8][row][8], AVX-512 with the 4 even k first (fma_fwd.h), backward
 * [n][row] (fma_bwd.h).
 */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_PACK_H
#define MOE_CODELETS_KERNELS_FMA_FMA_PACK_H

#include "codelets/kernels/fma/fma_bwd.h"
#include "codelets/kernels/fma/fma_fwd.h"

static int64_t source_row(const int32_t *token, int i)
{
	return token ? token[i] : i;
}

#if VEC_LANES == 16
/* 8 f32 as 4 even and 4 odd ones */
VEC_INLINE void put8(const float *src, float *dst)
{
	__m128 a = _mm_loadu_ps(src), b = _mm_loadu_ps(src + 4);

	_mm_storeu_ps(dst, _mm_shuffle_ps(a, b, 0x88));
	_mm_storeu_ps(dst + 4, _mm_shuffle_ps(a, b, 0xdd));
}

VEC_INLINE void put8_bf16(const uint16_t *src, float *dst)
{
	__m128i v = _mm_loadu_si128((const __m128i *)src);

	_mm_storeu_si128((__m128i *)dst, _mm_slli_epi32(v, 16));
	_mm_storeu_si128((__m128i *)(dst + 4), _mm_and_si128(v, _mm_set1_epi32((int)0xffff0000u)));
}

VEC_INLINE void get8(const float *src, float *dst)
{
	__m128 even = _mm_loadu_ps(src), odd = _mm_loadu_ps(src + 4);

	_mm_storeu_ps(dst, _mm_unpacklo_ps(even, odd));
	_mm_storeu_ps(dst + 4, _mm_unpackhi_ps(even, odd));
}
#else
VEC_INLINE void put8(const float *src, float *dst)
{
	vec_store(dst, vec_load(src));
}

VEC_INLINE void put8_bf16(const uint16_t *src, float *dst)
{
	vec_store(dst, vec_widen(src, 8));
}

VEC_INLINE void get8(const float *src, float *dst)
{
	vec_store(dst, vec_load(src));
}
#endif

/* The loop of both pack_fwd: blocks of 8 columns, the last one padded with zeros. */
#define PACK_FWD(type, put8)                                                                       \
	FMA_EACH_TILE(t, m, FWD_ROWS)                                                              \
	for (int i = 0; i < t.rows; i++) {                                                         \
		const type *row = src + source_row(token, t.row + i) * ld;                         \
		float *dst = (float *)panel + t.row * width + col * t.rows + 8 * i;                \
		int64_t j = 0;                                                                     \
                                                                                                   \
		for (; j + 8 <= k; j += 8)                                                         \
			put8(row + j, dst + j * t.rows);                                           \
		for (; j < kp; j += 8) {                                                           \
			type last[8] = { 0 };                                                      \
                                                                                                   \
			for (int64_t l = j; l < k; l++)                                            \
				last[l - j] = row[l];                                              \
			put8(last, dst + j * t.rows);                                              \
		}                                                                                  \
	}

static void fma_pack_fwd(int m, const float *src, int64_t ld, const int32_t *token, int64_t k,
			 int64_t kp, void *panel, int64_t width, int64_t col)
{
	PACK_FWD(float, put8)
}

static void fma_pack_fwd_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token,
			      int64_t k, int64_t kp, void *panel, int64_t width, int64_t col)
{
	PACK_FWD(uint16_t, put8_bf16)
}

static void fma_unpack_fwd(int m, const void *panel, int64_t width, int64_t col, int64_t k,
			   float *dst, int64_t ld)
{
	FMA_EACH_TILE(t, m, FWD_ROWS)
	for (int i = 0; i < t.rows; i++) {
		const float *src = (const float *)panel + t.row * width + col * t.rows + 8 * i;
		float *row = dst + (t.row + i) * ld;
		int64_t j = 0;

		for (; j + 8 <= k; j += 8)
			get8(src + j * t.rows, row + j);
		if (j < k) {
			float last[8];

			get8(src + j * t.rows, last);
			memcpy(row + j, last, (size_t)(k - j) * sizeof *last);
		}
	}
}

/* Columns j..j+4 of up to 4 rows into dst [4][ld]; rows from `rows` on repeat the last. */
VEC_INLINE void transpose4(const float *const row[4], int64_t j, int rows, float *dst, int ld)
{
	__m128 a = _mm_loadu_ps(row[0] + j), b = _mm_loadu_ps(row[1] + j);
	__m128 c = _mm_loadu_ps(row[2] + j), d = _mm_loadu_ps(row[3] + j);

	_MM_TRANSPOSE4_PS(a, b, c, d);
	if (rows == 4) {
		_mm_storeu_ps(dst, a);
		_mm_storeu_ps(dst + ld, b);
		_mm_storeu_ps(dst + 2 * ld, c);
		_mm_storeu_ps(dst + 3 * ld, d);
		return;
	}
	if (rows > 1) {
		_mm_storel_pi((__m64 *)dst, a);
		_mm_storel_pi((__m64 *)(dst + ld), b);
		_mm_storel_pi((__m64 *)(dst + 2 * ld), c);
		_mm_storel_pi((__m64 *)(dst + 3 * ld), d);
	}
	if (rows & 1) {
		_mm_store_ss(dst + rows - 1, rows > 1 ? _mm_movehl_ps(a, a) : a);
		_mm_store_ss(dst + ld + rows - 1, rows > 1 ? _mm_movehl_ps(b, b) : b);
		_mm_store_ss(dst + 2 * ld + rows - 1, rows > 1 ? _mm_movehl_ps(c, c) : c);
		_mm_store_ss(dst + 3 * ld + rows - 1, rows > 1 ? _mm_movehl_ps(d, d) : d);
	}
}

static void fma_pack_bwd(int m, const float *src, int64_t ld, const int32_t *token, int64_t k,
			 int64_t kp, void *panel, int64_t width, int64_t col)
{
	FMA_EACH_TILE(t, m, BWD_ROWS)
	{
		float *tile = (float *)panel + t.row * width + col * t.rows;

		for (int i = 0; i < t.rows; i += 4) {
			int rows = MOE_MIN(4, t.rows - i);
			const float *row[4];
			int64_t j = 0;

			for (int l = 0; l < 4; l++)
				row[l] = src +
					 ld * source_row(token, t.row + i + MOE_MIN(l, rows - 1));
			for (; j + 4 <= k; j += 4)
				transpose4(row, j, rows, tile + j * t.rows + i, t.rows);
			for (; j < kp; j++)
				for (int l = 0; l < rows; l++)
					tile[j * t.rows + i + l] = j < k ? row[l][j] : 0.0f;
		}
	}
}

static void fma_unpack_bwd(int m, const void *panel, int64_t width, int64_t col, int64_t k,
			   float *dst, int64_t ld)
{
	FMA_EACH_TILE(t, m, BWD_ROWS)
	{
		const float *tile = (const float *)panel + t.row * width + col * t.rows;

		for (int i = 0; i < t.rows; i++)
			for (int64_t j = 0; j < k; j++)
				dst[(t.row + i) * ld + j] = tile[j * t.rows + i];
	}
}

#endif
