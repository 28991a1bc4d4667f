/* SPDX-License-Identifier: Apache-2.0 */
/* 4-bit codes, and 8-bit integers. */
#include "codelets/kernels/avx512_bf16/fwd_coded.h"

enum { POWERS = 255 }; /* a dtype of scales: E8M0 of the common range */

INLINE void few4(const int rows, const int sets, const bool keep, const enum moe_dtype dtype,
		 const struct coded_call *c)
{
	const struct moe_coded_panel *p = c->p;
	int64_t kp = c->seg->k;
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	__m512 values = _mm512_loadu_ps(p->coding->format->values), sum[2][FWD_ROWS][4];
	uint16_t *kept = c->keep;

	coded_begin(rows, sets, sum);
	for (int64_t group = 0, k = 0; k < kp; group++) {
		int64_t end = coded_end(p, group, kp);
		__m512 scale = scales_of(p, dtype, group);
		_Alignas(64) float zero[16];
		__m512i table[8];

		if (p->coding->zero) {
			moe_coded_zeros(p, group, zero);
			tables4(true, values, scale, _mm512_load_ps(zero), table);
		} else {
			tables4(false, values, scale, scale, table);
		}
		for (; k < end; k += 8 * sets)
#pragma GCC unroll 2
			for (int s = 0; s < sets; s++, codes += 64, x += 8 * rows) {
				__m512i v[4];

				_mm_prefetch((const char *)codes + FUSED_AHEAD, _MM_HINT_T0);
#pragma GCC unroll 4
				for (int z = 0; z < 4; z++) {
					v[z] = look_up4(table, codes, z);
					if (keep)
						_mm512_store_si512(kept + 32 * z, v[z]);
				}
				kept += keep ? 128 : 0;
				coded_dots(rows, sum[s], v, x);
			}
	}
	coded_finish(rows, sets, sum, c, 0, c->y);
}

/* look_up4 */
INLINE __m512i memory_look_up4(const __m512i table[8], const struct fwd_orders *o, const uint8_t *codes, const int z)
{
	__m512i words = _mm512_shuffle_epi8(lanes(codes + 16 * z), _mm512_load_si512(o->word));
	__m512i index = _mm512_ternarylogic_epi64(_mm512_srlv_epi16(words, _mm512_load_si512(o->shift)),
						  _mm512_load_si512(o->low), _mm512_load_si512(o->row), 0xea);

	return _mm512_permutex2var_epi16(table[2 * z], index, table[2 * z + 1]);
}

/* memory_tables4 of scales that are powers of two, by their exponents: products would take places of the tile's. */
INLINE void power_tables4(const struct fwd_orders *o, __mmask32 live, const uint8_t *scale, struct coded_tables *t)
{
	__m512i more = _mm512_castsi256_si512(
		_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)scale)), 7));

#pragma GCC unroll 8
	for (int i = 0; i < 8; i++) {
		__m512i values = _mm512_load_si512(t->values);

		t->table[i] = _mm512_mask_add_epi16(
			values, live, values, _mm512_permutexvar_epi16(_mm512_load_si512(o->twice[i]), more));
	}
}

/* What power_tables4 adds exponents to; returns which values are not 0. */
INLINE __mmask32 power_values(const float *values, struct coded_tables *t)
{
	__m512 v = _mm512_loadu_ps(values);
	__m512i both = two(v, v);
	__mmask32 live = _mm512_test_epi16_mask(both, _mm512_set1_epi16(0x7fff));

	_mm512_store_si512(t->values, _mm512_mask_sub_epi16(both, live, both, _mm512_set1_epi16(127 << 7)));
	return live;
}

INLINE void more4(const int rows, const bool keep, const int dtype,
		  const struct coded_call *c)
{
	const struct moe_coded_panel *p = c->p;
	int64_t kp = c->seg->k;
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	struct coded_tables *t = c->tables;
	const struct fwd_orders *o = fwd_orders();
	__m512 sum[2][FWD_ROWS][4];
	uint16_t *kept = c->keep;
	__mmask32 live = dtype == POWERS ? power_values(p->coding->format->values, t) : 0;

	coded_begin(rows, 1, sum);
	for (int64_t group = 0, k = 0; k < kp; group++) {
		int64_t end = coded_end(p, group, kp);
		__m512 values = _mm512_loadu_ps(p->coding->format->values);

		if (dtype != POWERS)
			_mm512_store_ps(t->scale, scales_of(p, dtype, group));
		if (dtype == POWERS) {
			power_tables4(o, live, p->scale + group * 16, t);
		} else if (p->coding->zero) {
			moe_coded_zeros(p, group, t->zero);
			memory_tables4(values, t->scale, t->zero, t->table);
		} else {
			memory_tables4(values, t->scale, NULL, t->table);
		}
		for (; k < end; k += 8, codes += 64, x += 8 * rows) {
			__m512i w[4];

			_mm_prefetch((const char *)codes + FUSED_AHEAD, _MM_HINT_T0);
#pragma GCC unroll 4
			for (int z = 0; z < 4; z++)
				w[z] = memory_look_up4(t->table, o, codes, z);
			coded_step(rows, sum[0], w, x, keep, kept);
			kept += keep ? 128 : 0;
		}
	}
	coded_finish(rows, 1, sum, c, 0, c->y);
}

INLINE void few8(const int rows, const int sets, const bool keep, const enum moe_dtype dtype,
		 const struct coded_call *c)
{
	const struct moe_coded_panel *p = c->p;
	int64_t kp = c->seg->k;
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	__m512 sum[2][FWD_ROWS][4];
	uint16_t *kept = c->keep;

	coded_begin(rows, sets, sum);
	for (int64_t group = 0, k = 0; k < kp; group++) {
		int64_t end = coded_end(p, group, kp);
		__m512 scale[4];

		scales8(scales_of(p, dtype, group), scale);
		for (; k < end; k += 8 * sets)
#pragma GCC unroll 2
			for (int s = 0; s < sets; s++, codes += 128, x += 8 * rows) {
				__m512i v[4];

				_mm_prefetch((const char *)codes + FUSED_AHEAD, _MM_HINT_T0);
				_mm_prefetch((const char *)codes + FUSED_AHEAD + 64, _MM_HINT_T0);
#pragma GCC unroll 4
				for (int j = 0; j < 4; j++) {
					v[j] = integers(codes, scale, j);
					if (keep)
						_mm512_store_si512(kept + 32 * j, v[j]);
				}
				kept += keep ? 128 : 0;
				coded_dots(rows, sum[s], v, x);
			}
	}
	coded_finish(rows, sets, sum, c, 0, c->y);
}

/* integers */
INLINE __m512i memory_integers(const uint8_t *codes, const __m512 scale[4], const struct fwd_orders *o, const int j)
{
	__m512 f[2];

#pragma GCC unroll 2
	for (int h = 0; h < 2; h++) {
		__m512i c;

		__asm__("vpmovsxbd %1, %0" : "=v"(c) : "m"(*(const __m128i *)(const void *)(codes + 64 * h + 16 * j)));
		f[h] = _mm512_mul_ps(_mm512_cvtepi32_ps(c), scale[j]);
	}
	return _mm512_permutexvar_epi64(_mm512_load_si512(o->halves), two(f[0], f[1]));
}

INLINE void more8(const int rows, const bool keep, const enum moe_dtype dtype,
		  const struct coded_call *c)
{
	const struct moe_coded_panel *p = c->p;
	int64_t kp = c->seg->k;
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	const struct fwd_orders *o = fwd_orders();
	__m512 *scale = (__m512 *)(void *)c->tables->table, sum[2][FWD_ROWS][4];
	uint16_t *kept = c->keep;

	coded_begin(rows, 1, sum);
	for (int64_t group = 0, k = 0; k < kp; group++) {
		int64_t end = coded_end(p, group, kp);

		scales8(scales_of(p, dtype, group), scale);
		for (; k < end; k += 8, codes += 128, x += 8 * rows) {
			__m512i w[4];

			_mm_prefetch((const char *)codes + FUSED_AHEAD, _MM_HINT_T0);
			_mm_prefetch((const char *)codes + FUSED_AHEAD + 64, _MM_HINT_T0);
#pragma GCC unroll 4
			for (int j = 0; j < 4; j++)
				w[j] = memory_integers(codes, scale, o, j);
			coded_step(rows, sum[0], w, x, keep, kept);
			kept += keep ? 128 : 0;
		}
	}
	coded_finish(rows, 1, sum, c, 0, c->y);
}

#define FEW(bits, rows, sets, keep, dtype)                                                         \
	NOINLINE void few##bits##_##rows##_##keep##_##dtype(const struct coded_call *c)            \
	{                                                                                          \
		few##bits(rows, sets, keep, dtype, c);                                             \
	}
#define MORE(bits, rows, keep, dtype)                                                              \
	NOINLINE void more##bits##_##rows##_##keep##_##dtype(const struct coded_call *c)           \
	{                                                                                          \
		more##bits(rows, keep, dtype, c);                                                  \
	}
#define TILES(bits, dtype)                                                                         \
	FEW(bits, 1, 2, 0, dtype)                                                                  \
	FEW(bits, 2, 1, 0, dtype)                                                                  \
	FEW(bits, 3, 1, 0, dtype)                                                                  \
	FEW(bits, 4, 1, 0, dtype)                                                                  \
	FEW(bits, 4, 1, 1, dtype)                                                                  \
	MORES(bits, dtype)
#define MORES(bits, dtype)                                                                         \
	MORE(bits, 5, 0, dtype)                                                                    \
	MORE(bits, 5, 1, dtype)                                                                    \
	MORE(bits, 6, 0, dtype)                                                                    \
	MORE(bits, 6, 1, dtype)
#define NAMES(bits, dtype)                                                                         \
	{                                                                                          \
		{ NULL, few##bits##_1_0_##dtype, few##bits##_2_0_##dtype, few##bits##_3_0_##dtype, \
		  few##bits##_4_0_##dtype, more##bits##_5_0_##dtype, more##bits##_6_0_##dtype },   \
			{ NULL, NULL, NULL, NULL, few##bits##_4_1_##dtype,                         \
			  more##bits##_5_1_##dtype, more##bits##_6_1_##dtype }                     \
	}

TILES(4, MOE_F32)
TILES(4, MOE_BF16)
TILES(4, MOE_F16)
TILES(4, MOE_U8) /* MOE_SCALE_UE8M0 */
MORES(4, POWERS)
TILES(8, MOE_F32)
TILES(8, MOE_BF16)

/* By scales, whether more tiles follow, rows */
static const coded_fn of4[4][2][FWD_ROWS + 1] = { NAMES(4, MOE_F32), NAMES(4, MOE_BF16),
						  NAMES(4, MOE_F16), NAMES(4, MOE_U8) };
static const coded_fn of8[2][2][FWD_ROWS + 1] = { NAMES(8, MOE_F32), NAMES(8, MOE_BF16) };

/* E8M0 whose products with any value are normal numbers, in tiles of more rows */
static const coded_fn of_powers[2][FWD_ROWS + 1] = { { [5] = more4_5_0_POWERS, [6] = more4_6_0_POWERS },
						     { [5] = more4_5_1_POWERS, [6] = more4_6_1_POWERS } };

static bool powers(const struct moe_coded_panel *p)
{
	__mmask64 rare = 0;

	if (p->coding->scale != MOE_SCALE_UE8M0 || p->coding->zero)
		return false;
	for (int64_t g = 0; g < p->groups; g += 4) { /* padded to 64 bytes */
		__mmask64 of = _cvtu64_mask64(p->groups - g < 4 ? ~(uint64_t)0 >> (64 - 16 * (p->groups - g)) : ~(uint64_t)0);
		__m512i b = _mm512_load_si512(p->scale + 16 * g);

		rare |= _mm512_mask_cmpgt_epu8_mask(of, _mm512_sub_epi8(b, _mm512_set1_epi8(8)), _mm512_set1_epi8((char)238));
	}
	return !rare;
}

static coded_fn tile_of(int rows, bool keep, const struct moe_coded_panel *p)
{
	const struct moe_format *f = p->coding->format;
	enum moe_dtype scale = p->coding->scale;

	if (!p->groups || !avx512_bf16_decodes(p) || !coded_even(p))
		return NULL;
	if (f->codes == MOE_CODES_SIGN_MAGNITUDE)
		return avx512_bf16_fwd_magnitudes(rows, keep, p);
	if (f->bits == 4 && rows > FEW_ROWS && powers(p))
		return of_powers[keep][rows];
	if (f->bits == 4)
		return of4[scale == MOE_F32    ? 0
			   : scale == MOE_BF16 ? 1
			   : scale == MOE_F16  ? 2
					       : 3][keep][rows];
	if (scale != MOE_F32 && scale != MOE_BF16)
		return NULL;
	return of8[scale == MOE_BF16][keep][rows];
}

bool avx512_bf16_fwd_coded(int m, const struct moe_coded_panel *p, const struct moe_fwd_seg *seg,
			   int nseg, const uint16_t *next, float *y, int64_t ldy, enum moe_out out,
			   uint16_t *buffer)
{
	struct tiles tiles = fwd_tiles(m);
	int rows = tile_rows(&tiles, 0);
	coded_fn tile = m > 0 ? tile_of(rows, m > rows, p) : NULL;
	struct moe_fwd_seg rest[MOE_MAX_SEGS];
	struct coded_tables tables;
	struct coded_call c = { p, seg, nseg, y, ldy, out_mode(out, y, ldy), &tables, buffer };

	if (!tile)
		return false;
	tile(&c);
	if (m == rows)
		return true;
	for (int s = 0; s < nseg; s++)
		rest[s] = seg[s];
	rest[0].w = buffer;
	avx512_bf16_fwd_from(1, m, rest, nseg, next, y, ldy, out);
	return true;
}

int64_t avx512_bf16_fwd_coded_run(int m, const struct moe_coded_panel *p, const struct moe_fwd_seg *seg, int nseg,
				  int64_t count, const struct moe_panel_run *run)
{
	enum moe_out out = out_mode(run->out, run->y, run->ldy | run->step);
	struct coded_call c = { p, seg, nseg, run->y, run->ldy, out, NULL, NULL };

	if (m <= 0 || m > FEW_ROWS || p->coding->format->codes != MOE_CODES_SIGN_MAGNITUDE || p->coding->scale != MOE_F32 ||
	    !p->groups || !avx512_bf16_decodes(p) || !coded_even(p))
		return 0;
	return avx512_bf16_fwd_magnitudes_run(m, &c, count, run);
}
