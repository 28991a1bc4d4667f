/* SPDX-License-Identifier: Apache-2.0 */
/* 4-bit codes and 8-bit integers, up to FEW_ROWS rows a tile. */
#include "codelets/kernels/avx512_bf16/fwd_coded.h"

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
		__m512i table[8];

		if (p->coding->zero)
			tables4(true, values, scale, zeros_of(p, group), table);
		else
			tables4(false, values, scale, scale, table);
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

#define FEW(bits, rows, sets, keep, dtype)                                                         \
	NOINLINE void few##bits##_##rows##_##keep##_##dtype(const struct coded_call *c)            \
	{                                                                                          \
		few##bits(rows, sets, keep, dtype, c);                                             \
	}
#define FEWS(bits, dtype)                                                                          \
	FEW(bits, 1, 2, 0, dtype)                                                                  \
	FEW(bits, 2, 1, 0, dtype)                                                                  \
	FEW(bits, 3, 1, 0, dtype)                                                                  \
	FEW(bits, 4, 1, 0, dtype)                                                                  \
	FEW(bits, 4, 1, 1, dtype)
#define FEW_NAMES(bits, dtype)                                                                     \
	{                                                                                          \
		{ NULL, few##bits##_1_0_##dtype, few##bits##_2_0_##dtype, few##bits##_3_0_##dtype, \
		  few##bits##_4_0_##dtype },                                                       \
			{ [4] = few##bits##_4_1_##dtype }                                          \
	}
FEWS(4, MOE_F32)
FEWS(4, MOE_BF16)
FEWS(4, MOE_F16)
FEWS(4, MOE_U8) /* MOE_SCALE_UE8M0 */
FEWS(8, MOE_F32)
FEWS(8, MOE_BF16)

/* By scales, whether more tiles follow, rows */
static const coded_fn few4_of[4][2][FEW_ROWS + 1] = { FEW_NAMES(4, MOE_F32), FEW_NAMES(4, MOE_BF16),
						      FEW_NAMES(4, MOE_F16), FEW_NAMES(4, MOE_U8) };
static const coded_fn few8_of[2][2][FEW_ROWS + 1] = { FEW_NAMES(8, MOE_F32), FEW_NAMES(8, MOE_BF16) };
static coded_fn few_of(int rows, bool keep, const struct moe_coded_panel *p)
{
	enum moe_dtype scale = p->coding->scale;

	if (p->coding->format->bits == 4)
		return few4_of[scale == MOE_F32	   ? 0
			       : scale == MOE_BF16 ? 1
			       : scale == MOE_F16  ? 2
						   : 3][keep][rows];
	return scale == MOE_F32 || scale == MOE_BF16 ? few8_of[scale == MOE_BF16][keep][rows] : NULL;
}

static coded_fn tile_of(int rows, bool keep, const struct moe_coded_panel *p)
{
	if (!p->groups || !avx512_bf16_decodes(p) || !coded_even(p))
		return NULL;
	if (p->coding->format->codes == MOE_CODES_SIGN_MAGNITUDE)
		return avx512_bf16_fwd_magnitudes(rows, keep, p);
	return rows <= FEW_ROWS ? few_of(rows, keep, p) : avx512_bf16_fwd_units(rows, keep, p);
}

bool avx512_bf16_fwd_coded(int m, const struct moe_coded_panel *p, const struct moe_fwd_seg *seg,
			   int nseg, const uint16_t *next, float *y, int64_t ldy, enum moe_out out,
			   uint16_t *buffer)
{
	struct tiles tiles = fwd_tiles(m);
	int rows = tile_rows(&tiles, 0);
	coded_fn tile = m > 0 && seg->k % MOE_PACK_K == 0 ? tile_of(rows, m > rows, p) : NULL;
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
