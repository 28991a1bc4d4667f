/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The blocks that GGUF's quantised tensors consist of, and which of our codings they are read as.
 *
 *   Q8_0  int8, group 32: exact        Q4_0  int4, group 32: exact        Q6_K  int8, group 16:
 * exact Q4_1, Q4_K  int4, group 32, zero points: a block's offset is any number there and a
 * multiple of the scale here, so these come near only: the codes are the file's, the zero point the
 * nearest one, the scale that of least squares.
 */
#include "model/readers/gguf.h"

#include <math.h>

#define GROUP 32
#define SUPER 256 /* weights of a K block */

extern const struct moe_format moe_format_int4, moe_format_int8;

static float half_at(const uint8_t *p)
{
	uint16_t v;

	memcpy(&v, p, sizeof v);
	return moe_f16_to_f32(v);
}

/* Block `index` of a row. */
static const uint8_t *block_at(const struct moe_quantised *q, int64_t row, int64_t index,
			       int values, int bytes)
{
	return (const uint8_t *)q->codes.data + (row * (q->k / values) + index) * bytes;
}

/* Columns k0..k0+k of a row, from what `decode` makes of its whole blocks. */
static void codes_of(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, int values,
		     int bytes, void (*decode)(const uint8_t *block, uint8_t *out), uint8_t *out)
{
	uint8_t all[SUPER];

	while (k > 0) {
		int64_t at = k0 % values, n = MOE_MIN(values - at, k);
		const uint8_t *b = block_at(q, row, k0 / values, values, bytes);

		if (n == values) {
			decode(b, out);
		} else {
			decode(b, all);
			memcpy(out, all + at, (size_t)n);
		}
		out += n;
		k0 += n;
		k -= n;
	}
}

/* ---- Q8_0: scale F16, 32 integers ---- */

#define Q8_0_BYTES (2 + GROUP)

static void q8_0_block(const uint8_t *b, uint8_t *out)
{
	memcpy(out, b + 2, GROUP);
}

static void q8_0_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		       uint8_t *out)
{
	codes_of(q, row, k0, k, GROUP, Q8_0_BYTES, q8_0_block, out);
}

static float q8_0_scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return half_at(block_at(q, row, group, GROUP, Q8_0_BYTES));
}

/* ---- Q4_0: scale F16, 32 integers + 8; the second half of the block in the high nibbles ---- */

#define Q4_0_BYTES (2 + GROUP / 2)

static void nibbles(const uint8_t *from, uint8_t *out)
{
	for (int i = 0; i < GROUP / 2; i++) {
		out[i] = from[i] & 15;
		out[GROUP / 2 + i] = from[i] >> 4;
	}
}

static void q4_0_block(const uint8_t *b, uint8_t *out)
{
	nibbles(b + 2, out);
}

static void q4_0_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		       uint8_t *out)
{
	codes_of(q, row, k0, k, GROUP, Q4_0_BYTES, q4_0_block, out);
}

static float q4_0_scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return half_at(block_at(q, row, group, GROUP, Q4_0_BYTES));
}

/* ---- 32 weights d q + m, q = 0..15, as (code - 8 - zero) scale ---- */

struct offset_group {
	float d, m;
	uint8_t q[GROUP];
};

float moe_int4_quantise_zero(int64_t k, const float *x, uint8_t *codes,
			     int8_t *zero); /* codelets/formats/gptq.c */

static void values_of(const struct offset_group *o, float *x)
{
	for (int i = 0; i < GROUP; i++)
		x[i] = o->d * (float)o->q[i] + o->m;
}

/* The scale with the least squared error for these codes and this zero. */
static float fit(const struct offset_group *o, int zero)
{
	float x[GROUP];
	double xy = 0, yy = 0;

	values_of(o, x);
	for (int i = 0; i < GROUP; i++) {
		double y = (double)((int)o->q[i] - zero);

		xy += y * (double)x[i];
		yy += y * y;
	}
	return yy > 0 ? (float)(xy / yy) : o->d;
}

/*
 * Codes, zero (as the format has it: below 8) and scale; codes may be o->q. All equal: value 1
 * times them. An offset beyond 4 bits (all weights of one sign, far from 0): quantised anew. Not
 * finite: so is the scale.
 */
static float near(const struct offset_group *o, uint8_t *codes, int *zero)
{
	float z = -o->m / o->d, x[GROUP], scale = NAN;
	int8_t packed;

	memmove(codes, o->q, GROUP);
	*zero = 0;
	if (!isfinite(o->d) || !isfinite(o->m))
		return scale;
	if (o->d == 0) {
		memset(codes, o->m < 0 ? 7 : 9, GROUP);
		scale = fabsf(o->m);
	} else if (z > -.5f && z < 15.5f) {
		*zero = (int)nearbyintf(z) - 8;
		scale = fit(o, *zero + 8);
	} else {
		values_of(o, x);
		scale = moe_int4_quantise_zero(GROUP, x, codes, &packed);
		*zero = packed;
	}
	return moe_bf16_to_f32(moe_f32_to_bf16(scale));
}

/* ---- Q4_1: d, m F16, 32 integers as Q4_0's ---- */

#define Q4_1_BYTES (4 + GROUP / 2)

static void q4_1_open(const uint8_t *b, struct offset_group *o)
{
	o->d = half_at(b);
	o->m = half_at(b + 2);
	nibbles(b + 4, o->q);
}

static void q4_1_block(const uint8_t *b, uint8_t *out)
{
	struct offset_group o;
	int zero;

	q4_1_open(b, &o);
	near(&o, out, &zero);
}

static void q4_1_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		       uint8_t *out)
{
	codes_of(q, row, k0, k, GROUP, Q4_1_BYTES, q4_1_block, out);
}

static float q4_1_scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	struct offset_group o;
	int zero;

	q4_1_open(block_at(q, row, group, GROUP, Q4_1_BYTES), &o);
	return near(&o, o.q, &zero);
}

static int q4_1_zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	struct offset_group o;
	int zero;

	q4_1_open(block_at(q, row, group, GROUP, Q4_1_BYTES), &o);
	near(&o, o.q, &zero);
	return zero;
}

static void exact_groups(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
			 float *dst,
			 void (*open)(const struct moe_quantised *q, int64_t row, int64_t group,
				      struct offset_group *o))
{
	struct offset_group o;
	float x[GROUP];

	while (k > 0) {
		int64_t at = k0 % GROUP, n = MOE_MIN(GROUP - at, k);

		open(q, row, k0 / GROUP, &o);
		values_of(&o, x);
		memcpy(dst, x + at, (size_t)n * sizeof *dst);
		dst += n;
		k0 += n;
		k -= n;
	}
}

static void q4_1_group(const struct moe_quantised *q, int64_t row, int64_t group,
		       struct offset_group *o)
{
	q4_1_open(block_at(q, row, group, GROUP, Q4_1_BYTES), o);
}

static void q4_1_exact(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		       float *dst)
{
	exact_groups(q, row, k0, k, dst, q4_1_group);
}

/*
 * ---- Q4_K: 8 groups of 32; d and dmin F16, 12 bytes of 6-bit scales and offsets, then 128 bytes:
 * groups 2 i and 2 i + 1 in the low and high nibbles of 32 of them ----
 */

#define Q4_K_BYTES (4 + 12 + SUPER / 2)

static void q4_k_open(const uint8_t *b, int group, struct offset_group *o)
{
	const uint8_t *s = b + 4, *from = b + 16 + group / 2 * GROUP;
	int scale, offset;

	if (group < 4) {
		scale = s[group] & 63;
		offset = s[group + 4] & 63;
	} else { /* four bits there, two above the scales and offsets of the first groups */
		scale = (s[group + 4] & 15) | s[group - 4] >> 6 << 4;
		offset = s[group + 4] >> 4 | s[group] >> 6 << 4;
	}
	o->d = half_at(b) * (float)scale;
	o->m = -(half_at(b + 2) * (float)offset);
	for (int i = 0; i < GROUP; i++)
		o->q[i] = from[i] >> group % 2 * 4 & 15;
}

static void q4_k_group(const struct moe_quantised *q, int64_t row, int64_t group,
		       struct offset_group *o)
{
	q4_k_open(block_at(q, row, group / 8, SUPER, Q4_K_BYTES), (int)(group % 8), o);
}

static void q4_k_block(const uint8_t *b, uint8_t *out)
{
	struct offset_group o;
	int zero;

	for (int g = 0; g < SUPER / GROUP; g++) {
		q4_k_open(b, g, &o);
		near(&o, out + g * GROUP, &zero);
	}
}

static void q4_k_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		       uint8_t *out)
{
	codes_of(q, row, k0, k, SUPER, Q4_K_BYTES, q4_k_block, out);
}

static float q4_k_scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	struct offset_group o;
	int zero;

	q4_k_group(q, row, group, &o);
	return near(&o, o.q, &zero);
}

static int q4_k_zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	struct offset_group o;
	int zero;

	q4_k_group(q, row, group, &o);
	near(&o, o.q, &zero);
	return zero;
}

static void q4_k_exact(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		       float *dst)
{
	exact_groups(q, row, k0, k, dst, q4_k_group);
}

/*
 * ---- Q6_K: 16 groups of 16; 128 bytes of low nibbles, 64 of two high bits, 16 signed scales, d
 * F16. Each half of 128 weights: 64 low bytes hold rows of 32 weights 0, 1 (low nibbles) and 2, 3
 * (high), 32 bytes their high bits ----
 */

#define Q6_K_GROUP 16
#define Q6_K_BYTES (SUPER / 2 + SUPER / 4 + SUPER / Q6_K_GROUP + 2)

static void q6_k_block(const uint8_t *b, uint8_t *out)
{
	for (int i = 0; i < SUPER; i++) {
		int half = i / 128, quarter = i % 128 / 32, l = i % 32;
		int low = b[half * 64 + quarter % 2 * 32 + l] >> quarter / 2 * 4 & 15;
		int high = b[SUPER / 2 + half * 32 + l] >> quarter * 2 & 3;

		out[i] = (uint8_t)(int8_t)((low | high << 4) - 32);
	}
}

static void q6_k_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		       uint8_t *out)
{
	codes_of(q, row, k0, k, SUPER, Q6_K_BYTES, q6_k_block, out);
}

static float q6_k_scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	const uint8_t *b = block_at(q, row, group / (SUPER / Q6_K_GROUP), SUPER, Q6_K_BYTES) +
			   SUPER / 2 + SUPER / 4;

	return half_at(b + SUPER / Q6_K_GROUP) * (float)(int8_t)b[group % (SUPER / Q6_K_GROUP)];
}

/* ---- types ---- */

static const struct moe_code_reader q8_0_reader = { q8_0_codes, q8_0_scale, NULL };
static const struct moe_code_reader q4_0_reader = { q4_0_codes, q4_0_scale, NULL };
static const struct moe_code_reader q4_1_reader = { q4_1_codes, q4_1_scale, q4_1_zero };
static const struct moe_code_reader q4_k_reader = { q4_k_codes, q4_k_scale, q4_k_zero };
static const struct moe_code_reader q6_k_reader = { q6_k_codes, q6_k_scale, NULL };

static const struct moe_st_codes q8_0 = {
	.q = { .coding = { &moe_format_int8, MOE_F16, false, GROUP, 0, MOE_COMPUTE_DEFAULT, 1 },
	       .reader = &q8_0_reader },
};
static const struct moe_st_codes q4_0 = {
	.q = { .coding = { &moe_format_int4, MOE_F16, false, GROUP, 0, MOE_COMPUTE_DEFAULT, 1 },
	       .reader = &q4_0_reader },
};
static const struct moe_st_codes q4_1 = {
	.q = { .coding = { &moe_format_int4, MOE_BF16, true, GROUP, 0, MOE_COMPUTE_DEFAULT, 1 },
	       .reader = &q4_1_reader },
	.exact = q4_1_exact,
};
static const struct moe_st_codes q4_k = {
	.q = { .coding = { &moe_format_int4, MOE_BF16, true, GROUP, 0, MOE_COMPUTE_DEFAULT, 1 },
	       .reader = &q4_k_reader },
	.exact = q4_k_exact,
};
/* d times a scale of 8 bits: F32 holds the product exactly, F16 does not. */
static const struct moe_st_codes q6_k = {
	.q = { .coding = { &moe_format_int8, MOE_F32, false, Q6_K_GROUP, 0, MOE_COMPUTE_DEFAULT, 1 },
	       .reader = &q6_k_reader },
};

/* By the numbers that files have. */
static const struct moe_gguf_type types[] = {
	[0] = { "F32", 1, 4, MOE_F32, NULL },
	[1] = { "F16", 1, 2, MOE_F16, NULL },
	[2] = { "Q4_0", GROUP, Q4_0_BYTES, MOE_DTYPE_COUNT, &q4_0 },
	[3] = { "Q4_1", GROUP, Q4_1_BYTES, MOE_DTYPE_COUNT, &q4_1 },
	[6] = { .name = "Q5_0" },
	[7] = { .name = "Q5_1" },
	[8] = { "Q8_0", GROUP, Q8_0_BYTES, MOE_DTYPE_COUNT, &q8_0 },
	[9] = { .name = "Q8_1" },
	[10] = { .name = "Q2_K" },
	[11] = { .name = "Q3_K" },
	[12] = { "Q4_K", SUPER, Q4_K_BYTES, MOE_DTYPE_COUNT, &q4_k },
	[13] = { .name = "Q5_K" },
	[14] = { "Q6_K", SUPER, Q6_K_BYTES, MOE_DTYPE_COUNT, &q6_k },
	[15] = { .name = "Q8_K" },
	[16] = { .name = "IQ2_XXS" },
	[17] = { .name = "IQ2_XS" },
	[18] = { .name = "IQ3_XXS" },
	[19] = { .name = "IQ1_S" },
	[20] = { .name = "IQ4_NL" },
	[21] = { .name = "IQ3_S" },
	[22] = { .name = "IQ2_S" },
	[23] = { .name = "IQ4_XS" },
	[24] = { .name = "I8" },
	[25] = { .name = "I16" },
	[26] = { .name = "I32" },
	[27] = { .name = "I64" },
	[28] = { "F64", 1, 8, MOE_F64, NULL },
	[29] = { .name = "IQ1_M" },
	[30] = { "BF16", 1, 2, MOE_BF16, NULL },
	[34] = { .name = "TQ1_0" },
	[35] = { .name = "TQ2_0" },
	[39] = { .name = "MXFP4" },
};

const struct moe_gguf_type *moe_gguf_type(uint32_t number)
{
	return number < MOE_COUNT(types) && types[number].values ? &types[number] : NULL;
}

const char *moe_gguf_type_name(uint32_t number)
{
	return number < MOE_COUNT(types) && types[number].name ? types[number].name : "?";
}
