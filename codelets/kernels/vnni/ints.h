/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Integer dot products (packed/ints.h) on AVX-512 with VNNI: 64 bytes of weights are 16 rows n x 4 k, x is 4 bytes of
 * one row, broadcast from memory. Included once each by the folders of tables whose CPUs may have VNNI, in a file of
 * its own that begins with the target pragma; the caller asks int_supported.
 */
#ifndef MOE_CODELETS_KERNELS_VNNI_INTS_H
#define MOE_CODELETS_KERNELS_VNNI_INTS_H

#include "codelets/kernels/packed/ints.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
/*
 * Prefetching, measured on Zen 4 with weights in DRAM: of few rows, bytes come best by the CPU's own prefetcher, which
 * sees one stream; nibbles take instructions that fetch into L1 from the same stream. More rows fetch the next panel
 * into L2 meanwhile.
 */
#define INT_FEW 4
#define INT_AHEAD 2048 /* bytes from codes to their prefetch */
#define INT_RUN_ROWS 2	 /* rows times planes that take runs of panels */
#define INT_RUN_STEPS 4	 /* of a block, which is MOE_INT_LEAST columns: larger pieces gain nothing */

/*
 * sum[lane] += products of 4 unsigned bytes of w and 4 signed ones of x. As asm, because gcc 12 spills around the
 * intrinsic and broadcasts by an instruction of its own.
 */
#define INT_DOT(sum, w, x)                                                                         \
	__asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(x))

struct int_tile {
	const struct moe_int_rows *x;
	const struct moe_coded_panel *p;
	const int32_t *q, *start;
	const float *scale, *sum;
	const char *ahead; /* prefetched at the pace of reading: a line for each of codes, then one per block up to the panel's stride */
	int extra;
	float *y;
	int64_t ldy;
	enum moe_out out;
};

/* Scales (and zeros, in units of u) of a panel, in locals: loops read them once per block. */
struct int_scale {
	const struct moe_coded_panel *p;
	const uint8_t *scale, *zero;
	enum moe_dtype dtype;
	bool late, zeros; /* one scale per row: applied at the end; there are zeros */
	float per_unit;
};

INLINE struct int_scale int_scale_of(const struct int_tile *t)
{
	const struct moe_coded_panel *p = t->p;

	return (struct int_scale){ p,
				   p->scale,
				   p->zero,
				   p->coding->scale,
				   p->groups == 1,
				   p->coding->zero,
				   1 / t->x->codes.unit };
}

/* common: no byte of E8M0 is 0 or 255 */
INLINE __m512 int_scales(const bool common, const struct int_scale *s, int64_t group)
{
	_Alignas(64) float rare[16];
	__m512i b, less;

	if (s->dtype == MOE_BF16)
		return _mm512_castsi512_ps(_mm512_slli_epi32(
			_mm512_cvtepu16_epi32(
				_mm256_loadu_si256((const __m256i *)(s->scale + group * 32))),
			16));
	if (s->dtype == MOE_F32)
		return _mm512_loadu_ps(s->scale + group * 64);
	if (s->dtype == MOE_F16)
		return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(s->scale + group * 32)));
	b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(s->scale + group * 16)));
	less = _mm512_sub_epi32(b, _mm512_set1_epi32(1));
	if (common || __builtin_expect(_mm512_cmplt_epu32_mask(less, _mm512_set1_epi32(254)) == 0xffff, 1))
		return _mm512_castsi512_ps(_mm512_slli_epi32(b, 23));
	moe_coded_scales(s->p, group, rare); /* 0 is subnormal, 255 NaN */
	return _mm512_load_ps(rare);
}

INLINE __m512 int_zeros(const struct int_scale *s, int64_t group)
{
	__m512i z = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(s->zero + group * 16)));

	return _mm512_mul_ps(_mm512_cvtepi32_ps(z), _mm512_set1_ps(s->per_unit));
}

INLINE void int_put(float *y, __m512 v, enum moe_out out)
{
	if (out == MOE_OUT_STREAM)
		_mm512_stream_ps(y, v);
	else
		_mm512_storeu_ps(y, out == MOE_OUT_ADD ? _mm512_add_ps(_mm512_loadu_ps(y), v) : v);
}

/* 8 columns of the 16 rows as unsigned bytes, 4 columns each */
INLINE void int_weights(const enum moe_int_kind kind, __m512i table, const uint8_t *codes,
			__m512i w[2])
{
	const __m512i low = _mm512_set1_epi8(15);

	if (kind == MOE_INT_BYTES) {
		w[0] = _mm512_xor_si512(_mm512_load_si512(codes), table);
		w[1] = _mm512_xor_si512(_mm512_load_si512(codes + 64), table);
		return;
	}
	w[0] = _mm512_and_si512(_mm512_load_si512(codes), low);
	w[1] = _mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(codes), 4), low);
	if (kind == MOE_INT_TABLE) {
		w[0] = _mm512_shuffle_epi8(table, w[0]);
		w[1] = _mm512_shuffle_epi8(table, w[1]);
	}
}

INLINE void int_fetch(const int rows, const enum moe_int_kind kind, const char *p)
{
	if (rows > INT_FEW)
		_mm_prefetch(p, _MM_HINT_T1);
	else if (kind != MOE_INT_BYTES)
		_mm_prefetch(p, _MM_HINT_T0);
}

/* A block's sum of row i, both planes and sets */
INLINE __m512 int_sum(const int rows, const int planes, const bool two,
		      __m512i a[2][MOE_INT_MOST], const int i)
{
	__m512i s = a[0][i];

	if (two)
		s = _mm512_add_epi32(s, a[1][i]);
	if (planes == 2) {
		s = _mm512_add_epi32(_mm512_slli_epi32(s, 7), a[0][rows + i]);
		if (two)
			s = _mm512_add_epi32(s, a[1][rows + i]);
	}
	return _mm512_cvtepi32_ps(s);
}

/* Of many, one row after another: there are no registers for a second set of sums. */
#define INT_ROW(f)                                   \
	do {                                         \
		if (rows * planes > MOE_INT_ROWS)    \
			__asm__ volatile("" : "+v"(f)); \
	} while (0)

/* The last sums of a block, in f32: f += scale x (sums - zero x sum of q) [x weights' scales] */
INLINE void int_end(const bool common, const int rows, const int planes, const bool two, __m512i a[2][MOE_INT_MOST],
		    const struct int_scale *w, int64_t group, const float *scale, const float *sum,
		    __m512 f[MOE_INT_MOST])
{
	const __m512 one = _mm512_set1_ps(1);

	if (w->zeros) {
		__m512 z = int_zeros(w, group), s = w->late ? one : int_scales(common, w, group);

#pragma GCC unroll 16
		for (int i = 0; i < rows; i++) {
			__m512 e = _mm512_fnmadd_ps(z, _mm512_set1_ps(sum[i]),
						    int_sum(rows, planes, two, a, i));

			f[i] = _mm512_fmadd_ps(_mm512_mul_ps(e, s), _mm512_set1_ps(scale[i]), f[i]);
			INT_ROW(f[i]);
		}
	} else if (!w->late) {
		__m512 s = int_scales(common, w, group);

#pragma GCC unroll 16
		for (int i = 0; i < rows; i++) {
			f[i] = _mm512_fmadd_ps(_mm512_mul_ps(int_sum(rows, planes, two, a, i), s),
					       _mm512_set1_ps(scale[i]), f[i]);
			INT_ROW(f[i]);
		}
	} else {
#pragma GCC unroll 16
		for (int i = 0; i < rows; i++) {
			f[i] = _mm512_fmadd_ps(int_sum(rows, planes, two, a, i),
					       _mm512_set1_ps(scale[i]), f[i]);
			INT_ROW(f[i]);
		}
	}
}

/* A few rows have too few sums to hide the latency: two sets of them take turns. */
INLINE void int_rows(const int rows, const int planes, const enum moe_int_kind kind,
		     const struct int_tile *t)
{
	const int v = rows * planes, step = kind == MOE_INT_BYTES ? 128 : 64;
	const bool two = v <= 4;
	const struct moe_int_rows *x = t->x;
	const struct int_scale scales = int_scale_of(t);
	const uint8_t *codes = t->p->codes;
	const int32_t *q = t->q, *start = t->start;
	const float *scale = t->scale, *sum = t->sum;
	const char *ahead = t->ahead;
	const int64_t group_steps = t->p->coding->group / 8, last = t->p->groups - 1;
	const int block = x->block / 8;
	int64_t group = 0, left = (t->p->coding->group - t->p->coding->phase) / 8;
	int extra = t->extra, steps = (int)(x->k / 8);
	__m512i table = kind == MOE_INT_TABLE ? _mm512_broadcast_i32x4(_mm_loadu_si128(
							(const __m128i *)x->codes.table))
					      : _mm512_set1_epi8((char)0x80);
	__m512 f[MOE_INT_MOST], w;

#pragma GCC unroll 16
	for (int i = 0; i < rows; i++)
		f[i] = _mm512_setzero_ps();
	for (; steps > 0; steps -= block) {
		__m512i a[2][MOE_INT_MOST];
		const uint8_t *end = codes + MOE_MIN(block, steps) * step;

#pragma GCC unroll 16
		for (int i = 0; i < v; i++) {
			a[0][i] = _mm512_set1_epi32(start[i]);
			a[1][i] = _mm512_setzero_si512();
		}
		while (codes < end) {
			__m512i b[2];

			int_weights(kind, table, codes, b);
			int_fetch(rows, kind, ahead);
			if (step == 128)
				int_fetch(rows, kind, ahead + 64);
#pragma GCC unroll 16
			for (int i = 0; i < v; i++)
				INT_DOT(a[0][i], b[0], q[i]);
#pragma GCC unroll 16
			for (int i = 0; i < v; i++)
				INT_DOT(a[two][i], b[1], q[v + i]);
			q += 2 * v;
			codes += step;
			ahead += step;
		}
		int_end(false, rows, planes, two, a, &scales, group, scale, sum, f);
		start += v;
		scale += rows;
		sum += rows;
		left -= block;
		if (left <= 0 && group < last) {
			group++;
			left += group_steps;
		}
		if (extra-- > 0) {
			int_fetch(rows, kind, ahead);
			ahead += 64;
		}
	}
	w = scales.late ? int_scales(false, &scales, 0) : _mm512_set1_ps(1);
#pragma GCC unroll 16
	for (int i = 0; i < rows; i++)
		int_put(t->y + i * t->ldy, _mm512_mul_ps(f[i], w), t->out);
}

/* 8 columns for a run of panels: of nibbles, the upper ones 16 times as large */
INLINE void int_run_weights(const enum moe_int_kind kind, __m512i table, const uint8_t *codes, __m512i w[2])
{
	const __m512i low = _mm512_set1_epi8(15);

	if (kind == MOE_INT_TABLE) {
		int_weights(kind, table, codes, w);
		return;
	}
	w[0] = _mm512_and_si512(_mm512_load_si512(codes), low);
	w[1] = _mm512_andnot_si512(low, _mm512_load_si512(codes));
}

/* A run of panels, block by block; f [MOE_RUN][rows]. Panels of the next run are fetched into L2 at the same pace. */
INLINE void int_run(const int rows, const int planes, const enum moe_int_kind kind, const struct int_tile *t,
		    const struct moe_panel_run *run, __m512 *f)
{
	const int v = rows * planes;
	const int64_t stride = run->stride;
	const struct moe_int_rows *x = t->x;
	const struct int_scale scales = int_scale_of(t);
	const uint8_t *codes = t->p->codes;
	const int32_t *q = t->q, *start = t->start;
	const float *scale = t->scale, *sum = t->sum;
	const int64_t group_steps = t->p->coding->group / 8, last = t->p->groups - 1;
	const int64_t ahead = t->ahead - (const char *)codes;
	int64_t group = 0, left = (t->p->coding->group - t->p->coding->phase) / 8;
	__m512i table = kind == MOE_INT_TABLE ? _mm512_broadcast_i32x4(_mm_loadu_si128(
							(const __m128i *)x->codes.table))
					      : _mm512_set1_epi8((char)0x80);

	for (int i = 0; i < MOE_RUN * rows; i++)
		f[i] = _mm512_setzero_ps();
	for (int blocks = x->blocks; blocks > 0; blocks--) {
		struct int_scale of = scales;
		const uint8_t *panel = codes;

		for (__m512 *to = f, *end = f + MOE_RUN * rows; to < end; to += rows, panel += stride) {
			const uint8_t *at = panel;
			const int32_t *qs = q;
			__m512i a[2][MOE_INT_MOST];
			__m512 s[MOE_INT_MOST];

#pragma GCC unroll 2
			for (int i = 0; i < v; i++) {
				a[0][i] = _mm512_set1_epi32(start[i]);
				a[1][i] = _mm512_setzero_si512();
			}
#pragma GCC unroll 4
			for (int j = 0; j < INT_RUN_STEPS; j++, qs += 2 * v, at += 64) {
				__m512i b[2];

				int_run_weights(kind, table, at, b);
				_mm_prefetch((const char *)at + ahead, _MM_HINT_T1);
#pragma GCC unroll 2
				for (int i = 0; i < v; i++)
					INT_DOT(a[0][i], b[0], qs[i]);
#pragma GCC unroll 2
				for (int i = 0; i < v; i++)
					INT_DOT(a[1][i], b[1], qs[v + i]);
			}
#pragma GCC unroll 2
			for (int i = 0; i < v && kind == MOE_INT_NIBBLES; i++)
				a[1][i] = _mm512_srai_epi32(a[1][i], 4);
			_mm_prefetch((const char *)of.scale + group * 32 + ahead, _MM_HINT_T1);
#pragma GCC unroll 2
			for (int i = 0; i < rows; i++)
				s[i] = to[i];
			int_end(true, rows, planes, true, a, &of, group, scale, sum, s);
#pragma GCC unroll 2
			for (int i = 0; i < rows; i++)
				to[i] = s[i];
			of.scale += stride;
			of.zero += stride;
		}
		codes += INT_RUN_STEPS * 64;
		q += 2 * v * INT_RUN_STEPS;
		start += v;
		scale += rows;
		sum += rows;
		left -= INT_RUN_STEPS;
		if (left <= 0 && group < last) {
			group++;
			left += group_steps;
		}
	}
	for (int p = 0; p < MOE_RUN; p++) {
		struct int_scale of = scales;
		__m512 w;

		of.scale += p * stride;
		w = scales.late ? int_scales(true, &of, 0) : _mm512_set1_ps(1);
		for (int i = 0; i < rows; i++)
			int_put(t->y + p * run->step + i * t->ldy, _mm512_mul_ps(f[p * rows + i], w), t->out);
	}
}

typedef void (*int_fn)(const struct int_tile *t);

#define INT_TILE(kind, planes, rows)                                                               \
	NOINLINE void int_##kind##_##planes##_##rows(const struct int_tile *t)                     \
	{                                                                                          \
		int_rows(rows, planes, MOE_INT_##kind, t);                                         \
	}
#define INT_TILES(kind)                                                                            \
	INT_TILE(kind, 1, 1)                                                                       \
	INT_TILE(kind, 1, 2)                                                                       \
	INT_TILE(kind, 1, 3)                                                                       \
	INT_TILE(kind, 1, 4)                                                                       \
	INT_TILE(kind, 1, 5)                                                                       \
	INT_TILE(kind, 1, 6)                                                                       \
	INT_TILE(kind, 1, 7)                                                                       \
	INT_TILE(kind, 1, 8)                                                                       \
	INT_TILE(kind, 1, 9)                                                                       \
	INT_TILE(kind, 1, 10)                                                                      \
	INT_TILE(kind, 2, 1)                                                                       \
	INT_TILE(kind, 2, 2)                                                                       \
	INT_TILE(kind, 2, 3)                                                                       \
	INT_TILE(kind, 2, 4)                                                                       \
	INT_TILE(kind, 2, 5)                                                                       \
	INT_TILE(kind, 2, 6)                                                                       \
	INT_TILE(kind, 2, 7)
#define INT_NAMES(kind, last)                                                                            \
	{                                                                                          \
		{ NULL, int_##kind##_1_1, int_##kind##_1_2, int_##kind##_1_3, int_##kind##_1_4,    \
		  int_##kind##_1_5, int_##kind##_1_6, int_##kind##_1_7, int_##kind##_1_8,          \
		  int_##kind##_1_9, int_##kind##_1_10 },                                           \
			{ NULL, int_##kind##_2_1, int_##kind##_2_2, int_##kind##_2_3,              \
			  int_##kind##_2_4, int_##kind##_2_5, int_##kind##_2_6, int_##kind##_2_7,  \
			  last }                                                                   \
	}

INT_TILES(BYTES)
INT_TILES(NIBBLES)
INT_TILES(TABLE)
INT_TILE(BYTES, 2, 8)
INT_TILE(NIBBLES, 2, 8)

static const int_fn int_tiles[3][2][MOE_INT_ROWS + 1] = {
	INT_NAMES(BYTES, int_BYTES_2_8),
	INT_NAMES(NIBBLES, int_NIBBLES_2_8),
	INT_NAMES(TABLE, NULL), /* spills */
};

static void int_forward(const struct moe_int_rows *x, const struct moe_coded_panel *p,
			const char *next, float *y, int64_t ldy, enum moe_out out)
{
	const char *codes = (const char *)p->codes;
	int64_t head = p->codes - p->scale;
	int first, rows;

	if (out == MOE_OUT_STREAM && ((uintptr_t)y % 64 || ldy % 16))
		out = MOE_OUT_STORE;
	for (int i = 0; (rows = moe_int_tile(x, i, &first)) > 0; i++) {
		struct int_tile t = { x,
				      p,
				      (const int32_t *)(const void *)(x->q + (int64_t)first * x->planes * x->k),
				      x->start + first * x->planes * x->blocks,
				      x->scale + first * x->blocks,
				      x->sum + first * x->blocks,
				      codes,
				      0,
				      y + first * ldy,
				      ldy,
				      out };

		if (i == 0 && (next || rows <= INT_FEW)) {
			t.ahead = rows <= INT_FEW ? codes + INT_AHEAD : next;
			t.extra = (int)(head / 64);
		}
		int_tiles[x->codes.kind][x->planes - 1][rows](&t);
	}
}

typedef void (*int_run_fn)(const struct int_tile *t, const struct moe_panel_run *run, __m512 *f);

#define INT_RUN(kind, planes, rows)                                                                           \
	NOINLINE void int_run_##kind##_##planes##_##rows(const struct int_tile *t, const struct moe_panel_run *run, __m512 *f) \
	{                                                                                                     \
		int_run(rows, planes, MOE_INT_##kind, t, run, f);                                       \
	}
#define INT_RUNS(kind)                                                                                        \
	INT_RUN(kind, 1, 1)                                                                                   \
	INT_RUN(kind, 1, 2)                                                                                   \
	INT_RUN(kind, 2, 1)
#define INT_RUN_NAMES(kind)                                                                                   \
	{                                                                                                     \
		{ NULL, int_run_##kind##_1_1, int_run_##kind##_1_2 }, { NULL, int_run_##kind##_2_1 }          \
	}

INT_RUNS(NIBBLES)
INT_RUNS(TABLE)

static const int_run_fn int_runs[2][2][INT_RUN_ROWS + 1] = { INT_RUN_NAMES(NIBBLES),
								 INT_RUN_NAMES(TABLE) };

/* int_scales' common case in all groups of a run */
static bool int_common(const struct moe_coded_panel *p, int64_t stride)
{
	__mmask64 rare = 0;

	for (int i = 0; i < MOE_RUN && p->coding->scale == MOE_SCALE_UE8M0; i++)
		for (int64_t g = 0; g < p->groups; g += 4) { /* padded to 64 bytes */
			__mmask64 of = _cvtu64_mask64(p->groups - g < 4 ? ~(uint64_t)0 >> (64 - 16 * (p->groups - g)) : ~(uint64_t)0);
			__m512i b = _mm512_load_si512(p->scale + i * stride + 16 * g);

			rare |= _mm512_mask_cmpge_epu8_mask(of, _mm512_sub_epi8(b, _mm512_set1_epi8(1)), _mm512_set1_epi8((char)254));
		}
	return !rare;
}

static bool int_forward_run(const struct moe_int_rows *x, const struct moe_coded_panel *p,
			    const struct moe_panel_run *run)
{
	const char *next = run->next ? run->next : (const char *)p->scale;
	struct int_tile t = { x,
			      p,
			      (const int32_t *)(const void *)x->q,
			      x->start,
			      x->scale,
			      x->sum,
			      next + (p->codes - p->scale),
			      0,
			      run->y,
			      run->ldy,
			      run->out };
	__m512 f[MOE_RUN * INT_RUN_ROWS];

	/* bytes come best in one stream, and so do pieces of 64 columns */
	if (x->block != 8 * INT_RUN_STEPS || x->m * x->planes > INT_RUN_ROWS || x->codes.kind == MOE_INT_BYTES || !int_common(p, run->stride))
		return false;
	if (t.out == MOE_OUT_STREAM && ((uintptr_t)t.y % 64 || t.ldy % 16 || run->step % 16))
		t.out = MOE_OUT_STORE;
	int_runs[x->codes.kind == MOE_INT_TABLE][x->planes - 1][x->m](&t, run, f);
	return true;
}

/* ---- rows of x as integers ---- */

/* 16 integers as bytes, the dwords v apart */
INLINE void int_store(int32_t *q, int v, __m512i all)
{
	__m128i b = _mm512_cvtepi32_epi8(all);

	q[0] = _mm_extract_epi32(b, 0);
	q[v] = _mm_extract_epi32(b, 1);
	q[2 * v] = _mm_extract_epi32(b, 2);
	q[3 * v] = _mm_extract_epi32(b, 3);
}

INLINE float int_largest(int n, const float *x)
{
	const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
	__m512i most = _mm512_setzero_si512();
	int32_t bits;
	float largest;

	for (int k = 0; k < n; k += 16) /* as integers: NaN is the largest */
		most = _mm512_max_epi32(most,
					_mm512_and_si512(_mm512_loadu_si512(x + k), magnitude));
	bits = _mm512_reduce_max_epi32(most);
	memcpy(&largest, &bits, sizeof largest);
	return largest;
}

static void int_block(int rows, int planes, int n, const float *x, int64_t ld, int8_t *bytes,
		      int32_t *sum, float *scale)
{
	float limit = planes == 2 ? MOE_INT_LARGEST2 : MOE_INT_LARGEST;
	int v = rows * planes;

	for (int i = 0; i < rows; i++, x += ld) {
		float largest = int_largest(n, x);
		__m512 inverse = _mm512_set1_ps(largest > MOE_INT_TINY ? limit / largest : 0);
		__m512i low = _mm512_setzero_si512(), high = low;
		int32_t *q = (int32_t *)(void *)bytes + i;

		scale[i] = largest * (1 / limit);
		for (int k = 0; k < n; k += 16, q += 4 * v) {
			__m512i all = _mm512_cvtps_epi32(
				_mm512_mul_ps(_mm512_loadu_ps(x + k), inverse));

			if (planes == 2) {
				__m512i hi = _mm512_srai_epi32(
					_mm512_add_epi32(all, _mm512_set1_epi32(64)), 7);

				int_store(q, v, hi);
				high = _mm512_add_epi32(high, hi);
				all = _mm512_sub_epi32(all, _mm512_slli_epi32(hi, 7));
			}
			int_store(planes == 2 ? q + rows : q, v, all);
			low = _mm512_add_epi32(low, all);
		}
		if (planes == 2)
			sum[i] = _mm512_reduce_add_epi32(high);
		sum[planes == 2 ? rows + i : i] = _mm512_reduce_add_epi32(low);
	}
}

static bool int_supported(void)
{
	static int known; /* 1: no, 2: yes; every thread finds the same */

	if (!__atomic_load_n(&known, __ATOMIC_RELAXED)) {
		__builtin_cpu_init();
		__atomic_store_n(&known, __builtin_cpu_supports("avx512vnni") ? 2 : 1,
				 __ATOMIC_RELAXED);
	}
	return __atomic_load_n(&known, __ATOMIC_RELAXED) == 2;
}

#endif
