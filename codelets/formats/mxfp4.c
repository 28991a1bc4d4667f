/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP4 (OCP microscaling): E2M1 codes, 32 columns per scale, a power of two as one byte (UE8M0).
 * gpt-oss: NAME_blocks [n, k/32, 16] with the even column in the low nibble and NAME_scales [n,
 * k/32]; compressed-tensors: weight_packed [n, k/2] and weight_scale, the same bytes.
 */
#include "codelets/format.h"

#include <math.h>

#define GROUP 32

static const float values[16] = { 0,	 .5f,  1,  1.5f,  2,  3,  4,  6,
				  -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6 };

static void codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, uint8_t *out)
{
	const uint8_t *from = (const uint8_t *)q->codes.data + row * (q->k / 2);

	for (int64_t i = k0; i < k0 + k; i++)
		*out++ = from[i / 2] >> i % 2 * 4 & 15;
}

static const struct moe_code_reader reader = { codes, moe_stored_scale_at, NULL };

static enum moe_status open(const struct moe_stored *s, struct moe_quantised *q)
{
	const struct moe_array *c = &s->codes;
	char got[64];

	if (s->k % GROUP)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: MXFP4 has groups of %d columns, which do not divide %lld",
				s->codes_name, GROUP, (long long)s->k);
	if (c->ndim == 3) {
		if (c->shape[0] != s->n || c->shape[1] != s->k / GROUP || c->shape[2] != GROUP / 2)
			return moe_fail(
				MOE_ERR_FORMAT, "%s has shape %s; [%lld, %lld, %d] is expected",
				s->codes_name, moe_shape_text(c->ndim, c->shape, got, sizeof got),
				(long long)s->n, (long long)(s->k / GROUP), GROUP / 2);
	} else {
		MOE_TRY(moe_stored_shape(s->codes_name, c, s->n, s->k / 2));
	}
	MOE_TRY(moe_stored_dtype(s->scale_name, &s->scale, MOE_SCALE_UE8M0));
	MOE_TRY(moe_stored_shape(s->scale_name, &s->scale, s->n, s->k / GROUP));
	q->reader = &reader;
	q->coding.scale = MOE_SCALE_UE8M0;
	q->coding.group = GROUP;
	q->coding.rows = 1;
	return MOE_OK;
}

/* The largest element's exponent becomes that of 4, the largest power of two; larger ones saturate
 * at 6. */
static void encode(int64_t n, int64_t k, const float *x, int64_t ld, float scale, uint8_t *out,
		   int64_t ld_codes)
{
	const struct moe_coders *c = moe_coders();

	for (int64_t i = 0; c && i < n; i++)
		c->e2m1(k, x + i * ld, scale, out + i * ld_codes);
	for (int64_t i = 0; !c && i < n; i++)
		for (int64_t j = 0; j < k; j++) {
			float v = x[i * ld + j] / scale, a = fabsf(v);
			/* steps of .5 up to 2, of 1 up to 4, of 2 beyond: ties to even codes */
			int code = a <= 2   ? (int)nearbyintf(a * 2)
				   : a <= 4 ? (int)nearbyintf(a) + 2
					    : (int)nearbyintf(MOE_MIN(a, 6) / 2) + 4;

			out[i * ld_codes + j] = (uint8_t)(code | (signbit(v) ? 8 : 0));
		}
}

static float quantise(int64_t n, int64_t k, const float *x, int64_t ld, uint8_t *out,
		      int64_t ld_codes)
{
	float largest = moe_largest(n, k, x, ld), scale;
	int e = 0;

	frexpf(largest, &e);
	scale = ldexpf(1, MOE_MAX(MOE_MIN(largest > 0 ? e - 3 : 0, 127), -127));
	encode(n, k, x, ld, scale, out, ld_codes);
	return scale;
}

static void set_scale(const struct moe_quantised *q, struct moe_stored *s)
{
	moe_stored_set(&s->scale, MOE_SCALE_UE8M0, q->n, q->k / GROUP);
}

static enum moe_status shapes(const struct moe_quantised *q, struct moe_stored *s)
{
	MOE_TRY(moe_stored_multiple(q, 1, GROUP));
	moe_stored_set(&s->codes, MOE_U8, q->n, q->k / 2);
	set_scale(q, s);
	return MOE_OK;
}

static enum moe_status block_shapes(const struct moe_quantised *q, struct moe_stored *s)
{
	MOE_TRY(moe_stored_multiple(q, 1, GROUP));
	s->codes.dtype = MOE_U8;
	s->codes.ndim = 3;
	s->codes.shape[0] = q->n;
	s->codes.shape[1] = q->k / GROUP;
	s->codes.shape[2] = GROUP / 2;
	set_scale(q, s);
	return MOE_OK;
}

static enum moe_status store(const struct moe_quantised *q, const struct moe_stored *s)
{
	uint8_t *to = s->codes.data, codes[GROUP];

	for (int64_t n = 0; n < q->n; n++)
		for (int64_t k = 0; k < q->k; k += GROUP) {
			q->reader->codes(q, n, k, GROUP, codes);
			for (int i = 0; i < GROUP; i += 2)
				*to++ = (uint8_t)(codes[i] | codes[i + 1] << 4);
		}
	moe_store_scales(q, &s->scale);
	return MOE_OK;
}

static bool size(const struct moe_array *codes, const struct moe_array *scale, int64_t *n,
		 int64_t *k)
{
	(void)scale;
	*n = codes->shape[0];
	*k = codes->ndim == 3 ? GROUP * codes->shape[1] : 2 * codes->shape[1];
	return codes->ndim == 3 || codes->ndim == 2;
}

static const struct moe_code_writer writer = { shapes, store };
static const struct moe_code_writer block_writer = { block_shapes, store };

extern const struct moe_format moe_format_mxfp4;
const struct moe_format moe_format_mxfp4 = {
	.name = "mxfp4",
	.bits = 4,
	.codes = MOE_CODES_TABLE,
	.values = values,
	.compute = MOE_COMPUTE_INT16,
	.rows = 1,
	.group = GROUP,
	.scale = MOE_SCALE_UE8M0,
	.quantise = quantise,
	.encode = encode,
	.layout = {
		{ "_blocks", "_scales", NULL, MOE_U8, .writer = &block_writer, .size = size, .open = open },
		{ ".weight_packed", ".weight_scale", NULL, MOE_U8, .writer = &writer, .size = size, .open = open },
	},
};
