/* SPDX-License-Identifier: Apache-2.0 */
/* 4-bit codes, and 8-bit integers. */
#include "codelets/kernels/avx512_bf16/fwd_coded.h"

INLINE void tile4(const int rows, const int sets, const enum moe_dtype dtype,
		  const struct coded_call *c)
{
	const struct moe_coded_panel *p = c->p;
	int64_t kp = c->seg->k;
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	__m512 values = _mm512_loadu_ps(p->coding->format->values), sum[2][FUSED_ROWS][4];

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
				for (int z = 0; z < 4; z++)
					v[z] = look_up4(table, codes, z);
				coded_dots(rows, sum[s], v, x);
			}
	}
	coded_finish(rows, sets, sum, c);
}

INLINE void tile8(const int rows, const int sets, const enum moe_dtype dtype,
		  const struct coded_call *c)
{
	const struct moe_coded_panel *p = c->p;
	int64_t kp = c->seg->k;
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	__m512 sum[2][FUSED_ROWS][4];

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
				for (int j = 0; j < 4; j++)
					v[j] = integers(codes, scale, j);
				coded_dots(rows, sum[s], v, x);
			}
	}
	coded_finish(rows, sets, sum, c);
}

typedef void (*coded_fn)(const struct coded_call *c);

#define TILE(bits, rows, sets, dtype)                                                              \
	NOINLINE void tile##bits##_##rows##_##dtype(const struct coded_call *c)                    \
	{                                                                                          \
		tile##bits(rows, sets, dtype, c);                                                  \
	}
#define TILES(bits, dtype)                                                                         \
	TILE(bits, 1, 2, dtype)                                                                    \
	TILE(bits, 2, 1, dtype) TILE(bits, 3, 1, dtype) TILE(bits, 4, 1, dtype)
#define NAMES(bits, dtype)                                                                         \
	{                                                                                          \
		NULL, tile##bits##_1_##dtype, tile##bits##_2_##dtype, tile##bits##_3_##dtype,      \
			tile##bits##_4_##dtype                                                     \
	}

TILES(4, MOE_F32)
TILES(4, MOE_BF16)
TILES(4, MOE_F16)
TILES(4, MOE_U8) /* MOE_SCALE_UE8M0 */
TILES(8, MOE_F32)
TILES(8, MOE_BF16)

static const coded_fn of4[4][FUSED_ROWS + 1] = { NAMES(4, MOE_F32), NAMES(4, MOE_BF16),
						 NAMES(4, MOE_F16), NAMES(4, MOE_U8) };
static const coded_fn of8[2][FUSED_ROWS + 1] = { NAMES(8, MOE_F32), NAMES(8, MOE_BF16) };

bool avx512_bf16_fwd_coded(int m, const struct moe_coded_panel *p, const struct moe_fwd_seg *seg,
			   int nseg, float *y, int64_t ldy, enum moe_out out)
{
	const struct moe_format *f = p->coding->format;
	struct coded_call c = { p, seg, nseg, y, ldy, out_mode(out, y, ldy) };
	enum moe_dtype scale = p->coding->scale;

	if (m < 1 || m > FUSED_ROWS || !p->groups || !avx512_bf16_decodes(p) || !coded_even(p))
		return false;
	if (f->codes == MOE_CODES_SIGN_MAGNITUDE)
		return avx512_bf16_fwd_magnitudes(m, p, seg, nseg, y, ldy, c.out);
	if (f->bits == 4) {
		of4[scale == MOE_F32 ? 0 : scale == MOE_BF16 ? 1 : scale == MOE_F16 ? 2 : 3][m](&c);
		return true;
	}
	if (scale != MOE_F32 && scale != MOE_BF16)
		return false;
	of8[scale == MOE_BF16][m](&c);
	return true;
}
