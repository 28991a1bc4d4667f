/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/packed/ints.h"

#include <math.h>

static bool multiples_of(const struct moe_coding *c, int64_t k, int64_t block)
{
	return moe_groups(c, k) == 1 || (c->group % block == 0 && c->phase % block == 0);
}

int moe_int_block(const struct moe_coding *c, int64_t k)
{
	if (!moe_groups(c, k) || (c->format->bits == 8 && c->zero))
		return 0;
	return multiples_of(c, k, MOE_INT_BLOCK)   ? MOE_INT_BLOCK
	       : multiples_of(c, k, MOE_INT_LEAST) ? MOE_INT_LEAST
						   : 0;
}

/* u = value / unit + offset of every code of 4 bits, in whole numbers */
static bool table_of(const struct moe_format *f, float unit, struct moe_int_codes *codes)
{
	float least = 0;

	for (int i = 0; i < 16; i++) {
		if (f->values[i] / unit != rintf(f->values[i] / unit))
			return false;
		least = MOE_MIN(least, f->values[i] / unit);
	}
	*codes = (struct moe_int_codes){ MOE_INT_NIBBLES, (int)-least, unit, { 0 } };
	for (int i = 0; i < 16; i++) {
		codes->table[i] = (uint8_t)(f->values[i] / unit - least);
		if (codes->table[i] != i)
			codes->kind = MOE_INT_TABLE;
	}
	return true;
}

static bool codes_of(const struct moe_format *f, struct moe_int_codes *codes)
{
	if (f->bits == 4)
		return table_of(f, 1, codes) || table_of(f, .5f, codes);
	*codes = (struct moe_int_codes){ MOE_INT_BYTES, 128, 1, { 0 } };
	return f->codes == MOE_CODES_INTEGER;
}

/* Rows up to which codes of 4 (0) or 8 (1) bits are multiplied in two planes */
static int int16_rows(const struct moe_tiles *t, bool bytes)
{
	return t->int16_rows[bytes] ? t->int16_rows[bytes] : MOE_INT16_ROWS;
}

enum moe_compute moe_coded_compute(const struct moe_tiles *t, const struct moe_weight *W, int m)
{
	struct moe_int_codes codes;

	if (!t->fwd_ints || (t->ints && !t->ints()) || !moe_int_block(&W->coding, W->k) || !codes_of(W->coding.format, &codes))
		return MOE_COMPUTE_BF16;
	if (W->coding.compute == MOE_COMPUTE_INT16 && m > int16_rows(t, codes.kind == MOE_INT_BYTES))
		return MOE_COMPUTE_BF16;
	return W->coding.compute;
}

/* ---- operands ---- */

static int planes_of(enum moe_compute c)
{
	return c == MOE_COMPUTE_INT16 ? 2 : 1;
}

static size_t line(size_t bytes)
{
	return (bytes + 63) & ~(size_t)63;
}

/* Where the parts begin, after the struct; the strip, [m, MOE_INT_BLOCK] floats, is last. */
struct parts {
	size_t q, start, scale, sum, strip, end; /* bytes */
};

static struct parts parts_of(int m, int planes, int64_t k, int block)
{
	size_t M = (size_t)m, blocks = (size_t)((k + block - 1) / block), P = (size_t)planes;
	struct parts p;

	p.q = line(sizeof(struct moe_int_rows));
	p.start = p.q + line(M * P * (size_t)k);
	p.scale = p.start + line(M * P * blocks * sizeof(int32_t));
	p.sum = p.scale + line(M * blocks * sizeof(float));
	p.strip = p.sum + line(M * blocks * sizeof(float));
	p.end = p.strip + line(M * MOE_INT_BLOCK * sizeof(float));
	return p;
}

size_t moe_int_bytes(const struct moe_tiles *t, enum moe_compute compute, int m, int64_t k)
{
	size_t few;

	k = moe_round_up(k, MOE_PACK_K);
	if (!t->fwd_ints || compute < MOE_COMPUTE_INT16)
		return 0;
	few = parts_of(MOE_MIN(m, MOE_MAX(int16_rows(t, false), int16_rows(t, true))), 2, k, MOE_INT_LEAST).end;
	return compute < MOE_COMPUTE_INT8 ? few : MOE_MAX(few, parts_of(m, 1, k, MOE_INT_LEAST).end);
}

bool moe_int_alike(const struct moe_weight *a, const struct moe_weight *b)
{
	return a->coding.format == b->coding.format && a->coding.compute == b->coding.compute &&
	       a->k == b->k && moe_is_coded(a) &&
	       moe_int_block(&a->coding, a->k) == moe_int_block(&b->coding, b->k);
}

/* One block of all rows, from the strip */
static void pack_block(const struct moe_tiles *t, const struct moe_int_rows *x, int block,
		       const float *strip)
{
	int k0 = block * x->block, n = (int)MOE_MIN(x->block, x->k - k0), first, rows;
	int32_t sum[MOE_INT_MOST];

	for (int i = 0; (rows = moe_int_tile(x, i, &first)) > 0; i++) {
		int v = rows * x->planes;
		int32_t *start = x->start + first * x->planes * x->blocks + block * v;
		float *sums = x->sum + first * x->blocks + block * rows;
		float *scale = x->scale + first * x->blocks + block * rows;

		t->int_block(rows, x->planes, n, strip + (int64_t)first * n, n,
			     x->q + (int64_t)first * x->planes * x->k + (int64_t)k0 * v, sum, scale);
		/* rows with NaN or infinities have any sums, and a scale that makes NaN of them: they may wrap */
		for (int j = 0; j < v; j++)
			start[j] = (int32_t)(0u - (uint32_t)x->codes.offset * (uint32_t)sum[j]);
		for (int j = 0; j < rows; j++) {
			sums[j] = (float)(x->planes == 2 ? (int64_t)128 * sum[j] + sum[rows + j] : sum[j]);
			scale[j] *= x->codes.unit;
		}
	}
}

/* Rows of a tile. Where codes are looked up the table takes the registers of a row. */
static int limit_of(const struct moe_tiles *t, int planes, enum moe_int_kind kind)
{
	if (planes == 2 && t->int16_tile)
		return t->int16_tile / 2 - (kind == MOE_INT_TABLE);
	return MOE_INT_ROWS / planes;
}

const struct moe_int_rows *moe_int_operand(const struct moe_tiles *t, int m, const struct moe_weight *W,
					   const void *panel, int64_t width, void *memory)
{
	struct moe_int_rows *x = memory;
	enum moe_compute compute = MOE_COMPUTE_BF16;
	struct parts p;

	if (m > 0 && moe_is_coded(W))
		compute = moe_coded_compute(t, W, m);
	if (compute == MOE_COMPUTE_BF16)
		return NULL;
	x->m = m;
	x->planes = planes_of(compute);
	x->block = moe_int_block(&W->coding, W->k);
	x->k = moe_round_up(W->k, MOE_PACK_K);
	x->blocks = (int)((x->k + x->block - 1) / x->block);
	codes_of(W->coding.format, &x->codes);
	x->limit = limit_of(t, x->planes, x->codes.kind);
	p = parts_of(m, x->planes, x->k, x->block);
	x->q = (int8_t *)memory + p.q;
	x->start = (int32_t *)(void *)((char *)memory + p.start);
	x->scale = (float *)(void *)((char *)memory + p.scale);
	x->sum = (float *)(void *)((char *)memory + p.sum);
	for (int b = 0; b < x->blocks; b++) {
		float *strip = (float *)(void *)((char *)memory + p.strip);
		int64_t k0 = (int64_t)b * x->block, n = MOE_MIN(x->block, x->k - k0);

		t->unpack_fwd(m, panel, width, k0, n, strip, n);
		pack_block(t, x, b, strip);
	}
	return x;
}

/* ---- plain C ---- */

static float largest_of(int n, const float *x)
{
	uint32_t most = 0, bits;
	float largest;

	for (int i = 0; i < n; i++) { /* as integers: NaN is the largest */
		memcpy(&bits, x + i, sizeof bits);
		most = MOE_MAX(most, bits & 0x7fffffffu);
	}
	memcpy(&largest, &most, sizeof largest);
	return largest;
}

void moe_int_block_plain(int rows, int planes, int n, const float *x, int64_t ld, int8_t *q,
			 int32_t *sum, float *scale)
{
	float limit = planes == 2 ? MOE_INT_LARGEST2 : MOE_INT_LARGEST;
	int v = rows * planes;

	memset(sum, 0, (size_t)v * sizeof *sum);
	for (int i = 0; i < rows; i++, x += ld) {
		float largest = largest_of(n, x), inverse = largest > MOE_INT_TINY ? limit / largest : 0;

		scale[i] = largest * (1 / limit);
		for (int k = 0; k < n; k++) {
			float r = nearbyintf(x[k] * inverse);
			int all = r == r ? (int)r : 0, hi = (all + 64) >> 7;
			int8_t *at = q + (int64_t)(k / 4 * v + i) * 4 + k % 4;
			int8_t *low = planes == 2 ? at + rows * 4 : at;

			if (planes == 2) {
				*at = (int8_t)hi;
				sum[i] += hi;
				all -= hi * 128;
			}
			*low = (int8_t)all;
			sum[planes == 2 ? rows + i : i] += all;
		}
	}
}

static int byte_of(const struct moe_int_codes *c, const uint8_t *codes, int n, int64_t k)
{
	uint8_t b = c->kind == MOE_INT_BYTES ? codes[k / 4 * 64 + n * 4 + k % 4]
					     : codes[k / 8 * 64 + n * 4 + k % 4];

	if (c->kind == MOE_INT_BYTES)
		return b ^ 0x80;
	b = (uint8_t)(b >> k % 8 / 4 * 4 & 15);
	return c->kind == MOE_INT_TABLE ? c->table[b] : b;
}

/* The sum of a block for row i of a tile and row n of the weight */
static int32_t block_sum(const struct moe_int_rows *x, const uint8_t *codes, const int8_t *q,
			 const int32_t *start, int rows, int i, int n, int64_t k0, int64_t k1)
{
	int32_t s[2] = { 0 };

	for (int p = 0; p < x->planes; p++) {
		s[p] = start[p * rows + i];
		for (int64_t k = k0; k < k1; k++)
			s[p] += byte_of(&x->codes, codes, n, k) *
				q[(k / 4 * rows * x->planes + p * rows + i) * 4 + k % 4];
	}
	return x->planes == 2 ? s[0] * 128 + s[1] : s[0];
}

static void plain_rows(const struct moe_int_rows *x, const struct moe_coded_panel *p, int first,
		       int rows, float *y, int64_t ldy, enum moe_out out)
{
	const int8_t *q = x->q + (int64_t)first * x->planes * x->k;
	float sum[MOE_INT_MOST][MOE_PACK_N] = { 0 }, w[MOE_PACK_N], zero[MOE_PACK_N];
	bool late = p->groups == 1;

	for (int b = 0; b < x->blocks; b++) {
		int64_t k0 = (int64_t)b * x->block, k1 = MOE_MIN(k0 + x->block, x->k);
		int64_t group = MOE_MIN((p->coding->phase + k0) / p->coding->group, p->groups - 1);
		const int32_t *start = x->start + first * x->planes * x->blocks +
				       b * rows * x->planes;
		const float *scale = x->scale + first * x->blocks + b * rows;
		const float *sums = x->sum + first * x->blocks + b * rows;

		moe_coded_scales(p, group, w);
		moe_coded_zeros(p, group, zero);
		for (int i = 0; i < rows; i++)
			for (int n = 0; n < MOE_PACK_N; n++) {
				float s = (float)block_sum(x, p->codes, q, start, rows, i, n, k0,
							   k1);

				if (p->coding->zero)
					s = fmaf(-zero[n] / x->codes.unit, sums[i], s);
				sum[i][n] = fmaf(late ? s : s * w[n], scale[i], sum[i][n]);
			}
	}
	for (int i = 0; i < rows; i++)
		for (int n = 0; n < MOE_PACK_N; n++) {
			float v = late ? sum[i][n] * w[n] : sum[i][n], *to = y + i * ldy + n;

			*to = out == MOE_OUT_ADD ? *to + v : v;
		}
}

void moe_int_forward_plain(const struct moe_int_rows *x, const struct moe_coded_panel *p,
			   const char *next, float *y, int64_t ldy, enum moe_out out)
{
	int first, rows;

	(void)next;
	for (int i = 0; (rows = moe_int_tile(x, i, &first)) > 0; i++)
		plain_rows(x, p, first, rows, y + first * ldy, ldy, out);
}
