/* SPDX-License-Identifier: Apache-2.0 */
/* 4-bit codes, and 8-bit integers. */
#include "codelets/kernels/avx512_bf16/bwd_fused.h"

INLINE void bwd_prepare(const enum bwd_kind kind, const float *values, const float *scale, const float *zero,
			struct coded_tables *t)
{
	if (kind != BWD_NIBBLES)
		return;
	if (zero)
		memory_tables4(_mm512_loadu_ps(values), scale, zero, t->table);
	else
		memory_tables4(_mm512_loadu_ps(values), scale, NULL, t->table);
}

INLINE void bwd_vectors(const enum bwd_kind kind, const uint8_t *codes, const float *scale,
			const struct coded_tables *t, const struct bwd_orders *o, const int q, __m512i w[2])
{
	if (kind == BWD_NIBBLES)
		nibbles(codes, t->table, o, q, w);
	else
		paired_integers(codes, scale, q, w);
}

FUSEDS(BWD_NIBBLES)
FUSEDS(BWD_INTEGERS)
SMALLS(BWD_NIBBLES)
SMALLS(BWD_INTEGERS)

bwd_tile_fn avx512_bf16_bwd_fused(enum bwd_kind kind, int rows)
{
	static const bwd_tile_fn of[2][FUSED_ROWS + 1] = { FUSED_NAMES(BWD_NIBBLES),
							   FUSED_NAMES(BWD_INTEGERS) };

	if (kind == BWD_PLAIN || rows > FUSED_ROWS)
		return NULL;
	return kind == BWD_MAGNITUDES ? avx512_bf16_bwd_fused_magnitudes(rows)
				      : of[kind == BWD_INTEGERS][rows];
}

static enum bwd_kind kind_of(const struct moe_coded_panel *p)
{
	const struct moe_format *f = p->coding->format;

	if (!p->groups || !avx512_bf16_decodes(p))
		return BWD_PLAIN;
	return f->bits == 4		       ? BWD_NIBBLES
	       : f->codes == MOE_CODES_INTEGER ? BWD_INTEGERS
					       : BWD_MAGNITUDES;
}

/* In groups first..last each: one scale for all rows */
static bool shared(const struct moe_coded_panel *p, int64_t first, int64_t last)
{
	for (; first <= last; first++) {
		__m512i s = _mm512_castps_si512(bwd_scales(p, first));
		__m512i one = _mm512_broadcastd_epi32(_mm512_castsi512_si128(s));

		if (_mm512_cmpeq_epi32_mask(s, one) != 0xffff)
			return false;
	}
	return true;
}

enum bwd_kind avx512_bf16_bwd_kind(const struct moe_coded_slice *s, int64_t panel, int64_t panels, int64_t k,
				   int64_t width)
{
	struct moe_coded_panel p = s->first;
	int64_t group = bwd_group(&p, k);
	enum bwd_kind kind = kind_of(&p);

	if (kind == BWD_PLAIN || group != bwd_group(&p, k + width - 1))
		return BWD_PLAIN;
	p.scale += (size_t)panel * s->stride;
	for (; kind == BWD_MAGNITUDES && panels > 0; panels--, p.scale += s->stride)
		if (!shared(&p, group, group))
			return BWD_PLAIN;
	return kind;
}

void avx512_bf16_bwd_group(const struct moe_coded_slice *s, int64_t panel, int64_t panels, int64_t k, float *scale,
			   float *zero)
{
	struct moe_coded_panel p = s->first;
	int64_t group = bwd_group(&p, k), next = bwd_group(&p, k + 32), bytes = 16 * (int64_t)moe_dtype_size(p.coding->scale);

	p.scale += (size_t)panel * s->stride;
	p.zero += (size_t)panel * s->stride;
	for (; panels > 0; panels--, scale += 16, zero += 16) {
		_mm512_store_ps(scale, bwd_scales(&p, group));
		_mm_prefetch((const char *)p.scale + next * bytes, _MM_HINT_T1);
		if (p.coding->zero) {
			_mm512_store_ps(zero, zeros_of(&p, group));
			_mm_prefetch((const char *)p.zero + next * 16, _MM_HINT_T1);
		}
		p.scale += s->stride;
		p.zero += s->stride;
	}
}

/* Groups begin at whole vectors of 16 columns. */
bool avx512_bf16_bwd_small_takes(const struct moe_coded_panel *p)
{
	return kind_of(p) != BWD_PLAIN && moe_groups_at(p, 16);
}

bwd_small_fn avx512_bf16_bwd_small_coded(const struct moe_coded_panel *p, int64_t k, int columns, int rows)
{
	static const bwd_small_fn of[2][BWD_SMALL + 1] = { SMALL_NAMES(BWD_NIBBLES),
							   SMALL_NAMES(BWD_INTEGERS) };
	enum bwd_kind kind = kind_of(p);

	if (kind != BWD_MAGNITUDES)
		return of[kind == BWD_INTEGERS][rows];
	return shared(p, bwd_group(p, k), bwd_group(p, k + columns - 1))
		       ? avx512_bf16_bwd_small_magnitudes(rows)
		       : NULL;
}
