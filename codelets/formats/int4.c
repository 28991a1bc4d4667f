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
float moe_int4_quantise_zero(int64_t k, const float *x, uint8_t *codes, int8_t *zero); /* gptq.c */
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
	q->coding.rows = 1;
	return s->zero.data ? open_zero(s, groups, q) : MOE_OK;
}

static void encode(int64_t n, int64_t k, const float *x, int64_t ld, float scale, uint8_t *out,
		   int64_t ld_codes)
{
	const struct moe_coders *c = moe_coders();

	for (int64_t i = 0; c && i < n; i++)
		c->integers(k, x + i * ld, scale, -8, 7, 8, out + i * ld_codes);
	for (int64_t i = 0; !c && i < n; i++)
		for (int64_t j = 0; j < k; j++) {
			float v = nearbyintf(x[i * ld + j] / scale);

			out[i * ld_codes + j] = (uint8_t)(MOE_MAX(MOE_MIN(v, 7), -8) + 8);
		}
}

static float quantise(int64_t n, int64_t k, const float *x, int64_t ld, uint8_t *out,
		      int64_t ld_codes)
{
	float largest = moe_largest(n, k, x, ld), scale;

	scale = moe_bf16_to_f32(moe_f32_to_bf16(largest > 0 ? largest / 7 : 1));
	scale = scale > 0 ? scale : 0x1p-133f;
	encode(n, k, x, ld, scale, out, ld_codes);
	return scale;
}

static enum moe_status shapes(const struct moe_quantised *q, struct moe_stored *s)
{
	int64_t groups = moe_groups(&q->coding, q->k);

	MOE_TRY(moe_stored_multiple(q, 1, q->coding.group));
	moe_stored_set(&s->codes, MOE_I32, q->n, (q->k + 7) / 8);
	moe_stored_set(&s->scale, q->coding.scale, q->n, groups);
	if (q->coding.zero)
		moe_stored_set(&s->zero, MOE_I32, (q->n + 7) / 8, groups);
	s->more = (struct moe_array){ .dtype = MOE_I64, .ndim = 1, .shape = { 2 } };
	return MOE_OK;
}

/* Zeros as GPTQ's may be beyond 4 bits. */
static enum moe_status store_zeros(const struct moe_quantised *q, uint32_t *to)
{
	int64_t groups = moe_groups(&q->coding, q->k);

	for (int64_t n = 0; n < q->n; n++)
		for (int64_t g = 0; g < groups; g++) {
			int z = q->reader->zero(q, n, g) + 8;

			if (z < 0 || z > 15)
				return moe_fail(MOE_ERR_UNSUPPORTED,
						"row %lld, column %lld has the zero point %d, "
						"beyond 4 bits",
						(long long)n, (long long)(g * q->coding.group), z);
			to[n / 8 * groups + g] |= (uint32_t)z << n % 8 * 4;
		}
	return MOE_OK;
}

static enum moe_status store(const struct moe_quantised *q, const struct moe_stored *s)
{
	int64_t words = s->codes.shape[1];
	uint8_t *to = s->codes.data, codes[256];

	memset(to, 0, (size_t)(q->n * words) * 4);
	for (int64_t n = 0; n < q->n; n++, to += words * 4)
		for (int64_t k0 = 0; k0 < q->k; k0 += 256) {
			int64_t k = MOE_MIN(256, q->k - k0);

			q->reader->codes(q, n, k0, k, codes);
			for (int64_t i = 0; i < k; i++)
				to[(k0 + i) / 2] |= (uint8_t)(codes[i] << i % 2 * 4);
		}
	moe_store_scales(q, &s->scale);
	if (s->more.data) {
		((int64_t *)s->more.data)[0] = q->n;
		((int64_t *)s->more.data)[1] = q->k;
	}
	if (!q->coding.zero)
		return MOE_OK;
	if (s->zero.dtype == MOE_I8) {
		for (int64_t n = 0, at = 0; n < q->n; n++)
			for (int64_t g = 0; g < s->zero.shape[1]; g++)
				((int8_t *)s->zero.data)[at++] = (int8_t)q->reader->zero(q, n, g);
		return MOE_OK;
	}
	memset(s->zero.data, 0, (size_t)(s->zero.shape[0] * s->zero.shape[1]) * 4);
	return store_zeros(q, s->zero.data);
}

/* Columns that are no multiple of 8 cannot be told: the last word is taken as full. */
static bool size(const struct moe_array *codes, const struct moe_array *scale, int64_t *n,
		 int64_t *k)
{
	(void)scale;
	*n = codes->shape[0];
	*k = 8 * codes->shape[1];
	return codes->ndim == 2;
}

static enum moe_status fused_shapes(const struct moe_quantised *q, struct moe_stored *s)
{
	MOE_TRY(shapes(q, s));
	s->more.ndim = 0;
	return MOE_OK;
}

static const struct moe_code_writer writer = { shapes, store };
static const struct moe_code_writer fused_writer = { fused_shapes, store };

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
	.encode = encode,
	.quantise_zero = moe_int4_quantise_zero,
	.layout = {
		{ ".weight_packed", ".weight_scale", ".weight_zero_point", MOE_I32,
		  .more = ".weight_shape", .writer = &writer, .size = size, .open = open },
		{ "_packed", "_scale", "_zero_point", MOE_I32, .writer = &fused_writer, .size = size, .open = open },
	},
};
