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

#if VEC_LANES == 8
/*
 * fma_tables4 of scales that are powers of two, without zeros: what the values have in bf16, which
 * holds them exactly, with the scale's exponent added. false: not done.
 */
static bool fma_tables4_shifted(const float *values, const float scale[16], struct fma_tables *t)
{
	const ivec bytes = _mm256_set1_epi16(255), none = _mm256_setzero_si256();
	_Alignas(16) uint16_t exact[16];
	int16_t up[16];
	ivec base[2], zeros[2];

	for (int i = 0; i < 16; i++) {
		uint32_t value, by;

		memcpy(&value, values + i, sizeof value);
		memcpy(&by, scale + i, sizeof by);
		if (value << 16 || by << 9 || by >> 31 || !by)
			return false;
		exact[i] = (uint16_t)(value >> 16);
		up[i] = (int16_t)((by >> 16) - 0x3f80);
	}
	for (int h = 0; h < 2; h++) {
		base[h] = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(exact + 8 * h)));
		zeros[h] = _mm256_cmpeq_epi16(_mm256_slli_epi16(base[h], 1), none);
	}
	for (int i = 0; i < DECODE_T; i++) {
		int r = i / 4 * 8 + i % 4;
		ivec add = _mm256_set_m128i(_mm_set1_epi16(up[r + 4]), _mm_set1_epi16(up[r]));
		ivec a = _mm256_add_epi16(base[0], _mm256_andnot_si256(zeros[0], add));
		ivec b = _mm256_add_epi16(base[1], _mm256_andnot_si256(zeros[1], add));

		t->low[i] = _mm256_packus_epi16(_mm256_and_si256(a, bytes), _mm256_and_si256(b, bytes));
		t->high[i] = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
	}
	return true;
}
#endif

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
/*
 * PAIRS16: where a step begins in the block of 16 columns that its pairs of rows are of, 32 elements each. Decoders get
 * whole blocks.
 */
VEC_INLINE uint16_t *fma_step(uint16_t *dst, int64_t step)
{
	return dst + step / 2 * 256 + step % 2 * 16;
}

/* A pair of rows of one step from the low halves, another, 4 rows on, from the high ones */
VEC_INLINE void fma_put_pairs(ivec left, ivec right, uint16_t *to)
{
	_mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(left));
	_mm_storeu_si128((__m128i *)(to + 8), _mm256_castsi256_si128(right));
	_mm_storeu_si128((__m128i *)(to + 64), _mm256_extracti128_si256(left, 1));
	_mm_storeu_si128((__m128i *)(to + 72), _mm256_extracti128_si256(right, 1));
}

VEC_INLINE void fma_put4(const struct fma_tables *t, int i, const ivec row[4], uint16_t *to)
{
#pragma GCC unroll 2
	for (int j = 0; j < 4; j += 2, to += 32) {
		ivec a[2][2], b[2][2];

		fma_look_up4(t->low[i + j], t->high[i + j], row[j], a);
		fma_look_up4(t->low[i + j + 1], t->high[i + j + 1], row[j + 1], b);
#pragma GCC unroll 2
		for (int h = 0; h < 2; h++) {
			fma_put_pairs(_mm256_unpacklo_epi16(a[0][h], b[0][h]),
				      _mm256_unpacklo_epi16(a[1][h], b[1][h]), to + 256 * h);
			fma_put_pairs(_mm256_unpackhi_epi16(a[0][h], b[0][h]),
				      _mm256_unpackhi_epi16(a[1][h], b[1][h]), to + 256 * h + 16);
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
			fma_put4(t, i, row, dst + i * 32);
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
	for (int64_t s = 0; s < steps; s++, codes += 128) {
		uint16_t *to = fma_step(dst, s);

		vec_prefetch_l1(codes + DECODE_AHEAD);
		vec_prefetch_l1(codes + DECODE_AHEAD + 64);
#pragma GCC unroll 4
		for (int i = 0; i < 16; i += 4) { /* columns 0 to 3 of 4 rows, and 4 to 7 */
			__m128i left = _mm_loadu_si128((const __m128i *)(codes + 4 * i));
			__m128i right = _mm_loadu_si128((const __m128i *)(codes + 64 + 4 * i));
			__m128i low = _mm_unpacklo_epi32(left, right);
			__m128i high = _mm_unpackhi_epi32(left, right);

			ivec_store(to + 16 * i, fma_pair8(integers, low, by + i));
			ivec_store(to + 16 * i + 32, fma_pair8(integers, high, by + i + 2));
		}
	}
}
#endif

static void fma_decode_integers(const float scale[16], int64_t steps, const uint8_t *codes,
				uint16_t *dst)
{
	fma_decode8(true, scale, steps, codes, dst);
}

#if VEC_LANES == 8
/*
 * E4M3 where all 16 rows have one scale s, not 0. Products by s of one octave have the bf16 bits of
 * those of the octave below, with the exponent one higher; so those of codes 0 to 15 (what is below
 * the smallest normal number, and the first octave above) are looked up, and the other octaves are
 * added.
 */
struct fma_octaves {
	ivec low, high; /* bytes of the 16 products in bf16, in both lanes */
};

static struct fma_octaves fma_octaves(const float *values, float scale)
{
	vec by = vec_set1(scale);
	ivec w = vec_bf16(vec_mul(vec_load(values), by), vec_mul(vec_load(values + 8), by));

	w = ivec_split_bytes(_mm256_permute4x64_epi64(w, 0xd8)); /* in order; low and high bytes of each lane */
	w = _mm256_permute4x64_epi64(w, 0xd8);
	return (struct fma_octaves){ _mm256_permute2x128_si256(w, w, 0x00),
				     _mm256_permute2x128_si256(w, w, 0x11) };
}

/* In each lane a pair of rows; the second lane's lies two pairs on in dst. */
VEC_INLINE void fma_put_octaves(const struct fma_octaves *t, ivec codes, ivec magnitude, uint16_t *dst)
{
	const ivec eight = _mm256_set1_epi8(8), none = _mm256_setzero_si256();
	ivec at = _mm256_or_si256(_mm256_and_si256(magnitude, _mm256_set1_epi8(7)),
				  _mm256_min_epu8(magnitude, eight));
	ivec octave = _mm256_and_si256(_mm256_subs_epu8(magnitude, eight), _mm256_set1_epi8(0x78));
	ivec sign = _mm256_and_si256(codes, _mm256_set1_epi8((char)0x80));
	ivec low = _mm256_shuffle_epi8(t->low, at);
	ivec high = _mm256_xor_si256(_mm256_shuffle_epi8(t->high, at), sign);
	ivec left = _mm256_add_epi16(_mm256_unpacklo_epi8(low, high),
				     _mm256_slli_epi16(_mm256_unpacklo_epi8(octave, none), 4));
	ivec right = _mm256_add_epi16(_mm256_unpackhi_epi8(low, high),
				      _mm256_slli_epi16(_mm256_unpackhi_epi8(octave, none), 4));

	fma_put_pairs(left, right, dst);
}

/* false: a code is NaN, and dst is not to be used. */
static bool fma_decode_octaves(const struct fma_octaves *t, int64_t steps, const uint8_t *codes,
			       uint16_t *dst)
{
	const ivec order = _mm256_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0, 4, 1,
					    5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
	const ivec all = _mm256_set1_epi8(0x7f);
	ivec most = _mm256_setzero_si256();

	for (int64_t s = 0; s < steps; s++, codes += 128) {
		uint16_t *to = fma_step(dst, s);

		vec_prefetch_l1(codes + DECODE_AHEAD);
		vec_prefetch_l1(codes + DECODE_AHEAD + 64);
#pragma GCC unroll 2
		for (int i = 0; i < 64; i += 32) { /* 8 rows: columns 0 to 3, and 4 to 7 */
			ivec left = _mm256_shuffle_epi8(ivec_load(codes + i), order);
			ivec right = _mm256_shuffle_epi8(ivec_load(codes + 64 + i), order);
			ivec a = _mm256_unpacklo_epi64(left, right), b = _mm256_unpackhi_epi64(left, right);
			ivec abs_a = _mm256_and_si256(a, all), abs_b = _mm256_and_si256(b, all);

			most = _mm256_max_epu8(most, _mm256_max_epu8(abs_a, abs_b));
			fma_put_octaves(t, a, abs_a, to + 4 * i);
			fma_put_octaves(t, b, abs_b, to + 4 * i + 32);
		}
	}
	return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, all)) == 0;
}

static bool fma_one_scale(const float scale[16])
{
	vec first = vec_set1(scale[0]);
	vec same = _mm256_and_ps(_mm256_cmp_ps(first, vec_load(scale), _CMP_EQ_OQ),
				 _mm256_cmp_ps(first, vec_load(scale + 8), _CMP_EQ_OQ));

	return scale[0] != 0 && _mm256_movemask_ps(same) == 255;
}
#endif

static void fma_decode_e4m3(const float *values, const float scale[16], int64_t steps,
			    const uint8_t *codes, uint16_t *dst)
{
#if VEC_LANES == 8
	if (fma_one_scale(scale)) {
		struct fma_octaves t = fma_octaves(values, scale[0]);

		if (fma_decode_octaves(&t, steps, codes, dst))
			return;
	}
#endif
	(void)values;
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

	if (p->layout != FMA_LAYOUT || !moe_groups_at(p, moe_layout_k(FMA_LAYOUT)))
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
#if VEC_LANES == 8
		if (p->coding->zero || !fma_tables4_shifted(f->values, scale, &tables))
#endif
			fma_tables4(f->values, scale, zero, &tables);
		fma_decode4(&tables, steps / DECODE_SET, codes, dst);
	} else if (f->codes == MOE_CODES_INTEGER) {
		fma_decode_integers(scale, steps, codes, dst);
	} else {
		fma_decode_e4m3(f->values, scale, steps, codes, dst);
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
