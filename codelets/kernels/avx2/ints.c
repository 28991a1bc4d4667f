/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Integer dot products (packed/ints.h) by vpmaddubsw, which saturates sums of two products at 16
 * bits. None gets there: bytes are multiplied by magnitude, with the sign moved to x (2 x 128 x
 * 127), nibbles are at most 24, and two of their sums are added before they are widened (4 x 24 x
 * 127).
 */
#include "codelets/kernels/avx2/ints.h"
#include "codelets/kernels/fma/vec_int.h"

#define NOINLINE static __attribute__((noinline))
#define FEW 4	   /* rows times planes: all 16 columns fit into registers; more take 8 at a time */
#define AHEAD 2048 /* bytes from a read of few rows to its prefetch */

/* Of the columns that are worked on: the weights' scales and zeros (in units of u) of a block, and
 * f32 sums */
struct int_sums {
	float w[16], zero[16];
	float f[MOE_INT_ROWS][16];
};

/* What loops need beside sums lies in memory: those take the registers. */
struct int_tile {
	__m256i ones, nibble, values; /* 16-bit 1, 8-bit 15, the table of codes */
	const struct moe_int_rows *x;
	const struct moe_coded_panel *p;
	struct int_sums *sums;
	const int32_t *q, *start;
	const float *scale, *sum;
	const char *ahead; /* prefetched at the pace of reading */
	float *y;
	int64_t ldy;
	enum moe_out out;
};

static void read_scales(const struct moe_coded_panel *p, int64_t group, float unit,
			struct int_sums *s)
{
	vec_scales(p, group, s->w);
	if (!p->coding->zero)
		return;
	for (int i = 0; i < 16; i += 8) {
		__m128i z =
			_mm_loadl_epi64((const __m128i *)(const void *)(p->zero + group * 16 + i));

		vec_store(s->zero + i,
			  vec_mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(z)), vec_set1(1 / unit)));
	}
}

/* f += scale x (sums - zero x sum of q) [x weights' scales] */
VEC_INLINE void end_block(const int rows, const int planes, const int halves,
			  __m256i a[2][MOE_INT_ROWS], const bool zeros, const bool late, int n,
			  const float *scale, const float *sum, struct int_sums *s)
{
	for (int h = 0; h < halves; h++) {
		vec w = vec_load(s->w + n + 8 * h), z = vec_load(s->zero + n + 8 * h);

#pragma GCC unroll 10
		for (int i = 0; i < rows; i++) {
			float *to = s->f[i] + n + 8 * h;
			__m256i all = a[h][i];
			vec e;

			if (planes == 2)
				all = _mm256_add_epi32(_mm256_slli_epi32(all, 7), a[h][rows + i]);
			e = _mm256_cvtepi32_ps(all);
			if (zeros)
				e = _mm256_fnmadd_ps(z, vec_set1(sum[i]), e);
			if (!late)
				e = vec_mul(e, w);
			vec_store(to, _mm256_fmadd_ps(e, vec_set1(scale[i]), vec_load(to)));
			VEC_RELOAD();
		}
	}
}

/* 4 columns of k: 8 (or 2 x 8) rows of the weight. As asm, because gcc 12 reads x far ahead, and
 * spills. */
VEC_INLINE void dot_bytes(const int v, const int halves, const struct int_tile *t,
			  const uint8_t *codes, const int32_t *q, __m256i a[2][MOE_INT_ROWS])
{
	__m256i w[2], size[2], d;

	for (int h = 0; h < halves; h++) {
		w[h] = ivec_load(codes + 32 * h);
		size[h] = _mm256_abs_epi8(w[h]);
	}
#pragma GCC unroll 10
	for (int i = 0; i < v; i++)
		for (int h = 0; h < halves; h++)
			__asm__("vpbroadcastd %2, %1\n\t"
				"vpsignb %3, %1, %1\n\t"
				"vpmaddubsw %1, %4, %1\n\t"
				"vpmaddwd %5, %1, %1\n\t"
				"vpaddd %1, %0, %0"
				: "+x"(a[h][i]), "=&x"(d)
				: "m"(q[i]), "x"(w[h]), "x"(size[h]), "m"(t->ones));
}

/* 8 columns of k */
VEC_INLINE void dot_nibbles(const bool table, const int v, const int halves,
			    const struct int_tile *t, const uint8_t *codes, const int32_t *q,
			    __m256i a[2][MOE_INT_ROWS])
{
	__m256i left[2], right[2], d, e;

	for (int h = 0; h < halves; h++) {
		__m256i w = ivec_load(codes + 32 * h);

		left[h] = _mm256_and_si256(w, t->nibble);
		right[h] = _mm256_and_si256(_mm256_srli_epi16(w, 4), t->nibble);
		if (table) {
			left[h] = _mm256_shuffle_epi8(t->values, left[h]);
			right[h] = _mm256_shuffle_epi8(t->values, right[h]);
		}
	}
#pragma GCC unroll 10
	for (int i = 0; i < v; i++)
		for (int h = 0; h < halves; h++)
			__asm__("vpbroadcastd %3, %1\n\t"
				"vpbroadcastd %4, %2\n\t"
				"vpmaddubsw %1, %5, %1\n\t"
				"vpmaddubsw %2, %6, %2\n\t"
				"vpaddw %2, %1, %1\n\t"
				"vpmaddwd %7, %1, %1\n\t"
				"vpaddd %1, %0, %0"
				: "+x"(a[h][i]), "=&x"(d), "=&x"(e)
				: "m"(q[i]), "m"(q[v + i]), "x"(left[h]), "x"(right[h]),
				  "m"(t->ones));
}

VEC_INLINE void prefetch(const int v, const char *p)
{
	if (v > FEW)
		vec_prefetch_l2(p);
	else
		vec_prefetch_l1(p);
}

/* Rows n .. n + 8 halves of the weight, all of k; t->ahead only with the first ones */
VEC_INLINE void int_columns(const int rows, const int planes, const int halves,
			    const enum moe_int_kind kind, const struct int_tile *t, int n)
{
	const int v = rows * planes, step = kind == MOE_INT_BYTES ? 128 : 64;
	const struct moe_int_rows *x = t->x;
	const struct moe_coding *c = t->p->coding;
	struct int_sums *s = t->sums;
	const uint8_t *codes = t->p->codes + 4 * n;
	const int32_t *q = t->q, *start = t->start;
	const float *scale = t->scale, *sum = t->sum;
	const char *ahead = t->ahead;
	const bool zeros = c->zero, late = t->p->groups == 1;
	const int64_t last = t->p->groups - 1;
	const int block = x->block / 8;
	int64_t group = 0, left = (c->group - c->phase) / 8;

	read_scales(t->p, 0, x->codes.unit, s);
	for (int steps = (int)(x->k / 8); steps > 0; steps -= block) {
		const uint8_t *end = codes + MOE_MIN(block, steps) * step;
		__m256i a[2][MOE_INT_ROWS];

		for (int h = 0; h < halves; h++)
#pragma GCC unroll 10
			for (int i = 0; i < v; i++)
				a[h][i] = kind == MOE_INT_BYTES ? _mm256_setzero_si256()
								: _mm256_set1_epi32(start[i]);
		for (; codes < end; codes += step, ahead += step, q += 2 * v) {
			VEC_RELOAD();
			prefetch(v, ahead);
			if (kind == MOE_INT_BYTES) {
				prefetch(v, ahead + 64);
				dot_bytes(v, halves, t, codes, q, a);
				dot_bytes(v, halves, t, codes + 64, q + v, a);
			} else {
				dot_nibbles(kind == MOE_INT_TABLE, v, halves, t, codes, q, a);
			}
		}
		end_block(rows, planes, halves, a, zeros, late, n, scale, sum, s);
		start += v;
		scale += rows;
		sum += rows;
		left -= block;
		if (left <= 0 && group < last) {
			read_scales(t->p, ++group, x->codes.unit, s);
			left += c->group / 8;
		}
	}
}

static void put(int rows, const struct int_tile *t)
{
	const struct int_sums *s = t->sums;

	for (int i = 0; i < rows; i++)
		for (int n = 0; n < 16; n += 8) {
			float *y = t->y + i * t->ldy + n;
			vec v = vec_load(s->f[i] + n);

			if (t->p->groups == 1)
				v = vec_mul(v, vec_load(s->w + n));
			if (t->out == MOE_OUT_STREAM)
				vec_stream(y, v);
			else
				vec_store(y, t->out == MOE_OUT_ADD ? vec_add(vec_load(y), v) : v);
		}
}

VEC_INLINE void int_rows(const int rows, const int planes, const enum moe_int_kind kind,
			 const struct int_tile *t)
{
	memset(t->sums->f, 0, (size_t)rows * sizeof *t->sums->f);
	if (rows * planes <= FEW)
		int_columns(rows, planes, 2, kind, t, 0);
	for (int n = 0; rows * planes > FEW && n < 16; n += 8)
		int_columns(rows, planes, 1, kind, t, n);
	put(rows, t);
}

typedef void (*int_fn)(const struct int_tile *t);

#define TILE(kind, planes, rows)                                                                   \
	NOINLINE void int_##kind##_##planes##_##rows(const struct int_tile *t)                     \
	{                                                                                          \
		int_rows(rows, planes, MOE_INT_##kind, t);                                         \
	}
#define TILES(kind)                                                                                \
	TILE(kind, 1, 1)                                                                           \
	TILE(kind, 1, 2)                                                                           \
	TILE(kind, 1, 3)                                                                           \
	TILE(kind, 1, 4)                                                                           \
	TILE(kind, 1, 5)                                                                           \
	TILE(kind, 1, 6)                                                                           \
	TILE(kind, 1, 7)                                                                           \
	TILE(kind, 1, 8)                                                                           \
	TILE(kind, 1, 9)                                                                           \
	TILE(kind, 1, 10)                                                                          \
	TILE(kind, 2, 1)                                                                           \
	TILE(kind, 2, 2)                                                                           \
	TILE(kind, 2, 3)                                                                           \
	TILE(kind, 2, 4)                                                                           \
	TILE(kind, 2, 5)
#define NAMES(kind)                                                                                \
	{                                                                                          \
		{ NULL,                                                                            \
		  int_##kind##_1_1,                                                                \
		  int_##kind##_1_2,                                                                \
		  int_##kind##_1_3,                                                                \
		  int_##kind##_1_4,                                                                \
		  int_##kind##_1_5,                                                                \
		  int_##kind##_1_6,                                                                \
		  int_##kind##_1_7,                                                                \
		  int_##kind##_1_8,                                                                \
		  int_##kind##_1_9,                                                                \
		  int_##kind##_1_10 },                                                             \
		{                                                                                  \
			NULL, int_##kind##_2_1, int_##kind##_2_2, int_##kind##_2_3,                \
				int_##kind##_2_4, int_##kind##_2_5                                 \
		}                                                                                  \
	}

TILES(BYTES)
TILES(NIBBLES)
TILES(TABLE)

static const int_fn tiles[3][2][MOE_INT_ROWS + 1] = { NAMES(BYTES), NAMES(NIBBLES), NAMES(TABLE) };

void avx2_fwd_ints(const struct moe_int_rows *x, const struct moe_coded_panel *p, const char *next,
		   float *y, int64_t ldy, enum moe_out out)
{
	const __m128i *table = (const __m128i *)(const void *)x->codes.table;
	struct int_sums sums;
	int first, rows;

	if (out == MOE_OUT_STREAM && ((uintptr_t)y % 32 || ldy % 8))
		out = MOE_OUT_STORE;
	for (int i = 0; (rows = moe_int_tile(x, i, &first)) > 0; i++) {
		int64_t at = (int64_t)first * x->planes;
		struct int_tile t = { .ones = _mm256_set1_epi16(1),
				      .nibble = _mm256_set1_epi8(15),
				      .values = _mm256_broadcastsi128_si256(_mm_loadu_si128(table)),
				      .x = x,
				      .p = p,
				      .sums = &sums,
				      .q = (const int32_t *)(const void *)(x->q + at * x->k),
				      .start = x->start + at * x->blocks,
				      .scale = x->scale + first * x->blocks,
				      .sum = x->sum + first * x->blocks,
				      .ahead = (const char *)p->codes,
				      .y = y + first * ldy,
				      .ldy = ldy,
				      .out = out };

		if (rows * x->planes <= FEW)
			t.ahead += AHEAD;
		else if (i == 0 && next)
			t.ahead = next;
		tiles[x->codes.kind][x->planes - 1][rows](&t);
	}
}

/* ---- rows of x as integers ---- */

/* 8 integers as bytes, the two dwords v apart */
static void store8(int32_t *q, int v, __m256i all)
{
	const __m256i low =
		_mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4,
				 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);

	all = _mm256_shuffle_epi8(all, low);
	q[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(all));
	q[v] = _mm_cvtsi128_si32(_mm256_extracti128_si256(all, 1));
}

static int32_t reduce_add(__m256i v)
{
	__m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

	s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
	return _mm_cvtsi128_si32(s) + _mm_extract_epi32(s, 1);
}

static float largest_of(int n, const float *x)
{
	const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
	__m256i most = _mm256_setzero_si256();
	int32_t lane[8], bits = 0;
	float largest;

	for (int k = 0; k < n; k += 8) /* as integers: NaN is the largest */
		most = _mm256_max_epi32(most, _mm256_and_si256(ivec_load(x + k), magnitude));
	ivec_store(lane, most);
	for (int i = 0; i < 8; i++)
		bits = MOE_MAX(bits, lane[i]);
	memcpy(&largest, &bits, sizeof largest);
	return largest;
}

void avx2_int_block(int rows, int planes, int n, const float *x, int64_t ld, int8_t *bytes,
		    int32_t *sum, float *scale)
{
	float limit = planes == 2 ? MOE_INT_LARGEST2 : MOE_INT_LARGEST;
	int v = rows * planes;

	for (int i = 0; i < rows; i++, x += ld) {
		float largest = largest_of(n, x);
		vec inverse = vec_set1(largest > MOE_INT_TINY ? limit / largest : 0);
		__m256i low = _mm256_setzero_si256(), high = low;
		int32_t *q = (int32_t *)(void *)bytes + i;

		scale[i] = largest * (1 / limit);
		for (int k = 0; k < n; k += 8, q += 2 * v) {
			__m256i all = _mm256_cvtps_epi32(vec_mul(vec_load(x + k), inverse));

			if (planes == 2) {
				__m256i hi = _mm256_srai_epi32(
					_mm256_add_epi32(all, _mm256_set1_epi32(64)), 7);

				store8(q, v, hi);
				high = _mm256_add_epi32(high, hi);
				all = _mm256_sub_epi32(all, _mm256_slli_epi32(hi, 7));
			}
			store8(planes == 2 ? q + rows : q, v, all);
			low = _mm256_add_epi32(low, all);
		}
		if (planes == 2)
			sum[i] = reduce_add(high);
		sum[planes == 2 ? rows + i : i] = reduce_add(low);
	}
}
