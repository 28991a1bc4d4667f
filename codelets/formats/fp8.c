/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FP8 E4M3 (the "fn" kind: no infinities, 0x7f and 0xff are NaN) with a scale per block of 128 x
 * 128 (DeepSeek-V3 and what follows it: weight_scale_inv, which multiplies), per output row, or
 * one.
 */
#include "codelets/format.h"

#include <math.h>

#define BLOCK 128
#define LARGEST 448.0f

#define OCTAVE(s) 8 * (s), 9 * (s), 10 * (s), 11 * (s), 12 * (s), 13 * (s), 14 * (s), 15 * (s)
#define SUBNORMAL(s) 0 * (s), 1 * (s), 2 * (s), 3 * (s), 4 * (s), 5 * (s), 6 * (s), 7 * (s)
#define HALF(sign)                                                                                 \
	SUBNORMAL(sign 0x1p-9f), OCTAVE(sign 0x1p-9f), OCTAVE(sign 0x1p-8f), OCTAVE(sign 0x1p-7f), \
		OCTAVE(sign 0x1p-6f), OCTAVE(sign 0x1p-5f), OCTAVE(sign 0x1p-4f),                  \
		OCTAVE(sign 0x1p-3f), OCTAVE(sign 0x1p-2f), OCTAVE(sign 0x1p-1f),                  \
		OCTAVE(sign 0x1p0f), OCTAVE(sign 0x1p1f), OCTAVE(sign 0x1p2f),                     \
		OCTAVE(sign 0x1p3f), OCTAVE(sign 0x1p4f), 8 * (sign 0x1p5f), 9 * (sign 0x1p5f),    \
		10 * (sign 0x1p5f), 11 * (sign 0x1p5f), 12 * (sign 0x1p5f), 13 * (sign 0x1p5f),    \
		14 * (sign 0x1p5f), sign NAN

static const float values[256] = { HALF(+), HALF(-) };

static void codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, uint8_t *out)
{
	memcpy(out, (const uint8_t *)q->codes.data + row * q->k + k0, (size_t)k);
}

static const struct moe_code_reader reader = { codes, moe_stored_scale_at, NULL };

static bool is_shape(const struct moe_array *a, int64_t rows, int64_t cols)
{
	return a->ndim == 2 && a->shape[0] == rows && a->shape[1] == cols;
}

static enum moe_status open(const struct moe_stored *s, struct moe_quantised *q)
{
	int64_t n = s->n, k = s->k, count = moe_shape_count(s->scale.ndim, s->scale.shape);
	char got[64];

	MOE_TRY(moe_stored_shape(s->codes_name, &s->codes, n, k));
	if (s->scale.dtype != MOE_SCALE_UE8M0)
		MOE_TRY(moe_stored_scale(s->scale_name, &s->scale));
	q->reader = &reader;
	q->coding.scale = s->scale.dtype;
	if (is_shape(&s->scale, (n + BLOCK - 1) / BLOCK, (k + BLOCK - 1) / BLOCK)) {
		q->coding.group = BLOCK;
		q->coding.rows = BLOCK;
	} else if (count == n && s->scale.shape[0] == n && s->scale.ndim <= 2) {
		q->coding.group = k;
		q->coding.rows = 1;
	} else if (count == 1) {
		q->coding.group = k;
		q->coding.rows = n;
	} else {
		return moe_fail(MOE_ERR_FORMAT,
				"%s has shape %s; [%lld, %lld] (blocks of 128 x 128), [%lld, 1] "
				"(rows) or [1] "
				"is expected",
				s->scale_name,
				moe_shape_text(s->scale.ndim, s->scale.shape, got, sizeof got),
				(long long)((n + BLOCK - 1) / BLOCK),
				(long long)((k + BLOCK - 1) / BLOCK), (long long)n);
	}
	return MOE_OK;
}

/* Nearest code, ties to even; |v| beyond the largest value saturates. */
static uint8_t code_of(float v)
{
	uint8_t sign = signbit(v) ? 0x80 : 0;
	float a = MOE_MIN(fabsf(v), LARGEST), m;
	int e;

	if (a < 0x1p-6f) { /* subnormals; 8 steps are the smallest normal number */
		return (uint8_t)(sign | (int)nearbyintf(a * 0x1p9f));
	}
	m = frexpf(a, &e); /* [.5, 1) */
	e = (e + 6) * 8 + (int)nearbyintf(m * 16) -
	    8; /* a carry of the mantissa moves on to the exponent */
	return (uint8_t)(sign | MOE_MIN(e, 0x7e));
}

static void encode(int64_t n, int64_t k, const float *x, int64_t ld, float scale, uint8_t *out,
		   int64_t ld_codes)
{
	const struct moe_coders *c = moe_coders();

	for (int64_t i = 0; c && i < n; i++)
		c->e4m3(k, x + i * ld, scale, out + i * ld_codes);
	for (int64_t i = 0; !c && i < n; i++)
		for (int64_t j = 0; j < k; j++)
			out[i * ld_codes + j] = code_of(x[i * ld + j] / scale);
}

static float quantise(int64_t n, int64_t k, const float *x, int64_t ld, uint8_t *out,
		      int64_t ld_codes)
{
	float largest = moe_largest(n, k, x, ld), scale;

	scale = largest > 0 ? largest / LARGEST : 1;
	scale = scale > 0 ? scale : 0x1p-149f;
	encode(n, k, x, ld, scale, out, ld_codes);
	return scale;
}

static enum moe_status shapes(const struct moe_quantised *q, struct moe_stored *s)
{
	moe_stored_set(&s->codes, MOE_F8_E4M3, q->n, q->k);
	moe_stored_set(&s->scale, q->coding.scale, (q->n + q->coding.rows - 1) / q->coding.rows,
		       moe_groups(&q->coding, q->k));
	return MOE_OK;
}

static const struct moe_code_writer writer = { shapes, moe_store_byte_codes };

extern const struct moe_format moe_format_fp8;
const struct moe_format moe_format_fp8 = {
	.name = "fp8",
	.bits = 8,
	.codes = MOE_CODES_SIGN_MAGNITUDE,
	.values = values,
	.rows = BLOCK,
	.group = BLOCK,
	.scale = MOE_F32,
	.quantise = quantise,
	.encode = encode,
	.layout = {
		{ ".weight", ".weight_scale_inv", NULL, MOE_F8_E4M3, .writer = &writer, .size = moe_size_of_byte_codes, .open = open },
		{ ".weight", ".weight_scale", NULL, MOE_F8_E4M3, .name = "fp8 rows", .writer = &writer, .size = moe_size_of_byte_codes, .open = open },
		{ "", "_scale_inv", NULL, MOE_F8_E4M3, .writer = &writer, .size = moe_size_of_byte_codes, .open = open },
		{ "", "_scale", NULL, MOE_F8_E4M3, .name = "fp8 rows", .writer = &writer, .size = moe_size_of_byte_codes, .open = open },
	},
};
