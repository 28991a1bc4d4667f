/* SPDX-License-Identifier: Apache-2.0 */
/* Weight formats alone: the value of every code, quantising, and what opening stored tensors
 * refuses. */
#include "codelets/format.h"
#include "tests/child.h"

#include <math.h>

const char moe_suite_name[] = "formats";

static const struct moe_format *format(const char *name)
{
	const struct moe_format *f = moe_format_find(name);

	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	return f;
}

/* ---- values ---- */

/* IEEE-like bits: sign, exponent, mantissa; largest exponents are ordinary numbers */
static double float_of(int code, int exponent, int mantissa, int bias)
{
	int m = code & ((1 << mantissa) - 1), e = code >> mantissa & ((1 << exponent) - 1);
	double v = e ? ldexp(1 + ldexp(m, -mantissa), e - bias) : ldexp(m, 1 - bias - mantissa);

	return code >> (exponent + mantissa) & 1 ? -v : v;
}

static void test_fp8_values(void)
{
	const struct moe_format *f = format("fp8");

	for (int c = 0; c < 256; c++) {
		float v = f->values[c];

		if ((c & 127) == 127)
			CHECK(isnan(v));
		else
			CHECK((double)v == float_of(c, 4, 3, 7) && !signbit(v) == !(c & 128));
	}
	CHECK(f->values[0x7e] == 448);
	CHECK(f->values[1] == 0x1p-9f);
}

static void test_small_values(void)
{
	for (int c = 0; c < 256; c++)
		CHECK(format("int8")->values[c] == (float)(int8_t)c);
	for (int c = 0; c < 16; c++) {
		CHECK(format("int4")->values[c] == (float)(c - 8));
		CHECK(format("gptq")->values[c] == (float)(c - 8));
		CHECK((double)format("mxfp4")->values[c] == float_of(c, 2, 1, 1));
	}
	for (int b = 0; b < 255; b++)
		CHECK((double)moe_ue8m0((uint8_t)b) == ldexp(1, b - 127));
	CHECK(isnan(moe_ue8m0(255)));
}

static void test_scales(void)
{
	uint8_t byte;

	for (int b = 0; b < 256; b++) {
		moe_scale_put(&byte, MOE_SCALE_UE8M0, 0, moe_ue8m0((uint8_t)b));
		CHECK(byte == b);
	}
	for (int i = 0; i < 65536; i++) {
		uint16_t v = (uint16_t)i, back;

		moe_scale_put(&back, MOE_BF16, 0, moe_scale_at(&v, MOE_BF16, 0));
		CHECK(back == v || isnan(moe_bf16_to_f32(v)));
		moe_scale_put(&back, MOE_F16, 0, moe_scale_at(&v, MOE_F16, 0));
		CHECK(back == v || isnan(moe_f16_to_f32(v)));
	}
}

/* ---- quantising ---- */

static float noise_at(int i)
{
	return (float)(sin(i * 12.9898) * cos(i * 0.37)) * (i % 97 ? 1 : 5);
}

/* The nearest value of the format at the block's scale, for every element. */
static void check_nearest(const struct moe_format *f, const struct moe_quantised *q, const float *x)
{
	float row[300];

	for (int64_t i = 0; i < q->n; i++) {
		moe_dequantise_row(q, i, 0, q->k, row);
		for (int64_t j = 0; j < q->k; j++) {
			float scale = q->reader->scale(q, i, j / q->coding.group), best = INFINITY;
			float zero = q->coding.zero
					     ? (float)q->reader->zero(q, i, j / q->coding.group)
					     : 0;

			for (int c = 0; c < 1 << f->bits; c++) /* ties: any */
				if (!isnan(f->values[c]))
					best = fminf(best,
						     fabsf((f->values[c] - zero) * scale -
							   x[i * q->k + j]));
			CHECK(fabsf(row[j] - x[i * q->k + j]) <= best * 1.0001f + 1e-12f);
		}
	}
}

static void test_quantise(void)
{
	enum { N = 141, KC = 300 };
	float *x = calloc(N * KC, sizeof *x);

	for (int i = 0; i < N * KC; i++)
		x[i] = i / KC == 7 ? 0 : noise_at(i); /* a row of zeros */
	for (int i = 0; moe_format_list[i]; i++) {
		const struct moe_format *f = moe_format_list[i];
		struct moe_quantised q;
		void *memory;

		CHECK_OK(moe_quantise(f, x, MOE_F32, N, KC, KC, &q, &memory));
		CHECK_OK(moe_check_scales(&q, "made"));
		check_nearest(f, &q, x);
		moe_free(memory);
		x[KC + 3] = NAN;
		CHECK_ERROR(moe_quantise(f, x, MOE_F32, N, KC, KC, &q, &memory), MOE_ERR_FORMAT,
			    "row 1, column 3");
		moe_free(memory);
		x[KC + 3] = noise_at(KC + 3);
	}
	free(x);
}

/* ---- stored tensors ---- */

/* Tensors of one matrix, [n, k], by name of the format. */
struct stored_case {
	const char *format;
	int layout;
	struct moe_stored s;
};

static struct moe_array array(enum moe_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c)
{
	struct moe_array r = { .dtype = dtype, .ndim = ndim, .shape = { a, b, c } };

	r.data = calloc((size_t)moe_shape_count(ndim, r.shape) + 8, 8);
	return r;
}

static enum moe_status open_case(const struct stored_case *c, struct moe_quantised *q)
{
	const struct moe_format *f = format(c->format);

	*q = (struct moe_quantised){ .coding = { .format = f }, .n = c->s.n, .k = c->s.k };
	q->codes = c->s.codes;
	q->scale = c->s.scale;
	q->zero = c->s.zero;
	return f->layout[c->layout].open(&c->s, q);
}

static struct stored_case case_of(const char *format_name, int64_t n, int64_t k)
{
	struct stored_case c = { format_name,
				 0,
				 { .codes_name = "X.codes",
				   .scale_name = "X.scale",
				   .zero_name = "X.zero",
				   .n = n,
				   .k = k } };

	if (!strcmp(format_name, "fp8")) {
		c.s.codes = array(MOE_F8_E4M3, 2, n, k, 0);
		c.s.scale = array(MOE_F32, 2, (n + 127) / 128, (k + 127) / 128, 0);
	} else if (!strcmp(format_name, "int8")) {
		c.s.codes = array(MOE_I8, 2, n, k, 0);
		c.s.scale = array(MOE_BF16, 2, n, 1, 0);
	} else if (!strcmp(format_name, "int4")) {
		c.s.codes = array(MOE_I32, 2, n, k / 8, 0);
		c.s.scale = array(MOE_BF16, 2, n, k / 32, 0);
	} else if (!strcmp(format_name, "mxfp4")) {
		c.s.codes = array(MOE_U8, 3, n, k / 32, 16);
		c.s.scale = array(MOE_U8, 2, n, k / 32, 0);
	} else {
		c.s.codes = array(MOE_I32, 2, k / 8, n, 0);
		c.s.scale = array(MOE_F16, 2, k / 32, n, 0);
		c.s.zero = array(MOE_I32, 2, k / 32, n / 8, 0);
	}
	return c;
}

static void free_case(struct stored_case *c)
{
	free(c->s.codes.data), free(c->s.scale.data), free(c->s.zero.data);
}

static const char *const format_names[] = { "fp8", "int8", "int4", "mxfp4", "gptq" };

/* Wrong shapes of codes and scales, wrong dtypes of scales: each says which tensor and what it
 * should be. */
static void test_malformed(void)
{
	for (size_t i = 0; i < MOE_COUNT(format_names); i++) {
		struct stored_case c = case_of(format_names[i], 160, 192), bad;
		struct moe_quantised q;

		CHECK_OK(open_case(&c, &q));
		CHECK(q.coding.group >= 1 && q.coding.rows >= 1 && q.reader);
		bad = c;
		bad.s.codes.shape[0]++;
		CHECK_ERROR(open_case(&bad, &q), MOE_ERR_FORMAT, "X.codes has shape");
		bad = c;
		bad.s.scale.shape[1] += 4;
		CHECK_ERROR(open_case(&bad, &q), MOE_ERR_FORMAT, "X.scale");
		bad = c;
		bad.s.scale.dtype = MOE_I64;
		CHECK_ERROR(open_case(&bad, &q), MOE_ERR_FORMAT, "X.scale has dtype I64");
		free_case(&c);
	}
}

/* Groups that do not divide the columns, and missing zeros. */
static void test_groups(void)
{
	struct stored_case c = case_of("int4", 16, 192);
	struct moe_quantised q;

	c.s.scale.shape[1] = 5;
	CHECK_ERROR(open_case(&c, &q), MOE_ERR_FORMAT,
		    "X.scale has 5 groups, which do not divide 192 columns");
	free_case(&c);
	c = case_of("mxfp4", 16, 176);
	CHECK_ERROR(open_case(&c, &q), MOE_ERR_FORMAT,
		    "groups of 32 columns, which do not divide 176");
	free_case(&c);
	c = case_of("gptq", 16, 64);
	free(c.s.zero.data);
	c.s.zero.data = NULL;
	CHECK_ERROR(open_case(&c, &q), MOE_ERR_FORMAT, "X.zero is missing");
	free_case(&c);
}

static void test_scale_values(void)
{
	struct stored_case c = case_of("fp8", 160, 300);
	struct moe_quantised q;

	CHECK_OK(open_case(&c, &q));
	CHECK_OK(moe_check_scales(&q, "X.scale"));
	((float *)c.s.scale.data)[4] = NAN;
	CHECK_ERROR(moe_check_scales(&q, "X.scale"), MOE_ERR_FORMAT,
		    "X.scale: the scale of row 128, column 128 is NaN");
	((float *)c.s.scale.data)[4] = INFINITY;
	CHECK_ERROR(moe_check_scales(&q, "X.scale"), MOE_ERR_FORMAT, "infinite");
	free_case(&c);
}

/* ---- packings, by hand ---- */

/* Every format's packing of codes that follow a rule, read back as one row each. */
static void fill_codes(struct stored_case *c, int (*code)(int64_t n, int64_t k))
{
	uint32_t *words = c->s.codes.data;
	uint8_t *bytes = c->s.codes.data;
	int64_t n = c->s.n, k = c->s.k;

	for (int64_t i = 0; i < n; i++)
		for (int64_t j = 0; j < k; j++) {
			uint32_t v = (uint32_t)code(i, j);

			if (!strcmp(c->format, "int4"))
				words[i * (k / 8) + j / 8] |= (v & 15) << 4 * (j % 8);
			else if (!strcmp(c->format, "gptq"))
				words[j / 8 * n + i] |= (v & 15) << 4 * (j % 8);
			else if (!strcmp(c->format, "mxfp4"))
				bytes[i * (k / 2) + j / 2] |= (uint8_t)((v & 15) << 4 * (j % 2));
			else
				bytes[i * k + j] = (uint8_t)v;
		}
}

static int rule(int64_t n, int64_t k)
{
	return (int)((n * 37 + k * 11 + k / 7) & 127);
}

static void test_packings(void)
{
	for (size_t i = 0; i < MOE_COUNT(format_names); i++) {
		struct stored_case c = case_of(format_names[i], 24, 96);
		struct moe_quantised q;
		uint8_t codes[96];

		fill_codes(&c, rule);
		CHECK_OK(open_case(&c, &q));
		for (int64_t n = 0; n < 24; n++)
			for (int64_t k0 = 0; k0 < 96; k0 += 31) {
				int64_t k = MOE_MIN(31, 96 - k0);

				q.reader->codes(&q, n, k0, k, codes);
				for (int64_t j = 0; j < k; j++)
					CHECK(codes[j] == (rule(n, k0 + j) &
							   ((1 << q.coding.format->bits) - 1)));
			}
		free_case(&c);
	}
}

/* AWQ packs 8 rows n per word, interleaved; GPTQ's zeros are stored less one. */
static void test_gptq_awq(void)
{
	static const int order[8] = { 0, 2, 4, 6, 1, 3, 5, 7 };
	struct stored_case c = case_of("gptq", 16, 64);
	struct moe_quantised q;
	uint32_t *words = c.s.codes.data, *zeros = c.s.zero.data;
	uint8_t code;

	zeros[1 * 2 + 1] = 0x7u << 4 * 3; /* group 1, row 11 */
	CHECK_OK(open_case(&c, &q));
	CHECK(q.reader->zero(&q, 11, 1) == 7 + 1 - 8);
	CHECK(q.reader->zero(&q, 10, 1) == 0 + 1 - 8);
	c.s.codes.shape[0] = 64;
	c.s.codes.shape[1] = 2;
	for (int i = 0; i < 8; i++) /* column 5, rows 8..15: nibble i is row order[i] */
		words[5 * 2 + 1] |= (uint32_t)(order[i] + 3) << 4 * i;
	CHECK_OK(open_case(&c, &q));
	for (int n = 0; n < 8; n++) {
		q.reader->codes(&q, 8 + n, 5, 1, &code);
		CHECK(code == n + 3);
	}
	CHECK(q.reader->zero(&q, 8 + 6, 1) == 7 - 8); /* nibble 3 */
	free_case(&c);
}

/* compressed-tensors packs zeros along the rows; older files have a byte each. */
static void test_int4_zeros(void)
{
	struct stored_case c = case_of("int4", 20, 64);
	struct moe_quantised q;

	c.s.zero = array(MOE_I32, 2, 3, 2, 0);
	((uint32_t *)c.s.zero.data)[2 * 2 + 1] = 0xbu << 4 * 3; /* row 19, group 1 */
	CHECK_OK(open_case(&c, &q));
	CHECK(q.coding.zero && q.reader->zero(&q, 19, 1) == 3 && q.reader->zero(&q, 18, 1) == -8);
	free(c.s.zero.data);
	c.s.zero = array(MOE_I8, 2, 20, 2, 0);
	((int8_t *)c.s.zero.data)[19 * 2 + 1] = -5;
	CHECK_OK(open_case(&c, &q));
	CHECK(q.reader->zero(&q, 19, 1) == -5);
	c.s.zero.shape[0] = 19;
	CHECK_ERROR(open_case(&c, &q), MOE_ERR_FORMAT,
		    "X.zero has shape [19, 2]; [20, 2] is expected");
	free_case(&c);
}

/* FP8 scales: blocks, rows or one. */
static void test_fp8_scales(void)
{
	struct stored_case c = case_of("fp8", 160, 300);
	struct moe_quantised q;
	float *scale = c.s.scale.data;

	for (int i = 0; i < 6; i++)
		scale[i] = (float)(i + 1);
	CHECK_OK(open_case(&c, &q));
	CHECK(q.reader->scale(&q, 127, 2) == 3 && q.reader->scale(&q, 159, 0) == 4);
	free(c.s.scale.data);
	c.s.scale = array(MOE_BF16, 2, 160, 1, 0);
	CHECK_OK(open_case(&c, &q));
	CHECK(q.coding.rows == 1 && q.coding.group == 300 && q.coding.scale == MOE_BF16);
	c.s.scale.ndim = 1;
	c.s.scale.shape[0] = 1;
	CHECK_OK(open_case(&c, &q));
	CHECK(q.coding.rows == 160);
	free_case(&c);
}

const struct moe_test moe_suite_tests[] = {
	{ "fp8: the value of all 256 codes", test_fp8_values },
	{ "int8, int4, mxfp4: the value of every code; ue8m0", test_small_values },
	{ "scales keep their bits", test_scales },
	{ "quantising takes the nearest value", test_quantise },
	{ "malformed tensors are named", test_malformed },
	{ "groups that do not divide, missing zeros", test_groups },
	{ "scales that are not finite", test_scale_values },
	{ "codes of every packing", test_packings },
	{ "gptq and awq", test_gptq_awq },
	{ "int4 zero points", test_int4_zeros },
	{ "fp8: blocks, rows, one scale", test_fp8_scales },
	{ NULL, NULL },
};
