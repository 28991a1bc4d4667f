/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on 4-bit codes and 8-bit integers, more than FEW_ROWS rows a tile. Before each step a quarter of the next unit
 * is decoded into memory, so the registers that hold weights and x are free for tables and orders. Loading those for
 * every vector took int4 from .92 to .88 of BF16's speed at 32 rows: Zen 4 loads 64 bytes once a cycle, and the tile
 * has its own loads.
 */
#include "codelets/kernels/avx512_bf16/fwd_coded.h"

#define UNIT 4 /* steps, all of one group; as many as there are vectors in a step */

/* What decodes a unit */
enum unit_kind {
	UNIT_PRODUCTS, /* 4 bits: tables are made for it, by products */
	UNIT_POWERS,   /* 4 bits: the same by exponents, for scales that are powers of two; no zeros */
	UNIT_STORED,   /* 4 bits: tables are made once per group, in memory */
	UNIT_INTEGERS, /* 8 bits */
	UNIT_KINDS
};

/* What UNIT_POWERS adds exponents to; returns which values are not 0. */
INLINE __mmask32 power_values(const float *values, struct coded_tables *t)
{
	__m512 v = _mm512_loadu_ps(values);
	__m512i both = two(v, v);
	__mmask32 live = _mm512_test_epi16_mask(both, _mm512_set1_epi16(0x7fff));

	_mm512_store_si512(t->values, _mm512_mask_sub_epi16(both, live, both, _mm512_set1_epi16(127 << 7)));
	return live;
}

INLINE void group_scales(const struct moe_coded_panel *p, int64_t group, const enum unit_kind kind,
			 struct coded_tables *t)
{
	__m512 scale;

	if (kind == UNIT_POWERS) {
		__m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)(p->scale + group * 16));

		_mm512_store_si512(t->scale, _mm512_castsi256_si512(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7)));
		return;
	}
	if (p->coding->scale == MOE_BF16)
		scale = scales_of(p, MOE_BF16, group);
	else if (p->coding->scale == MOE_F16)
		scale = scales_of(p, MOE_F16, group);
	else
		scale = scales_of(p, MOE_F32, group);
	_mm512_store_ps(t->scale, scale);
	if (kind == UNIT_STORED && p->coding->zero) {
		_mm512_store_ps(t->zero, zeros_of(p, group));
		memory_tables4(_mm512_loadu_ps(p->coding->format->values), t->scale, t->zero, t->table);
	} else if (kind == UNIT_STORED) {
		memory_tables4(_mm512_loadu_ps(p->coding->format->values), t->scale, NULL, t->table);
	} else if (kind == UNIT_INTEGERS) {
		scales8(scale, (__m512 *)(void *)t->table);
	}
}

/* Words of rows n and n + 1 */
INLINE __m512i table4(const struct moe_format *f, const enum unit_kind kind, const struct fwd_orders *o,
		      __mmask32 live, const struct coded_tables *t, const int n)
{
	if (kind == UNIT_STORED)
		return t->table[n / 2];
	if (kind == UNIT_POWERS) {
		__m512i values = _mm512_load_si512(t->values);
		__m512i more = _mm512_permutexvar_epi16(_mm512_load_si512(o->twice[n / 2]), _mm512_load_si512(t->scale));

		return _mm512_mask_add_epi16(values, live, values, more);
	}
	__m512 v = _mm512_loadu_ps(f->values);

	return two(_mm512_mul_ps(v, _mm512_set1_ps(t->scale[n])), _mm512_mul_ps(v, _mm512_set1_ps(t->scale[n + 1])));
}

/* Rows 4 z .. 4 z + 3 of a unit; look_up4 */
INLINE void quarter4(const struct moe_format *f, const enum unit_kind kind, const struct fwd_orders *o, __mmask32 live,
		     const struct coded_tables *t, const uint8_t *codes, const int z, uint16_t *to)
{
	const __m512i word = _mm512_load_si512(o->word), shift = _mm512_load_si512(o->shift);
	const __m512i low = _mm512_load_si512(o->low), row = _mm512_load_si512(o->row);
	const __m512i table[2] = { table4(f, kind, o, live, t, 4 * z), table4(f, kind, o, live, t, 4 * z + 2) };

#pragma GCC unroll 4
	for (int s = 0; s < UNIT; s++) {
		__m512i words = _mm512_shuffle_epi8(lanes(codes + 64 * s + 16 * z), word);
		__m512i index = _mm512_ternarylogic_epi64(_mm512_srlv_epi16(words, shift), low, row, 0xea);

		_mm512_store_si512(to + 128 * s + 32 * z, _mm512_permutex2var_epi16(table[0], index, table[1]));
	}
}

/* The same of 8 bits; integers */
INLINE void quarter8(const struct fwd_orders *o, const struct coded_tables *t, const uint8_t *codes, const int z,
		     uint16_t *to)
{
	const __m512i halves = _mm512_load_si512(o->halves);
	const __m512 scale = ((const __m512 *)(const void *)t->table)[z];

#pragma GCC unroll 4
	for (int s = 0; s < UNIT; s++) {
		__m512 f[2];

#pragma GCC unroll 2
		for (int h = 0; h < 2; h++) {
			__m512i c;

			__asm__("vpmovsxbd %1, %0"
				: "=v"(c)
				: "m"(*(const __m128i *)(const void *)(codes + 128 * s + 64 * h + 16 * z)));
			f[h] = _mm512_mul_ps(_mm512_cvtepi32_ps(c), scale);
		}
		_mm512_store_si512(to + 128 * s + 32 * z, _mm512_permutexvar_epi64(halves, two(f[0], f[1])));
		__asm__ volatile("" ::: "memory"); /* few registers: one after the other */
	}
}

INLINE void quarter(const struct moe_format *f, const enum unit_kind kind, const struct fwd_orders *o, __mmask32 live,
		    const struct coded_tables *t, const uint8_t *codes, const int z, uint16_t *to)
{
	if (kind == UNIT_INTEGERS)
		quarter8(o, t, codes, z, to);
	else
		quarter4(f, kind, o, live, t, codes, z, to);
	__asm__ volatile("" ::: "memory");
}

INLINE void kept_step(const int rows, __m512 sum[FWD_ROWS][4], const uint16_t *kept, const uint16_t *x)
{
	__m512i w[4];

#pragma GCC unroll 4
	for (int j = 0; j < 4; j++)
		w[j] = _mm512_load_si512(kept + 32 * j);
	coded_dots(rows, sum, w, x);
	__asm__ volatile("" ::: "memory");
}

INLINE void tile(const int rows, const bool keep, const enum unit_kind kind, const struct coded_call *c)
{
	const int bytes = (kind == UNIT_INTEGERS ? 128 : 64) * UNIT;
	const struct moe_coded_panel *p = c->p;
	const struct moe_format *f = p->coding->format;
	const struct fwd_orders *o = fwd_orders();
	const int64_t units = c->seg->k / (8 * UNIT);
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	struct coded_tables *t = c->tables;
	__mmask32 live = kind == UNIT_POWERS ? power_values(f->values, t) : 0;
	int64_t group = 0, end = coded_end(p, group, c->seg->k);
	uint16_t *from = c->keep;
	__m512 sum[2][FWD_ROWS][4];

	group_scales(p, group, kind, t);
#pragma GCC unroll 4
	for (int z = 0; z < UNIT; z++)
		quarter(f, kind, o, live, t, codes, z, from);
	coded_begin(rows, 1, sum);
	for (int64_t unit = 1; unit < units; unit++) {
		uint16_t *to = keep ? from + 128 * UNIT : c->keep + 128 * UNIT * (unit % 2);

		codes += bytes;
		if (8 * UNIT * unit >= end) {
			group_scales(p, ++group, kind, t);
			end = coded_end(p, group, c->seg->k);
		}
#pragma GCC unroll 4
		for (int z = 0; z < UNIT; z++, x += 8 * rows) {
#pragma GCC unroll 2
			for (int line = 0; line < bytes; line += 64 * UNIT)
				_mm_prefetch((const char *)codes + FUSED_AHEAD + line + 64 * z, _MM_HINT_T0);
			quarter(f, kind, o, live, t, codes, z, to);
			kept_step(rows, sum[0], from + 128 * z, x);
		}
		from = to;
	}
	for (int step = 0; step < UNIT; step++, from += 128, x += 8 * rows)
		kept_step(rows, sum[0], from, x);
	coded_finish(rows, 1, sum, c, 0, c->y);
}

#define TILE(rows, keep, kind)                                                                     \
	NOINLINE void tile_##rows##_##keep##_##kind(const struct coded_call *c)                    \
	{                                                                                          \
		tile(rows, keep, kind, c);                                                         \
	}
#define TILES(kind) TILE(5, 0, kind) TILE(5, 1, kind) TILE(6, 0, kind) TILE(6, 1, kind)
#define NAMES(kind) { { tile_5_0_##kind, tile_6_0_##kind }, { tile_5_1_##kind, tile_6_1_##kind } }

TILES(UNIT_PRODUCTS)
TILES(UNIT_POWERS)
TILES(UNIT_STORED)
TILES(UNIT_INTEGERS)

/* By whether more tiles follow, rows beyond FEW_ROWS */
static const coded_fn tile_of[UNIT_KINDS][2][FWD_ROWS - FEW_ROWS] = {
	[UNIT_PRODUCTS] = NAMES(UNIT_PRODUCTS),
	[UNIT_POWERS] = NAMES(UNIT_POWERS),
	[UNIT_STORED] = NAMES(UNIT_STORED),
	[UNIT_INTEGERS] = NAMES(UNIT_INTEGERS),
};

/* All scales are E8M0 whose products with any value are normal numbers. */
static bool powers(const struct moe_coded_panel *p)
{
	__mmask64 rare = 0;

	for (int64_t g = 0; g < p->groups; g += 4) { /* padded to 64 bytes */
		__mmask64 of = _cvtu64_mask64(p->groups - g < 4 ? ~(uint64_t)0 >> (64 - 16 * (p->groups - g)) : ~(uint64_t)0);
		__m512i b = _mm512_load_si512(p->scale + 16 * g);

		rare |= _mm512_mask_cmpgt_epu8_mask(of, _mm512_sub_epi8(b, _mm512_set1_epi8(8)), _mm512_set1_epi8((char)238));
	}
	return !rare;
}

coded_fn avx512_bf16_fwd_units(int rows, bool keep, const struct moe_coded_panel *p)
{
	const struct moe_coding *c = p->coding;
	bool e8m0 = c->scale == MOE_SCALE_UE8M0;
	enum unit_kind kind = c->format->bits == 8		   ? UNIT_INTEGERS
			      : e8m0				   ? UNIT_POWERS
			      : c->group == 8 * UNIT && !c->zero ? UNIT_PRODUCTS
								   : UNIT_STORED;

	if (!moe_groups_at(p, 8 * UNIT) || (kind == UNIT_INTEGERS && e8m0) || (kind == UNIT_POWERS && (c->zero || !powers(p))))
		return NULL;
	return tile_of[kind][keep][rows - FEW_ROWS - 1];
}
