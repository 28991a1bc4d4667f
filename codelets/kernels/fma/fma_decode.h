/* SPDX-License-Identifier: Apache-2.0 */
/*
 * struct moe_tiles.decode for tables of f32 multiply-add: bf16 of quantised panels with byte
 * shuffles (4 bits) or arithmetic (8-bit integers, E4M3). What these do not take (groups that begin
 * inside a step of 8 columns, zeros of 8 bits, scales whose products may be subnormal) the plain
 * decoder does, with the same bits.
 */
#ifndef MOE_CODELETS_KERNELS_FMA_FMA_DECODE_H
#define MOE_CODELETS_KERNELS_FMA_FMA_DECODE_H

#include "codelets/kernels/fma/vec_int.h"
#include "codelets/kernels/packed/coded.h"

#include <string.h>

#define DECODE_STEP 8	  /* columns: 128 elements */
#define DECODE_SET 4	  /* steps of 4-bit codes that are decoded together */
#define DECODE_AHEAD 1024 /* bytes from a read to its prefetch, along a panel */
#define DECODE_T                                                                                   \
	(16 / (VEC_LANES / 4)) /* vectors of bf16 of a step: each has 8 columns of some rows */

/*
 * Scales within these bounds (or 0) times values, which are no smaller than 2^-9, are no subnormal
 * numbers: rounding to bf16 needs no more than an addition.
 */
#define DECODE_LEAST 0x0d800000u /* 2^-100 */
#define DECODE_MOST 0x71800000u	 /* 2^100 */

VEC_INLINE bool fma_ordinary(const float scale[16])
{
	unsigned bad = 0;

	for (int i = 0; i < 16; i++) {
		uint32_t bits;

		memcpy(&bits, scale + i, sizeof bits);
		bits &= 0x7fffffffu;
		bad |= (bits != 0) & (bits - DECODE_LEAST > DECODE_MOST - DECODE_LEAST);
	}
	return !bad;
}

/* ---- 4 bits: 16 values of each row, times its scale, as bytes to shuffle ---- */

/* Bytes of bf16; a lane of 128 bits per row: four rows in order, AVX2 i and i + 4, eight from 8 on. */
struct fma_tables {
	ivec low[DECODE_T], high[DECODE_T];
};

static void fma_tables4(const float *values, const float scale[16], const float zero[16],
			struct fma_tables *t)
{
#if VEC_LANES == 16
	const ivec order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
	const vec all = vec_load(values);
	ivec pair[2];

	for (int r = 0; r < 16; r += 2) {
		vec a = vec_mul(_mm512_sub_ps(all, vec_set1(zero[r])), vec_set1(scale[r]));
		vec b = vec_mul(_mm512_sub_ps(all, vec_set1(zero[r + 1])), vec_set1(scale[r + 1]));

		pair[r / 2 % 2] = _mm512_permutexvar_epi32(order, ivec_split_bytes(vec_bf16(a, b)));
		if (r % 4 == 0)
			continue;
		t->low[r / 4] = _mm512_shuffle_i64x2(pair[0], pair[1], 0x44);
		t->high[r / 4] = _mm512_shuffle_i64x2(pair[0], pair[1], 0xee);
	}
#else
	const __m128 *v = (const __m128 *)(const void *)values;
	const vec first = _mm256_set_m128(v[2], v[0]), second = _mm256_set_m128(v[3], v[1]);

	for (int i = 0; i < DECODE_T; i++) {
		ivec row[2];

		for (int j = 0; j < 2; j++) {
			int r = i / 4 * 8 + i % 4 + 4 * j;
			vec z = vec_set1(zero[r]), by = vec_set1(scale[r]);
			vec a = vec_mul(_mm256_sub_ps(first, z), by);
			vec b = vec_mul(_mm256_sub_ps(second, z), by);

			row[j] = _mm256_permute4x64_epi64(ivec_split_bytes(vec_bf16(a, b)), 0xd8);
		}
		t->low[i] = _mm256_permute2x128_si256(row[0], row[1], 0x20);
		t->high[i] = _mm256_permute2x128_si256(row[0], row[1], 0x31);
	}
#endif
}

/* From c[step], whose dwords are rows, to a lane per row with its dwords of all steps, as the tables
 * have them */
VEC_INLINE void fma_rows_of_steps(const ivec c[4], ivec row[4])
{
	ivec a = V(unpacklo_epi32)(c[0], c[1]), b = V(unpackhi_epi32)(c[0], c[1]);
	ivec d = V(unpacklo_epi32)(c[2], c[3]), e = V(unpackhi_epi32)(c[2], c[3]);
	ivec r[4] = { V(unpacklo_epi64)(a, d), V(unpackhi_epi64)(a, d), V(unpacklo_epi64)(b, e),
		      V(unpackhi_epi64)(b, e) };

#if VEC_LANES == 16
	a = _mm512_shuffle_i64x2(r[0], r[1], 0x44), b = _mm512_shuffle_i64x2(r[0], r[1], 0xee);
	d = _mm512_shuffle_i64x2(r[2], r[3], 0x44), e = _mm512_shuffle_i64x2(r[2], r[3], 0xee);
	row[0] = _mm512_shuffle_i64x2(a, d, 0x88), row[1] = _mm512_shuffle_i64x2(a, d, 0xdd);
	row[2] = _mm512_shuffle_i64x2(b, e, 0x88), row[3] = _mm512_shuffle_i64x2(b, e, 0xdd);
#else
#pragma GCC unroll 4
	for (int j = 0; j < 4; j++)
		row[j] = r[j];
#endif
}

/*
 * Values of the codes of 4 steps, in each lane those of its row: column 4 right + c of steps 2 h and
 * 2 h + 1 in out[right][h].
 */
VEC_INLINE void fma_look_up4(ivec low, ivec high, ivec codes, ivec out[2][2])
{
	const ivec nibble = V(set1_epi8)(15);

#pragma GCC unroll 2
	for (int right = 0; right < 2; right++) {
		ivec code = IVEC(and)(right ? V(srli_epi16)(codes, 4) : codes, nibble);
		ivec a = V(shuffle_epi8)(low, code), b = V(shuffle_epi8)(high, code);

		out[right][0] = V(unpacklo_epi8)(a, b);
		out[right][1] = V(unpackhi_epi8)(a, b);
	}
}

#if VEC_LANES == 16
/* Some rows of 4 steps; to: their first step */
VEC_INLINE void fma_put4(const struct fma_tables *t, int i, const ivec row[4], uint16_t *to)
{
#pragma GCC unroll 4
	for (int j = 0; j < 4; j++, to += 2 * VEC_LANES) {
		ivec v[2][2];

		fma_look_up4(t->low[i + j], t->high[i + j], row[j], v);
#pragma GCC unroll 2
		for (int h = 0; h < 2; h++) {
			ivec_store(to + 256 * h, V(unpacklo_epi64)(v[0][h], v[1][h]));
			ivec_store(to + 256 * h + 128, V(unpackhi_epi64)(v[0][h], v[1][h]));
		}
	}
}
#else
/* A pair of rows of one step from the low halves, another, 4 rows on, from the high ones */
VEC_INLINE void fma_put_pairs(ivec left, ivec right, uint16_t *to)
{
	_mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(left));
	_mm_storeu_si128((__m128i *)(to + 8), _mm256_castsi256_si128(right));
	_mm_storeu_si128((__m128i *)(to + 32), _mm256_extracti128_si256(left, 1));
	_mm_storeu_si128((__m128i *)(to + 40), _mm256_extracti128_si256(right, 1));
}

VEC_INLINE void fma_put4(const struct fma_tables *t, int i, const ivec row[4], uint16_t *to)
{
#pragma GCC unroll 2
	for (int j = 0; j < 4; j += 2, to += 16) {
		ivec a[2][2], b[2][2];

		fma_look_up4(t->low[i + j], t->high[i + j], row[j], a);
		fma_look_up4(t->low[i + j + 1], t->high[i + j + 1], row[j + 1], b);
#pragma GCC unroll 2
		for (int h = 0; h < 2; h++) {
			fma_put_pairs(_mm256_unpacklo_epi16(a[0][h], b[0][h]),
				      _mm256_unpacklo_epi16(a[1][h], b[1][h]), to + 256 * h);
			fma_put_pairs(_mm256_unpackhi_epi16(a[0][h], b[0][h]),
				      _mm256_unpackhi_epi16(a[1][h], b[1][h]), to + 256 * h + 128);
		}
	}
}
#endif

static void fma_decode4(const struct fma_tables *t, int64_t sets, const uint8_t *codes,
			uint16_t *dst)
{
	for (; sets > 0; sets--, codes += DECODE_SET * 64, dst += DECODE_SET * 128) {
		for (int s = 0; s < DECODE_SET; s++)
			vec_prefetch_l1(codes + DECODE_AHEAD + 64 * s);
#pragma GCC unroll 2
		for (int i = 0; i < DECODE_T; i += 4) {
			ivec c[4], row[4];

#pragma GCC unroll 4
			for (int s = 0; s < 4; s++)
				c[s] = ivec_load(codes + 64 * s + i / 4 * sizeof(ivec));
			fma_rows_of_steps(c, row);
			fma_put4(t, i, row, dst + i * 2 * VEC_LANES);
		}
	}
}

/* ---- 8 bits ---- */

/* E4M3 has the mantissa and a part of the exponent of half precision: 2^-8 times the value,
 * exactly. */
VEC_INLINE __m256i fma_halves(__m128i codes)
{
	const __m256i all = _mm256_set1_epi16(0x3f80);
	__m256i v = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), nan;

	v = _mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80));
	nan = _mm256_cmpeq_epi16(_mm256_and_si256(v, all), all);
	return _mm256_or_si256(v, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
}

#if VEC_LANES == 16
/* 4 columns of 4 rows */
VEC_INLINE vec fma_values8(const bool integers, const uint8_t *codes)
{
	__m128i c = ivec_bytes(codes);

	return integers ? _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c)) : _mm512_cvtph_ps(fma_halves(c));
}

VEC_INLINE void fma_decode8(const bool integers, const float scale[16], int64_t steps,
			    const uint8_t *codes, uint16_t *dst)
{
	float lanes[DECODE_T][VEC_LANES];

	for (int i = 0; i < 64; i++)
		lanes[i / VEC_LANES][i % VEC_LANES] =
			integers ? scale[i / 4] : scale[i / 4] * 0x1p8f;
	for (; steps > 0; steps--, codes += 128, dst += 128) {
		vec_prefetch_l1(codes + DECODE_AHEAD);
		vec_prefetch_l1(codes + DECODE_AHEAD + 64);
#pragma GCC unroll 8
		for (int i = 0; i < DECODE_T; i++) {
			const uint8_t *at = codes + i * VEC_LANES;
			vec s = vec_load(lanes[i]);
			vec a = fma_values8(integers, at), b = fma_values8(integers, at + 64);

			ivec_store(dst + i * 2 * VEC_LANES, vec_bf16(vec_mul(a, s), vec_mul(b, s)));
		}
	}
}
#else
/* A pair of rows, 8 codes of each, times their scales */
VEC_INLINE ivec fma_pair8(const bool integers, __m128i codes, const float *scale)
{
	__m256i halves;
	vec a, b;

	if (integers) {
		a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
		b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)));
	} else {
		halves = fma_halves(codes);
		a = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
		b = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
	}
	return vec_bf16_pair(vec_mul(a, vec_set1(scale[0])), vec_mul(b, vec_set1(scale[1])));
}

VEC_INLINE void fma_decode8(const bool integers, const float scale[16], int64_t steps,
			    const uint8_t *codes, uint16_t *dst)
{
	float by[16];

	for (int i = 0; i < 16; i++)
		by[i] = integers ? scale[i] : scale[i] * 0x1p8f;
	for (; steps > 0; steps--, codes += 128, dst += 128) {
		vec_prefetch_l1(codes + DECODE_AHEAD);
		vec_prefetch_l1(codes + DECODE_AHEAD + 64);
#pragma GCC unroll 4
		for (int i = 0; i < 16; i += 4) { /* columns 0 to 3 of 4 rows, and 4 to 7 */
			__m128i left = _mm_loadu_si128((const __m128i *)(codes + 4 * i));
			__m128i right = _mm_loadu_si128((const __m128i *)(codes + 64 + 4 * i));
			__m128i low = _mm_unpacklo_epi32(left, right);
			__m128i high = _mm_unpackhi_epi32(left, right);

			ivec_store(dst + 8 * i, fma_pair8(integers, low, by + i));
			ivec_store(dst + 8 * i + 16, fma_pair8(integers, high, by + i + 2));
		}
	}
}
#endif

static void fma_decode_integers(const float scale[16], int64_t steps, const uint8_t *codes,
				uint16_t *dst)
{
	fma_decode8(true, scale, steps, codes, dst);
}

static void fma_decode_e4m3(const float scale[16], int64_t steps, const uint8_t *codes,
			    uint16_t *dst)
{
	fma_decode8(false, scale, steps, codes, dst);
}

/* Whether 8-bit values are E4M3's, by all of them; asked for every panel, so the answer is kept. */
static bool fma_is_e4m3(const float *values)
{
	static const float *known;

	if (__atomic_load_n(&known, __ATOMIC_RELAXED) == values)
		return true;
	for (int i = 0; i < 256; i++) {
		int e = i >> 3 & 15, m = i & 7;
		float v = e ? (float)(8 + m) * (float)(1 << e) * 0x1p-10f : (float)m * 0x1p-9f;

		if ((i & 127) != 127 && values[i] != (i & 128 ? -v : v))
			return false;
	}
	if (values[127] == values[127] || values[255] == values[255])
		return false;
	__atomic_store_n(&known, values, __ATOMIC_RELAXED);
	return true;
}

/* ---- panels ---- */

static bool fma_decodes(const struct moe_coded_panel *p)
{
	const struct moe_coding *c = p->coding;
	const struct moe_format *f = c->format;

	if (p->layout != FMA_LAYOUT ||
	    (p->groups > 1 && (c->group % DECODE_STEP || c->phase % DECODE_STEP)))
		return false;
	return f->bits == 4 ||
	       (!c->zero && (f->codes == MOE_CODES_INTEGER ||
			     (f->codes == MOE_CODES_SIGN_MAGNITUDE && fma_is_e4m3(f->values))));
}

/* Columns k0 and `steps` steps on, of one group; how many steps were decoded. */
static int64_t fma_decode_group(const struct moe_coded_panel *p, int64_t group, int64_t k0,
				int64_t steps, uint16_t *dst)
{
	const struct moe_format *f = p->coding->format;
	const uint8_t *codes = p->codes + k0 * 16 * f->bits / 8;
	_Alignas(64) float scale[16], zero[16];
	struct fma_tables tables;

	vec_scales(p, group, scale);
	if (!fma_ordinary(scale))
		return 0;
	if (f->bits == 4) {
		steps -= steps % DECODE_SET;
		if (!steps)
			return 0;
		moe_coded_zeros(p, group, zero);
		fma_tables4(f->values, scale, zero, &tables);
		fma_decode4(&tables, steps / DECODE_SET, codes, dst);
	} else if (f->codes == MOE_CODES_INTEGER) {
		fma_decode_integers(scale, steps, codes, dst);
	} else {
		fma_decode_e4m3(scale, steps, codes, dst);
	}
	return steps;
}

static void fma_decode(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst)
{
	const struct moe_coding *c = p->coding;
	int64_t end = k0 + k, group = MOE_MIN((c->phase + k0) / c->group, p->groups - 1);

	if (!fma_decodes(p)) {
		moe_coded_decode(p, k0, k, dst);
		return;
	}
	for (int64_t next, done; k0 < end; k0 = next, group++) {
		next = group == p->groups - 1 ? end
					      : MOE_MIN(end, (group + 1) * c->group - c->phase);
		done = DECODE_STEP * fma_decode_group(p, group, k0, (next - k0) / DECODE_STEP, dst);
		if (done < next - k0)
			moe_coded_decode(p, k0 + done, next - k0 - done, dst + 16 * done);
		dst += 16 * (next - k0);
	}
}

#endif
