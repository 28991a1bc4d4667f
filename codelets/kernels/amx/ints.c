/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Integer dot products (packed/ints.h) by tiles: y^T = W x^T. A block of x is a right operand as it
 * lies; codes of a block, [k/4][16 n][4], are made signed bytes [16 n][k], the left one, once for
 * up to AT_ONCE tiles of rows. What a block adds to a sum is scaled in f32, so a tile of integers
 * is stored for each: the stores, not the products, are most of the work. No speed was ever
 * measured: there was no CPU.
 */
#include "codelets/kernels/amx/amx.h"
#include "codelets/kernels/amx/tile.h"
#include "codelets/kernels/packed/ints.h"

#include <math.h>

#define AT_ONCE 8
#ifdef __AVX512F__
#define LANES(rows) 16 /* whole vectors */
#else
#define LANES(rows) (rows)
#endif

/* Tiles of rows that share a walk over a panel */
struct rows {
	const struct moe_int_rows *x;
	const struct moe_coded_panel *p;
	int count;			   /* of tiles */
	int first[AT_ONCE], rows[AT_ONCE]; /* of each; all as rows[0], or one less */
	float sum[AT_ONCE][AMX_ROWS][16];  /* [n][row] */
};

struct block {
	int64_t k0, group;
	int index, k; /* k: 32 or 64 */
	float w[16], zero[16];
};

/* The block's codes as signed bytes [16 n][k] in rows of 64 bytes */
static void left_operand(const struct moe_int_codes *c, const uint8_t *codes, int k,
			 uint32_t word[16][16])
{
	if (c->kind == MOE_INT_BYTES) {
		memcpy(word, codes, (size_t)k * 16);
	} else {
		for (int q = 0; q < k / 4; q += 2, codes += 64) {
			memcpy(word[q], codes, 64);
			for (int n = 0; n < 16; n++) {
				word[q + 1][n] = word[q][n] >> 4 & 0x0f0f0f0fu;
				word[q][n] &= 0x0f0f0f0fu;
			}
		}
		if (c->kind == MOE_INT_TABLE) {
			uint8_t *byte = (uint8_t *)word;
#ifdef __AVX512BW__
			__m512i table = _mm512_broadcast_i32x4(
				_mm_loadu_si128((const __m128i *)(const void *)c->table));

			for (int i = 0; i < 16 * k; i += 64)
				_mm512_store_si512(
					byte + i,
					_mm512_shuffle_epi8(table, _mm512_load_si512(byte + i)));
#else
			for (int i = 0; i < 16 * k; i++)
				byte[i] = c->table[byte[i]];
#endif
		}
	}
	OWN(transpose)(word);
}

/* One block's integers of tile `index`, [n][plane, row], added to the sums */
static void add_block(struct rows *r, int index, const struct block *b,
		      const int32_t c[AMX_ROWS][32])
{
	const struct moe_int_rows *x = r->x;
	int rows = r->rows[index], first = r->first[index], v = rows * x->planes;
	bool late = r->p->groups == 1, two = x->planes == 2;
	const int32_t *begin = x->start + first * x->planes * x->blocks + b->index * v;
	float scale[16] = { 0 }, sums[16] = { 0 };
	uint32_t start[32] = { 0 };

	memcpy(scale, x->scale + first * x->blocks + b->index * rows, (size_t)rows * sizeof *scale);
	memcpy(sums, x->sum + first * x->blocks + b->index * rows, (size_t)rows * sizeof *sums);
	for (int i = 0; i < v && x->codes.kind != MOE_INT_BYTES; i++) /* bytes are signed already */
		start[i] = (uint32_t)begin[i];
	for (int n = 0; n < AMX_ROWS; n++) {
		const int32_t *low = c[n] + (two ? rows : 0);
		const uint32_t *low_start = start + (two ? rows : 0);
		float *to = r->sum[index][n], zero = -b->zero[n] / x->codes.unit,
		      w = late ? 1 : b->w[n];

		for (int i = 0; i < LANES(rows); i++) {
			uint32_t s = (uint32_t)low[i] + low_start[i];
			float e;

			if (two) /* NaN rows may wrap */
				s += ((uint32_t)c[n][i] + start[i]) * 128;
			e = (float)(int32_t)s;
			if (r->p->coding->zero)
				e = fmaf(zero, sums[i], e);
			to[i] = fmaf(e * w, scale[i], to[i]);
		}
	}
}

static void configure(const struct rows *r, int k)
{
	struct amx_config config = { .palette = 1 };
	int planes = r->x->planes, most = r->rows[0] * planes * 4,
	    least = r->rows[r->count - 1] * planes * 4;

	amx_shape(&config, 0, AMX_ROWS, most);
	amx_shape(&config, 1, AMX_ROWS, least);
	amx_shape(&config, 2, AMX_ROWS, k);
	amx_shape(&config, 3, k / 4, most);
	amx_shape(&config, 4, k / 4, least);
	amx_load_config(&config);
}

/* All tiles times one block */
static void multiply(struct rows *r, const struct block *b)
{
	const struct moe_int_rows *x = r->x;
	uint32_t word[16][16] __attribute__((aligned(64)));
	int32_t c[AMX_ROWS][32] __attribute__((aligned(64))) = { { 0 } };
	const uint8_t *codes = r->p->codes + 16 * b->k0 * r->p->coding->format->bits / 8;

	if (b->k < 64)
		memset(word, 0, sizeof word);
	left_operand(&x->codes, codes, b->k, word);
	amx_load(2, word, AMX_ROW_BYTES);
	for (int i = 0; i < r->count; i++) {
		int v = r->rows[i] * x->planes;
		const int8_t *q = x->q + (int64_t)r->first[i] * x->planes * x->k + b->k0 * v;

		if (r->rows[i] == r->rows[0]) {
			amx_load(3, q, v * 4);
			amx_zero(0);
			amx_dp_s8(0, 2, 3);
			amx_store(0, c, sizeof c[0]);
		} else {
			amx_load(4, q, v * 4);
			amx_zero(1);
			amx_dp_s8(1, 2, 4);
			amx_store(1, c, sizeof c[0]);
		}
		add_block(r, i, b, c);
	}
}

static void put(const struct rows *r, const float w[16], float *y, int64_t ldy, enum moe_out out)
{
	bool late = r->p->groups == 1;

	for (int t = 0; t < r->count; t++)
		for (int i = 0; i < r->rows[t]; i++) {
			float *to = y + (r->first[t] + i) * ldy;

			for (int n = 0; n < MOE_PACK_N; n++) {
				float v = late ? r->sum[t][n][i] * w[n] : r->sum[t][n][i];

				to[n] = out == MOE_OUT_ADD ? to[n] + v : v;
			}
		}
}

static void walk(struct rows *r, float *y, int64_t ldy, enum moe_out out)
{
	const struct moe_int_rows *x = r->x;
	const struct moe_coding *coding = r->p->coding;
	struct block b = { .group = -1 };
	int configured = 0;

	memset(r->sum, 0, sizeof r->sum);
	for (; b.index < x->blocks; b.index++, b.k0 += x->block) {
		int64_t group = MOE_MIN((coding->phase + b.k0) / coding->group, r->p->groups - 1);

		b.k = (int)MOE_MIN(x->block, x->k - b.k0);
		if (group != b.group) {
			moe_coded_scales(r->p, group, b.w);
			moe_coded_zeros(r->p, group, b.zero);
			b.group = group;
		}
		if (b.k != configured) {
			if (configured)
				amx_release();
			configure(r, configured = b.k);
		}
		multiply(r, &b);
	}
	amx_release();
	put(r, b.w, y, ldy, out);
}

/* STREAM is STORE */
void OWN(fwd_ints)(const struct moe_int_rows *x, const struct moe_coded_panel *p, const char *next,
		   float *y, int64_t ldy, enum moe_out out)
{
	struct rows r = { .x = x, .p = p };
	int first, rows;

	(void)next;
	for (int i = 0; (rows = moe_int_tile(x, i, &first)) > 0; i++) {
		r.first[r.count] = first;
		r.rows[r.count] = rows;
		if (++r.count < AT_ONCE)
			continue;
		walk(&r, y, ldy, out);
		r.count = 0;
	}
	if (r.count)
		walk(&r, y, ldy, out);
}
