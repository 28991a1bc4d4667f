/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 4-bit integers as compressed-tensors packs them ("pack-quantized": Kimi-K2 and others): code =
 * value
 * + 8, element 8 j + i of a row in bits 4 i of int32 j; a scale per row and group of columns (or
 * per row), symmetric or with zero points.
 */
#include "codelets/format.h"

#include <math.h>

#define GROUP 32

extern const float moe_int4_values[16];
const float moe_int4_values[16] = { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 };

static void codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, uint8_t *out)
{
	int64_t words = (q->k + 7) / 8;
	const uint8_t *from = (const uint8_t *)q->codes.data + row * words * 4;

	for (int64_t i = k0; i < k0 + k; i++) /* little-endian words: nibbles follow each other */
		*out++ = from[i / 2] >> i % 2 * 4 & 15;
}

static int byte_zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return (int8_t)moe_stored_byte(&q->zero, row * q->zero.shape[1] + group);
}

/* Packed along the rows: row 8 j + i in bits 4 i of word j. */
static int packed_zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return (int)(moe_stored_u32(&q->zero, row / 8 * q->zero.shape[1] + group) >> row % 8 * 4 &
		     15) -
	       8;
}

static const struct moe_code_reader symmetric = { codes, moe_stored_scale_at, NULL };
static const struct moe_code_reader zero_bytes = { codes, moe_stored_scale_at, byte_zero };
static const struct moe_code_reader zero_words = { codes, moe_stored_scale_at, packed_zero };

static enum moe_status open_zero(const struct moe_stored *s, int64_t groups,
				 struct moe_quantised *q)
{
	q->coding.zero = true;
	if (s->zero.dtype == MOE_I32) {
		q->reader = &zero_words;
		return moe_stored_shape(s->zero_name, &s->zero, (s->n + 7) / 8, groups);
	}
	q->reader = &zero_bytes;
	MOE_TRY(moe_stored_dtype(s->zero_name, &s->zero, MOE_I8));
	return moe_stored_shape(s->zero_name, &s->zero, s->n, groups);
}

static enum moe_status open(const struct moe_stored *s, struct moe_quantised *q)
{
	int64_t groups = s->scale.ndim == 2 ? s->scale.shape[1] : 1;

	MOE_TRY(moe_stored_shape(s->codes_name, &s->codes, s->n, (s->k + 7) / 8));
	MOE_TRY(moe_stored_scale(s->scale_name, &s->scale));
	MOE_TRY(moe_stored_shape(s->scale_name, &s->scale, s->n, groups));
	MOE_TRY(moe_stored_group(s->scale_name, s->k, groups, &q->coding.group));
	q->reader = &symmetric;
	q->coding.scale = s->scale.dtype;
	q->rows = 1;
	return s->zero.data ? open_zero(s, groups, q) : MOE_OK;
}

static float quantise(int64_t n, int64_t k, const float *x, int64_t ld, uint8_t *out,
		      int64_t ld_codes)
{
	float largest = moe_largest(n, k, x, ld), scale;

	scale = moe_bf16_to_f32(moe_f32_to_bf16(largest > 0 ? largest / 7 : 1));
	scale = scale > 0 ? scale : 0x1p-133f;
	for (int64_t i = 0; i < n; i++)
		for (int64_t j = 0; j < k; j++) {
			float v = nearbyintf(x[i * ld + j] / scale);

			out[i * ld_codes + j] = (uint8_t)(MOE_MAX(MOE_MIN(v, 7), -8) + 8);
		}
	return scale;
}

extern const struct moe_format moe_format_int4;
const struct moe_format moe_format_int4 = {
	.name = "int4",
	.bits = 4,
	.codes = MOE_CODES_TABLE,
	.values = moe_int4_values,
	.compute = MOE_COMPUTE_INT16,
	.rows = 1,
	.group = GROUP,
	.scale = MOE_BF16,
	.quantise = quantise,
	.layout = {
		{ ".weight_packed", ".weight_scale", ".weight_zero_point", MOE_I32, open },
		{ "_packed", "_scale", "_zero_point", MOE_I32, open },
	},
};
