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

struct fma_tables {
	ivec low[DECODE_T], high[DECODE_T]; /* of bf16; a lane per row */
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
	ivec pair[2];

	for (int r = 0; r < 16; r++) {
		vec z = vec_set1(zero[r]), s = vec_set1(scale[r]);
		vec a = vec_mul(_mm256_sub_ps(first, z), s),
		    b = vec_mul(_mm256_sub_ps(second, z), s);

		pair[r % 2] = _mm256_permute4x64_epi64(ivec_split_bytes(vec_bf16(a, b)), 0xd8);
		if (r % 2 == 0)
			continue;
		t->low[r / 2] = _mm256_permute2x128_si256(pair[0], pair[1], 0x20);
		t->high[r / 2] = _mm256_permute2x128_si256(pair[0], pair[1], 0x31);
	}
#endif
}

/* From c[step], whose dwords are rows, to a lane per row with its dwords of all steps: rows in
 * order */
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
	row[0] = _mm256_permute2x128_si256(r[0], r[1], 0x20);
	row[1] = _mm256_permute2x128_si256(r[2], r[3], 0x20);
	row[2] = _mm256_permute2x128_si256(r[0], r[1], 0x31);
	row[3] = _mm256_permute2x128_si256(r[2], r[3], 0x31);
#endif
}

static void fma_decode4(const struct fma_tables *t, int64_t sets, const uint8_t *codes,
			uint16_t *dst)
{
	const ivec nibble = V(set1_epi8)(15);

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
#pragma GCC unroll 4
			for (int j = 0; j < 4; j++) {
				uint16_t *to = dst + (i + j) * 2 * VEC_LANES;
				ivec left =
					IVEC(and)(row[j], nibble); /* columns 0 to 3 of each step */
				ivec right = IVEC(and)(V(srli_epi16)(row[j], 4), nibble);
				ivec a = V(shuffle_epi8)(t->low[i + j], left);
				ivec b = V(shuffle_epi8)(t->high[i + j], left);
				ivec d = V(shuffle_epi8)(t->low[i + j], right);
				ivec e = V(shuffle_epi8)(t->high[i + j], right);
				ivec l = V(unpacklo_epi8)(a, b), r = V(unpacklo_epi8)(d, e);

				ivec_store(to, V(unpacklo_epi64)(l, r));
				ivec_store(to + 128, V(unpackhi_epi64)(l, r));
				l = V(unpackhi_epi8)(a, b), r = V(unpackhi_epi8)(d, e);
				ivec_store(to + 256, V(unpacklo_epi64)(l, r));
				ivec_store(to + 384, V(unpackhi_epi64)(l, r));
			}
		}
	}
}

/* ---- 8 bits: a vector is 4 columns of some rows ---- */

VEC_INLINE vec fma_integers(const uint8_t *codes)
{
	return V(cvtepi32_ps)(V(cvtepi8_epi32)(ivec_bytes(codes)));
}

/* E4M3 has the mantissa and a part of the exponent of half precision: 2^-8 times the value,
 * exactly. */
VEC_INLINE vec fma_e4m3(const uint8_t *codes)
{
	const hvec all = H(set1_epi16)(0x3f80);
	hvec v = H(cvtepi8_epi16)(ivec_bytes(codes));
	hvec nan;

	v = HVEC(and)(H(slli_epi16)(v, 7), H(set1_epi16)((short)0xbf80));
	nan = H(cmpeq_epi16)(HVEC(and)(v, all), all);
	return V(cvtph_ps)(HVEC(or)(v, HVEC(and)(nan, H(set1_epi16)(0x7e00))));
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
			vec a = integers ? fma_integers(at) : fma_e4m3(at);
			vec b = integers ? fma_integers(at + 64) : fma_e4m3(at + 64);

			ivec_store(dst + i * 2 * VEC_LANES, vec_bf16(vec_mul(a, s), vec_mul(b, s)));
		}
	}
}

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

	if (p->block != DECODE_STEP ||
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
