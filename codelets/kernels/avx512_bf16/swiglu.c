/* SPDX-License-Identifier: Apache-2.0 */
/* SwiGLU on 16 columns of m rows: h = x sigmoid(x) up, in f32. */
#include "codelets/kernels/avx512_bf16/bf16.h"
#include "codelets/kernels/packed/keep.h"

/*
 * sigmoid(x) = s 2^n and 1 - sigmoid(x) = rest, from e^-|x| so that neither overflows nor cancels.
 * Where x is negative s keeps the power of two apart: sigmoid(-90) is subnormal, its product with x
 * and a large up is not. n = low + high, each small enough for a product to survive.
 */
struct sigmoid {
	__m512 s, rest, low, high;
};

/* e^-a = p 2^n for a >= 0, to 2e-7; ln 2 in two parts and polynomial from Cephes' expf */
INLINE __m512 exp_minus(__m512 a, __m512 *n)
{
	/* beyond 192 even a product with 3e38 is 0; the order of the operands lets NaN through */
	__m512 x = _mm512_min_ps(_mm512_set1_ps(192.0f), a);
	__m512 q = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(-0x1.715476p+0f)), 8);
	__m512 r = _mm512_fnmadd_ps(q, _mm512_set1_ps(0.693359375f),
				    _mm512_sub_ps(_mm512_setzero_ps(), x));
	__m512 p = _mm512_set1_ps(1.9875691500e-4f);

	r = _mm512_fmadd_ps(q, _mm512_set1_ps(2.12194440e-4f), r);
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
	p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
	*n = q;
	return _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
}

INLINE struct sigmoid sigmoid(__m512 x)
{
	const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
	__mmask16 negative = _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ);
	/* e^-x is infinite in double: 0, so that -inf * 0 and 0 * inf are NaN as there */
	__mmask16 lost = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-709.7f), _CMP_LT_OQ);
	__m512 n, p = exp_minus(_mm512_abs_ps(x), &n), e = _mm512_scalef_ps(p, n);
	__m512 large = _mm512_div_ps(one, _mm512_add_ps(one, e));
	struct sigmoid out;

	out.s = _mm512_mask_mul_ps(large, negative, large, p);
	out.s = _mm512_mask_mov_ps(out.s, lost, zero);
	out.rest = _mm512_mask_mul_ps(large, (__mmask16)~negative, large, e);
	n = _mm512_maskz_mov_ps(negative, n);
	out.low = _mm512_roundscale_ps(_mm512_mul_ps(n, _mm512_set1_ps(0.5f)), 8);
	out.high = _mm512_sub_ps(n, out.low);
	return out;
}

/* The same where every |x| is below 80: nothing overflows or gets lost, so no power of two is kept
 * apart. */
#define PLAIN_BELOW 80.0f
INLINE __m512 plain_sigmoid(__m512 x, __m512 *rest)
{
	const __m512 one = _mm512_set1_ps(1.0f);
	__mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
	__m512 n, p = exp_minus(_mm512_abs_ps(x), &n), e = _mm512_scalef_ps(p, n);
	__m512 large = _mm512_div_ps(one, _mm512_add_ps(one, e)), small = _mm512_mul_ps(e, large);

	*rest = _mm512_mask_mov_ps(small, negative, large);
	return _mm512_mask_mov_ps(large, negative, small);
}

INLINE bool is_plain(__m512 x)
{
	__m512 limit = _mm512_set1_ps(PLAIN_BELOW);

	return _mm512_cmp_ps_mask(_mm512_abs_ps(x), limit, _CMP_LT_OQ) == 0xffff;
}

/* a s 2^n b */
INLINE __m512 scaled(__m512 a, const struct sigmoid *s, __m512 b)
{
	__m512 v = _mm512_scalef_ps(_mm512_mul_ps(a, s->s), s->low);

	return _mm512_scalef_ps(_mm512_mul_ps(v, b), s->high);
}

/* moe_keep of 16 values */
INLINE __m256i keep(__m512 v)
{
	const __m512i inf = _mm512_set1_epi32(MOE_KEEP_INF);
	__m512i bits = _mm512_castps_si512(v);
	__m512i abs = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
	__m512i even = _mm512_and_si512(_mm512_srli_epi32(abs, 14), _mm512_set1_epi32(1));
	__m512i code = _mm512_add_epi32(_mm512_add_epi32(abs, _mm512_set1_epi32(0x1fff)), even);
	__mmask16 nan = _mm512_cmpgt_epi32_mask(abs, _mm512_set1_epi32(0x7f800000)), normal;

	code = _mm512_sub_epi32(_mm512_srli_epi32(code, 14), _mm512_set1_epi32(MOE_KEEP_BIAS));
	normal = _mm512_cmpge_epi32_mask(code, _mm512_set1_epi32(0x200));
	code = _mm512_maskz_min_epi32(normal, code, inf);
	code = _mm512_mask_or_epi32(code, nan, inf, _mm512_set1_epi32(0x100));
	code = _mm512_or_si512(code, _mm512_slli_epi32(_mm512_srli_epi32(bits, 31), 15));
	return _mm512_cvtepi32_epi16(code);
}

INLINE __m512 kept(const uint16_t *p)
{
	__m512i v = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)p));
	__m512i code = _mm512_and_si512(v, _mm512_set1_epi32(0x7fff));
	__m512i sign = _mm512_slli_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0x8000)), 16);
	__m512i bits = _mm512_add_epi32(_mm512_slli_epi32(code, 14), _mm512_set1_epi32(96 << 23));
	__mmask16 normal = _mm512_cmpge_epi32_mask(code, _mm512_set1_epi32(0x200));
	__mmask16 special = _mm512_cmpge_epi32_mask(code, _mm512_set1_epi32(MOE_KEEP_INF));

	bits = _mm512_mask_or_epi32(bits, special, bits, _mm512_set1_epi32(0x7f800000));
	return _mm512_castsi512_ps(_mm512_mask_or_epi32(sign, normal, bits, sign));
}

INLINE __m512 hidden(__m512 gate, __m512 up)
{
	struct sigmoid s;
	__m512 rest;

	if (is_plain(gate))
		return _mm512_mul_ps(_mm512_mul_ps(gate, plain_sigmoid(gate, &rest)), up);
	s = sigmoid(gate);
	return scaled(gate, &s, up);
}

void avx512_bf16_swiglu_tile(const struct moe_swiglu_rows *r, float *g, const float *u)
{
	for (int i = 0; i < r->m; i++, g += 16, u += 16) {
		__m512 gate = _mm512_load_ps(g), up = _mm512_load_ps(u);

		_mm256_store_si256((__m256i *)(r->gate + i * r->ld), keep(gate));
		_mm256_store_si256((__m256i *)(r->up + i * r->ld), keep(up));
		_mm512_store_ps(g, hidden(gate, up));
	}
}

struct gradient {
	__m512 dgate, dup, h;
};

/* h = x sigmoid(x) up; its derivative by x is sigmoid(x) (1 + x (1 - sigmoid(x))) up. dw has the
 * routing weight. */
INLINE struct gradient gradient(__m512 gate, __m512 up, __m512 dw)
{
	const __m512 one = _mm512_set1_ps(1.0f);
	struct gradient out;

	if (is_plain(gate)) {
		__m512 rest, s = plain_sigmoid(gate, &rest), silu = _mm512_mul_ps(gate, s);

		out.h = _mm512_mul_ps(silu, up);
		out.dup = _mm512_mul_ps(dw, silu);
		out.dgate = _mm512_mul_ps(_mm512_mul_ps(dw, up), _mm512_fmadd_ps(silu, rest, s));
	} else {
		struct sigmoid s = sigmoid(gate);

		out.h = scaled(gate, &s, up);
		out.dup = scaled(gate, &s, dw);
		out.dgate = scaled(_mm512_fmadd_ps(gate, s.rest, one), &s, _mm512_mul_ps(dw, up));
	}
	return out;
}

void avx512_bf16_swiglu_tile_bwd(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh,
				 float *dgate, float *dup, float *h, float *dgw)
{
	for (int i = 0; i < r->m; i++) {
		__m512 d = _mm512_loadu_ps(dh + i * ld_dh);
		__m512 dw = _mm512_mul_ps(d, _mm512_set1_ps(r->weight[i]));
		struct gradient g =
			gradient(kept(r->gate + i * r->ld), kept(r->up + i * r->ld), dw);

		_mm512_store_ps(dgate + 16 * i, g.dgate);
		_mm512_store_ps(dup + 16 * i, g.dup);
		_mm512_store_ps(h + 16 * i, g.h);
		_mm512_store_ps(dgw + 16 * i,
				_mm512_fmadd_ps(d, g.h, _mm512_load_ps(dgw + 16 * i)));
	}
}
