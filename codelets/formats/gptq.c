/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The 4-bit integers of GPTQ and AWQ: qweight, scales and qzeros with the input dimension first.
 * GPTQ: qweight [k/8, n], 8 columns k per word, and zeros stored less one; AWQ: qweight [k, n/8], 8
 * rows n per word in the order 0 2 4 6 1 3 5 7. scales [groups, n], qzeros [groups, n/8] in both.
 */
#include "codelets/format.h"

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
	q->coding.scale = s->scale.dtype;
	q->coding.zero = true;
	q->rows = 1;
	return MOE_OK;
}

extern const struct moe_format moe_format_gptq;
const struct moe_format moe_format_gptq = {
	.name = "gptq",
	.bits = 4,
	.codes = MOE_CODES_TABLE,
	.values = moe_int4_values,
	.compute = MOE_COMPUTE_INT16,
	.scale = MOE_F16,
	.layout = {
		{ ".qweight", ".scales", ".qzeros", MOE_I32, open },
	},
};
