/* SPDX-License-Identifier: Apache-2.0 */
/* 8-bit integers, symmetric, one scale per output row (compressed-tensors "int-quantized", I8) or
 * per group of columns. */
#include "codelets/format.h"

#include <math.h>

#define LARGEST 127.0f

#define ROW(b)                                                                                     \
	(b), (b) + 1, (b) + 2, (b) + 3, (b) + 4, (b) + 5, (b) + 6, (b) + 7, (b) + 8, (b) + 9,      \
		(b) + 10, (b) + 11, (b) + 12, (b) + 13, (b) + 14, (b) + 15
static const float values[256] = { ROW(0),   ROW(16),  ROW(32),	  ROW(48),   ROW(64),  ROW(80),
				   ROW(96),  ROW(112), ROW(-128), ROW(-112), ROW(-96), ROW(-80),
				   ROW(-64), ROW(-48), ROW(-32),  ROW(-16) };

static void codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, uint8_t *out)
{
	memcpy(out, (const uint8_t *)q->codes.data + row * q->k + k0, (size_t)k);
}

static const struct moe_code_reader reader = { codes, moe_stored_scale_at, NULL };

static enum moe_status open(const struct moe_stored *s, struct moe_quantised *q)
{
	int64_t groups = s->scale.ndim == 2 ? s->scale.shape[1] : 1;

	MOE_TRY(moe_stored_shape(s->codes_name, &s->codes, s->n, s->k));
	MOE_TRY(moe_stored_scale(s->scale_name, &s->scale));
	if (s->scale.ndim != 1 || s->scale.shape[0] != s->n)
		MOE_TRY(moe_stored_shape(s->scale_name, &s->scale, s->n, groups));
	MOE_TRY(moe_stored_group(s->scale_name, s->k, groups, &q->coding.group));
	q->reader = &reader;
	q->coding.scale = s->scale.dtype;
	q->coding.rows = 1;
	return MOE_OK;
}

static void encode(int64_t n, int64_t k, const float *x, int64_t ld, float scale, uint8_t *out,
		   int64_t ld_codes)
{
	const struct moe_coders *c = moe_coders();

	for (int64_t i = 0; c && i < n; i++)
		c->integers(k, x + i * ld, scale, -127, 127, 0, out + i * ld_codes);
	for (int64_t i = 0; !c && i < n; i++)
		for (int64_t j = 0; j < k; j++) {
			float v = nearbyintf(x[i * ld + j] / scale);

			out[i * ld_codes + j] =
				(uint8_t)(int8_t)MOE_MAX(MOE_MIN(v, LARGEST), -LARGEST);
		}
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
	moe_stored_set(&s->codes, MOE_I8, q->n, q->k);
	moe_stored_set(&s->scale, q->coding.scale, q->n, moe_groups(&q->coding, q->k));
	return MOE_OK;
}

static const struct moe_code_writer writer = { shapes, moe_store_byte_codes };

extern const struct moe_format moe_format_int8;
const struct moe_format moe_format_int8 = {
	.name = "int8",
	.bits = 8,
	.codes = MOE_CODES_INTEGER,
	.values = values,
	.compute = MOE_COMPUTE_INT16,
	.rows = 1,
	.scale = MOE_F32,
	.quantise = quantise,
	.encode = encode,
	.layout = {
		{ ".weight", ".weight_scale", NULL, MOE_I8, .writer = &writer, .size = moe_size_of_byte_codes, .open = open },
		{ "", "_scale", NULL, MOE_I8, .writer = &writer, .size = moe_size_of_byte_codes, .open = open },
	},
};
