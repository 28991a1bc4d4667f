/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/format.h"

#include <math.h>
#include <stdlib.h>

const struct moe_format *moe_format_find(const char *name)
{
	for (int i = 0; moe_format_list[i]; i++)
		if (!strcmp(moe_format_list[i]->name, name))
			return moe_format_list[i];
	return NULL;
}

static const char *const compute_names[] = { "default", "bf16", "int16", "int8" };

/* -1: unknown */
static int wanted_compute(void)
{
	const char *name = getenv("MOESAIC_COMPUTE");

	for (int c = MOE_COMPUTE_BF16; name && *name && c <= MOE_COMPUTE_INT8; c++)
		if (!strcmp(name, compute_names[c]))
			return c;
	return name && *name ? -1 : MOE_COMPUTE_DEFAULT;
}

enum moe_status moe_compute_check(void)
{
	return wanted_compute() >= 0
		       ? MOE_OK
		       : moe_fail(MOE_ERR_CONFIG,
				  "MOESAIC_COMPUTE is \"%s\"; bf16, int16 or int8 is expected",
				  getenv("MOESAIC_COMPUTE"));
}

enum moe_compute moe_format_compute(const struct moe_format *f)
{
	int wanted = wanted_compute();

	if (wanted > 0)
		return (enum moe_compute)wanted;
	return f->compute ? f->compute : MOE_COMPUTE_BF16;
}

static const struct moe_coders *_Atomic coders;

void moe_coders_use(const struct moe_coders *c)
{
	coders = c;
}

const struct moe_coders *moe_coders(void)
{
	return coders;
}

float moe_largest(int64_t n, int64_t k, const float *x, int64_t ld)
{
	const struct moe_coders *c = moe_coders();
	float largest = 0;

	if (c) {
		uint32_t bits = c->largest(n, k, x, ld);

		memcpy(&largest, &bits, sizeof largest);
		return largest;
	}
	for (int64_t i = 0; i < n; i++)
		for (int64_t j = 0; j < k; j++)
			largest = MOE_MAX(largest, fabsf(x[i * ld + j]));
	return largest;
}

float moe_ue8m0(uint8_t v)
{
	return v == 255 ? NAN : ldexpf(1, v - 127);
}

float moe_scale_at(const void *scale, enum moe_dtype dtype, int64_t i)
{
	const char *at = (const char *)scale + (size_t)i * moe_dtype_size(dtype);
	float v = 0;

	if (dtype == MOE_SCALE_UE8M0)
		return moe_ue8m0(*(const uint8_t *)at);
	moe_to_f32(&v, at, dtype, 1);
	return v;
}

void moe_scale_put(void *scale, enum moe_dtype dtype, int64_t i, float v)
{
	char *at = (char *)scale + (size_t)i * moe_dtype_size(dtype);
	int e;

	if (dtype != MOE_SCALE_UE8M0) {
		moe_from_f32(at, dtype, &v, 1);
		return;
	}
	if (v != v) {
		*(uint8_t *)at = 255;
		return;
	}
	frexpf(v, &e);
	*(uint8_t *)at = (uint8_t)MOE_MAX(MOE_MIN(e + 126, 254), 0);
}

struct moe_coding moe_format_coding(const struct moe_format *f, int64_t k)
{
	return (struct moe_coding){ .format = f,
				    .scale = f->scale,
				    .zero = !f->quantise,
				    .group = f->group ? f->group : MOE_MAX(k, 1),
				    .rows = MOE_MAX(f->rows, 1) };
}

/* ---- what moe_quantise leaves: a byte per code, f32 scales ---- */

static void plain_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
			uint8_t *codes)
{
	memcpy(codes, (const uint8_t *)q->codes.data + row * q->k + k0, (size_t)k);
}

static int plain_zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return ((const int8_t *)q->zero.data)[row * moe_groups(&q->coding, q->k) + group];
}

static const struct moe_code_reader plain = { plain_codes, moe_stored_scale_at, NULL };
static const struct moe_code_reader with_zero = { plain_codes, moe_stored_scale_at, plain_zero };

/* A scale as a file of this dtype holds it; powers of two so that nothing saturates. */
static float rounded(float scale, enum moe_dtype dtype)
{
	uint8_t at[8];
	int e;

	if (dtype == MOE_SCALE_UE8M0 && frexpf(scale, &e) != .5f)
		scale = ldexpf(1, e);
	moe_scale_put(at, dtype, 0, scale);
	return moe_scale_at(at, dtype, 0);
}

static enum moe_status round_scale(const struct moe_quantised *q, float *scale, int64_t row,
				   int64_t column)
{
	float v = rounded(*scale, q->coding.scale);

	if (!isfinite(v) && !isnan(*scale)) /* weights are finite: their quotients by 15 or 127 may be beyond F16 */
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"row %lld, column %lld needs the scale %g, beyond %s",
				(long long)row, (long long)column, (double)*scale,
				moe_dtype_name(q->coding.scale));
	*scale = v;
	return MOE_OK;
}

/* By the bits. */
static bool all_finite(int64_t n, int64_t k, const float *x, int64_t ld)
{
	const struct moe_coders *c = moe_coders();
	uint32_t most = c ? c->largest(n, k, x, ld) : 0;

	for (int64_t i = 0; !c && i < n; i++)
		for (int64_t j = 0; j < k; j++) {
			uint32_t bits;

			memcpy(&bits, &x[i * ld + j], sizeof bits);
			most = MOE_MAX(most, bits & 0x7fffffffu);
		}
	return most < 0x7f800000u;
}

/* *exact: the scale before it was rounded to the coding's dtype. */
static float quantise_block(const struct moe_coding *c, int64_t n, int64_t k, const float *x, int64_t ld,
			    uint8_t *codes, int64_t ld_codes, int8_t *zero, float *exact)
{
	const struct moe_format *f = c->format;
	float scale;

	*exact = c->zero ? f->quantise_zero(k, x, codes, zero) : f->quantise(n, k, x, ld, codes, ld_codes);
	scale = rounded(*exact, c->scale);
	if (!c->zero && c->scale != f->scale && scale > 0 && isfinite(scale))
		f->encode(n, k, x, ld, scale, codes, ld_codes);
	return scale;
}

float moe_quantise_block(const struct moe_coding *c, int64_t n, int64_t k, const float *x, int64_t ld,
			 uint8_t *codes, int64_t ld_codes, int8_t *zero)
{
	float exact;

	if (all_finite(n, k, x, ld))
		return quantise_block(c, n, k, x, ld, codes, ld_codes, zero, &exact);
	for (int64_t i = 0; i < n; i++)
		memset(codes + i * ld_codes, 0, (size_t)k);
	if (c->zero)
		*zero = 0;
	return NAN;
}

/* Rows first..first+n, which share scales; `strip` holds them as f32. */
static enum moe_status quantise_rows(const struct moe_quantised *q, const float *strip,
				     int64_t first, int64_t n)
{
	int64_t groups = moe_groups(&q->coding, q->k), k = q->k;
	float *scale = (float *)q->scale.data + first / q->coding.rows * groups;

	for (int64_t i = 0; i < n * k; i++)
		if (!isfinite(strip[i]))
			return moe_fail(
				MOE_ERR_FORMAT,
				"row %lld, column %lld is not finite: it cannot be quantised",
				(long long)(first + i / k), (long long)(i % k));
	for (int64_t g = 0; g < groups; g++) {
		int64_t k0 = g * q->coding.group, width = MOE_MIN(q->coding.group, k - k0);
		uint8_t *codes = (uint8_t *)q->codes.data + first * k + k0;
		int8_t *zero = q->coding.zero ? (int8_t *)q->zero.data + first * groups + g : NULL;

		quantise_block(&q->coding, n, width, strip + k0, k, codes, k, zero, &scale[g]);
		MOE_TRY(round_scale(q, &scale[g], first, k0));
	}
	return MOE_OK;
}

/* Memory of a matrix: f32 scales, codes, zeros; and a strip of `rows` rows in front of them. */
static enum moe_status make_room(struct moe_quantised *q, float **strip, void **memory)
{
	int64_t groups = moe_groups(&q->coding, q->k), rows = q->coding.rows,
		blocks = (q->n + rows - 1) / rows;
	size_t scales = (size_t)(blocks * groups) * sizeof(float), codes = (size_t)(q->n * q->k);
	size_t wide = (size_t)(MOE_MIN(rows, q->n) * q->k) * sizeof(float);
	char *base = moe_alloc(1, wide + scales + codes + (size_t)(q->n * groups) + 64);

	*memory = base;
	if (!base)
		return moe_fail(MOE_ERR_NOMEM, "no memory to quantise a [%lld, %lld] weight",
				(long long)q->n, (long long)q->k);
	*strip = (float *)(void *)base;
	q->reader = q->coding.zero ? &with_zero : &plain;
	q->scale = (struct moe_array){
		.data = base + wide, .dtype = MOE_F32, .ndim = 2, .shape = { blocks, groups }
	};
	q->codes = (struct moe_array){
		.data = base + wide + scales, .dtype = MOE_U8, .ndim = 2, .shape = { q->n, q->k }
	};
	q->zero = (struct moe_array){ .data = base + wide + scales + codes,
				      .dtype = MOE_I8,
				      .ndim = 2,
				      .shape = { q->n, groups } };
	return MOE_OK;
}

enum moe_status moe_quantise_as(const void *x, enum moe_dtype dtype, int64_t ld,
				struct moe_quantised *q, void **memory)
{
	const struct moe_format *f = q->coding.format;
	size_t size = moe_dtype_size(dtype);
	enum moe_status st = MOE_OK;
	float *strip = NULL;

	*memory = NULL;
	if (q->coding.zero ? !f->quantise_zero : !f->quantise)
		return moe_fail(MOE_ERR_UNSUPPORTED, "weights cannot be made %s from floats",
				f->name);
	MOE_TRY(make_room(q, &strip, memory));
	for (int64_t first = 0; first < q->n && st == MOE_OK; first += q->coding.rows) {
		int64_t count = MOE_MIN(q->coding.rows, q->n - first);

		for (int64_t i = 0; i < count; i++)
			moe_to_f32(strip + i * q->k,
				   (const char *)x + (size_t)((first + i) * ld) * size, dtype,
				   (size_t)q->k);
		st = quantise_rows(q, strip, first, count);
	}
	return st;
}

enum moe_status moe_quantise(const struct moe_format *f, const void *x, enum moe_dtype dtype,
			     int64_t n, int64_t k, int64_t ld, struct moe_quantised *q,
			     void **memory)
{
	*q = (struct moe_quantised){
		.coding = moe_format_coding(f, k), .n = n, .k = k
	};
	return moe_quantise_as(x, dtype, ld, q, memory);
}

enum moe_status moe_quantised_copy(const struct moe_quantised *from, int64_t row0, int64_t step,
				   struct moe_quantised *q, void **memory)
{
	int64_t groups = moe_groups(&q->coding, q->k);
	float *strip = NULL, *scale;

	MOE_TRY(make_room(q, &strip, memory));
	scale = q->scale.data;
	for (int64_t i = 0; i < q->n; i++) {
		int64_t row = row0 + i * step;

		from->reader->codes(from, row, 0, q->k, (uint8_t *)q->codes.data + i * q->k);
		for (int64_t g = 0; g < groups; g++) {
			if (i % q->coding.rows == 0) {
				*scale = from->reader->scale(from, row, g);
				MOE_TRY(round_scale(q, scale++, row, g * q->coding.group));
			}
			if (q->coding.zero)
				((int8_t *)q->zero.data)[i * groups + g] =
					(int8_t)(from->coding.zero
							 ? from->reader->zero(from, row, g)
							 : 0);
		}
	}
	return MOE_OK;
}

void moe_dequantise_row(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
			float *dst)
{
	const struct moe_coding *c = &q->coding;
	const float *values = c->format->values;
	uint8_t codes[256];

	while (k > 0) {
		int64_t g = k0 / c->group, n = MOE_MIN(MOE_MIN(k, (g + 1) * c->group - k0), 256);
		float scale = q->reader->scale(q, row, g);
		float zero = c->zero ? (float)q->reader->zero(q, row, g) : 0;

		q->reader->codes(q, row, k0, n, codes);
		for (int64_t i = 0; i < n; i++)
			dst[i] = (values[codes[i]] - zero) * scale;
		k0 += n;
		k -= n;
		dst += n;
	}
}

enum moe_status moe_check_scales(const struct moe_quantised *q, const char *name)
{
	int64_t groups = moe_groups(&q->coding, q->k);

	for (int64_t n = 0; n < q->n; n += q->coding.rows)
		for (int64_t g = 0; g < groups; g++) {
			float v = q->reader->scale(q, n, g);

			if (!isfinite(v))
				return moe_fail(MOE_ERR_FORMAT,
						"%s: the scale of row %lld, column %lld is %s",
						name, (long long)n,
						(long long)(g * q->coding.group),
						isnan(v) ? "NaN" : "infinite");
		}
	return MOE_OK;
}

enum moe_status moe_stored_dtype(const char *name, const struct moe_array *a, enum moe_dtype want)
{
	return a->dtype == want ? MOE_OK
				: moe_fail(MOE_ERR_FORMAT, "%s has dtype %s; %s is expected", name,
					   moe_dtype_name(a->dtype), moe_dtype_name(want));
}

enum moe_status moe_stored_shape(const char *name, const struct moe_array *a, int64_t rows,
				 int64_t cols)
{
	int64_t want[2] = { rows, cols };
	char got[64], expected[64];

	if (a->ndim == 2 && a->shape[0] == rows && a->shape[1] == cols)
		return MOE_OK;
	return moe_fail(MOE_ERR_FORMAT, "%s has shape %s; %s is expected", name,
			moe_shape_text(a->ndim, a->shape, got, sizeof got),
			moe_shape_text(2, want, expected, sizeof expected));
}

enum moe_status moe_stored_scale(const char *name, const struct moe_array *a)
{
	if (a->dtype == MOE_F32 || a->dtype == MOE_BF16 || a->dtype == MOE_F16)
		return MOE_OK;
	return moe_fail(MOE_ERR_FORMAT, "%s has dtype %s; scales are F32, BF16 or F16", name,
			moe_dtype_name(a->dtype));
}

enum moe_status moe_stored_group(const char *name, int64_t k, int64_t groups, int64_t *group)
{
	*group = groups > 0 ? (k + groups - 1) / groups : 0;
	if (groups > 0 && k % groups == 0)
		return MOE_OK;
	return moe_fail(MOE_ERR_FORMAT, "%s has %lld groups, which do not divide %lld columns",
			name, (long long)groups, (long long)k);
}

enum moe_status moe_stored_multiple(const struct moe_quantised *q, int64_t rows_by, int64_t by)
{
	if (q->n % rows_by == 0 && q->k % by == 0)
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"a [%lld, %lld] weight: %s takes rows by %lld and columns by %lld",
			(long long)q->n, (long long)q->k, q->coding.format->name,
			(long long)rows_by, (long long)by);
}

void moe_stored_set(struct moe_array *a, enum moe_dtype dtype, int64_t rows, int64_t cols)
{
	a->dtype = dtype;
	a->ndim = 2;
	a->shape[0] = rows;
	a->shape[1] = cols;
}

/* One code a byte, row-major. */
static void store_bytes(const struct moe_quantised *q, uint8_t *to)
{
	for (int64_t n = 0; n < q->n; n++)
		q->reader->codes(q, n, 0, q->k, to + n * q->k);
}

void moe_store_scales(const struct moe_quantised *q, const struct moe_array *scale)
{
	int64_t groups = moe_groups(&q->coding, q->k), at = 0;

	for (int64_t n = 0; n < q->n; n += q->coding.rows)
		for (int64_t g = 0; g < groups; g++)
			moe_scale_put(scale->data, scale->dtype, at++, q->reader->scale(q, n, g));
}

uint8_t moe_stored_byte(const struct moe_array *a, int64_t at)
{
	return ((const uint8_t *)a->data)[at];
}

uint32_t moe_stored_u32(const struct moe_array *a, int64_t at)
{
	uint32_t v;

	memcpy(&v, (const char *)a->data + at * 4, sizeof v);
	return v;
}

float moe_stored_scale_at(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return moe_scale_at(q->scale.data, q->scale.dtype,
			    row / q->coding.rows * moe_groups(&q->coding, q->k) + group);
}

enum moe_status moe_store_byte_codes(const struct moe_quantised *q, const struct moe_stored *s)
{
	store_bytes(q, s->codes.data);
	moe_store_scales(q, &s->scale);
	return MOE_OK;
}

bool moe_size_of_byte_codes(const struct moe_array *codes, const struct moe_array *scale, int64_t *n,
		 int64_t *k)
{
	(void)scale;
	*n = codes->shape[0];
	*k = codes->shape[1];
	return codes->ndim == 2;
}
