/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The 4-bit integers of GPTQ and AWQ: qweight, scales and qzeros with the input dimension first.
 * GPTQ: qweight [k/8, n], 8 columns k per word, and zeros stored less one; AWQ: qweight [k, n/8], 8
 * rows n per word in the order 0 2 4 6 1 3 5 7. scales [groups, n], qzeros [groups, n/8] in both.
 */
#include "codelets/format.h"

#include <math.h>

#define GROUP 128

extern const float moe_int4_values[16]; /* int4.c */

static const int awq_shift[8] = { 0, 16, 4, 20, 8, 24, 12, 28 };

static void gptq_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		       uint8_t *out)
{
	for (int64_t i = k0; i < k0 + k; i++)
		*out++ = moe_stored_u32(&q->codes, i / 8 * q->n + row) >> i % 8 * 4 & 15;
}

static void awq_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		      uint8_t *out)
{
	for (int64_t i = k0; i < k0 + k; i++)
		*out++ = moe_stored_u32(&q->codes, i * (q->n / 8) + row / 8) >> awq_shift[row % 8] &
			 15;
}

static float scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return moe_scale_at(q->scale.data, q->scale.dtype, group * q->n + row);
}

static int gptq_zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return (int)(moe_stored_u32(&q->zero, group * (q->n / 8) + row / 8) >> row % 8 * 4 & 15) +
	       1 - 8;
}

static int awq_zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return (int)(moe_stored_u32(&q->zero, group * (q->n / 8) + row / 8) >> awq_shift[row % 8] &
		     15) -
	       8;
}

static const struct moe_code_reader gptq = { gptq_codes, scale, gptq_zero };
static const struct moe_code_reader awq = { awq_codes, scale, awq_zero };

static const struct moe_code_writer gptq_writer, awq_writer;

static enum moe_status open(const struct moe_stored *s, struct moe_quantised *q)
{
	bool is_awq =
		s->codes.ndim == 2 && s->codes.shape[0] == s->k && s->codes.shape[1] == s->n / 8;
	int64_t groups = s->scale.ndim == 2 ? s->scale.shape[0] : 0;

	if (s->n % 8 || s->k % 8)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: a [%lld, %lld] weight cannot be packed by eights",
				s->codes_name, (long long)s->n, (long long)s->k);
	if (!is_awq)
		MOE_TRY(moe_stored_shape(s->codes_name, &s->codes, s->k / 8, s->n));
	MOE_TRY(moe_stored_scale(s->scale_name, &s->scale));
	MOE_TRY(moe_stored_shape(s->scale_name, &s->scale, groups, s->n));
	MOE_TRY(moe_stored_group(s->scale_name, s->k, groups, &q->coding.group));
	if (!s->zero.data)
		return moe_fail(MOE_ERR_FORMAT, "%s is missing", s->zero_name);
	MOE_TRY(moe_stored_dtype(s->zero_name, &s->zero, MOE_I32));
	MOE_TRY(moe_stored_shape(s->zero_name, &s->zero, groups, s->n / 8));
	q->reader = is_awq ? &awq : &gptq;
	q->writer = is_awq ? &awq_writer : &gptq_writer;
	q->coding.scale = s->scale.dtype;
	q->coding.zero = true;
	q->coding.rows = 1;
	return MOE_OK;
}

/* Values from the least to the largest, zero among them; GPTQ's zero points begin at 1. */
float moe_int4_quantise_zero(int64_t k, const float *x, uint8_t *out, int8_t *zero);
float moe_int4_quantise_zero(int64_t k, const float *x, uint8_t *out, int8_t *zero)
{
	float least = 0, largest = 0, scale;
	const struct moe_coders *c = moe_coders();
	int z;

	if (c)
		c->range(k, x, &least, &largest);
	for (int64_t i = 0; !c && i < k; i++) {
		least = MOE_MIN(least, x[i]);
		largest = MOE_MAX(largest, x[i]);
	}
	scale = moe_f16_to_f32(moe_f32_to_f16(largest > least ? (largest - least) / 15 : 1));
	scale = scale > 0 ? scale : 0x1p-24f;
	z = (int)MOE_MAX(MOE_MIN(nearbyintf(-least / scale), 15), 1);
	if (c)
		c->integers(k, x, scale, -z, 15 - z, z, out);
	for (int64_t i = 0; !c && i < k; i++) {
		float v = nearbyintf(x[i] / scale) + (float)z;

		out[i] = (uint8_t)MOE_MAX(MOE_MIN(v, 15), 0);
	}
	*zero = (int8_t)(z - 8);
	return scale;
}

static void set_scales(const struct moe_quantised *q, struct moe_stored *s)
{
	int64_t groups = moe_groups(&q->coding, q->k);

	moe_stored_set(&s->scale, MOE_F16, groups, q->n);
	moe_stored_set(&s->zero, MOE_I32, groups, q->n / 8);
}

static enum moe_status gptq_shapes(const struct moe_quantised *q, struct moe_stored *s)
{
	MOE_TRY(moe_stored_multiple(q, 8, MOE_MAX(q->coding.group, 8)));
	moe_stored_set(&s->codes, MOE_I32, q->k / 8, q->n);
	set_scales(q, s);
	s->more = (struct moe_array){ .dtype = MOE_I32, .ndim = 1, .shape = { q->k } };
	return MOE_OK;
}

static enum moe_status awq_shapes(const struct moe_quantised *q, struct moe_stored *s)
{
	MOE_TRY(moe_stored_multiple(q, 8, MOE_MAX(q->coding.group, 8)));
	moe_stored_set(&s->codes, MOE_I32, q->k, q->n / 8);
	set_scales(q, s);
	return MOE_OK;
}

/* Scales, and zero points from `least` on, less that much. */
static enum moe_status store_scales(const struct moe_quantised *q, const struct moe_stored *s,
				    int least, const int shift[8])
{
	uint32_t *zeros = s->zero.data;

	memset(zeros, 0, (size_t)(s->zero.shape[0] * s->zero.shape[1]) * 4);
	for (int64_t g = 0; g < s->scale.shape[0]; g++)
		for (int64_t n = 0; n < q->n; n++) {
			int z = (q->coding.zero ? q->reader->zero(q, n, g) : 0) + 8 - least;

			if (z < 0 || z > 15)
				return moe_fail(MOE_ERR_UNSUPPORTED,
						"row %lld, column %lld has the zero point %d; %d "
						"to %d can be stored",
						(long long)n, (long long)(g * q->coding.group),
						z + least, least, least + 15);
			zeros[(g * q->n + n) / 8] |= (uint32_t)z << shift[n % 8];
			moe_scale_put(s->scale.data, s->scale.dtype, g * q->n + n,
				      q->reader->scale(q, n, g));
		}
	return MOE_OK;
}

static enum moe_status gptq_store(const struct moe_quantised *q, const struct moe_stored *s)
{
	static const int shift[8] = { 0, 4, 8, 12, 16, 20, 24, 28 };
	uint32_t *to = s->codes.data;
	uint8_t codes[8];

	for (int64_t n = 0; n < q->n; n++)
		for (int64_t k = 0; k < q->k; k += 8) {
			uint32_t word = 0;

			q->reader->codes(q, n, k, 8, codes);
			for (int i = 0; i < 8; i++)
				word |= (uint32_t)codes[i] << shift[i];
			to[k / 8 * q->n + n] = word;
		}
	for (int64_t k = 0; s->more.data && k < q->k; k++)
		((int32_t *)s->more.data)[k] = (int32_t)(k / q->coding.group);
	return store_scales(q, s, 1, shift);
}

static enum moe_status awq_store(const struct moe_quantised *q, const struct moe_stored *s)
{
	uint32_t *to = s->codes.data;
	uint8_t codes[256];

	memset(to, 0, (size_t)(q->k * (q->n / 8)) * 4);
	for (int64_t n = 0; n < q->n; n++)
		for (int64_t k0 = 0; k0 < q->k; k0 += 256) {
			int64_t k = MOE_MIN(256, q->k - k0);

			q->reader->codes(q, n, k0, k, codes);
			for (int64_t i = 0; i < k; i++)
				to[((k0 + i) * q->n + n) / 8] |= (uint32_t)codes[i]
								 << awq_shift[n % 8];
		}
	return store_scales(q, s, 0, awq_shift);
}

/* Rows are known by the scales; AWQ packs rows, GPTQ columns. */
static bool size(const struct moe_array *codes, const struct moe_array *scale, int64_t *n,
		 int64_t *k)
{
	if (codes->ndim != 2 || scale->ndim != 2)
		return false;
	*n = scale->shape[1];
	*k = codes->shape[1] == *n ? 8 * codes->shape[0] : codes->shape[0];
	return true;
}

static const struct moe_code_writer gptq_writer = { gptq_shapes, gptq_store };
static const struct moe_code_writer awq_writer = { awq_shapes, awq_store };

extern const struct moe_format moe_format_gptq;
const struct moe_format moe_format_gptq = {
	.name = "gptq",
	.bits = 4,
	.codes = MOE_CODES_TABLE,
	.values = moe_int4_values,
	.rows = 1,
	.group = GROUP,
	.compute = MOE_COMPUTE_INT16,
	.scale = MOE_F16,
	.quantise_zero = moe_int4_quantise_zero,
	.layout = { /* either is read as what its shapes say */
		{ ".qweight", ".scales", ".qzeros", MOE_I32, .more = ".g_idx", .writer = &gptq_writer, .size = size, .open = open },
		{ ".qweight", ".scales", ".qzeros", MOE_I32, .name = "awq", .writer = &awq_writer, .size = size, .open = open },
	},
};
