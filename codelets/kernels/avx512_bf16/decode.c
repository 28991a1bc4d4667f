/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/avx512_bf16/decode.h"

INLINE void decode4(const bool zeros, __m512 values, __m512 scale, __m512 zero, int64_t steps,
		    const uint8_t *codes, uint16_t *dst)
{
	__m512i table[8];

	tables4(zeros, values, scale, zero, table);
	for (; steps > 0; steps--, codes += 64, dst += 128) {
		_mm_prefetch((const char *)codes + DECODE_AHEAD, _MM_HINT_T0);
#pragma GCC unroll 4
		for (int z = 0; z < 4; z++)
			_mm512_store_si512(dst + 32 * z, look_up4(table, codes, z));
	}
}

static void decode8(__m512 scale, int64_t steps, const uint8_t *codes, uint16_t *dst)
{
	__m512 s[4];

	scales8(scale, s);
	for (; steps > 0; steps--, codes += 128, dst += 128) {
		_mm_prefetch((const char *)codes + DECODE_AHEAD, _MM_HINT_T0);
		_mm_prefetch((const char *)codes + DECODE_AHEAD + 64, _MM_HINT_T0);
#pragma GCC unroll 4
		for (int j = 0; j < 4; j++)
			_mm512_store_si512(dst + 32 * j, integers(codes, s, j));
	}
}

/* Every group begins at a step. */
static bool whole_steps(const struct moe_coded_panel *p)
{
	return p->layout == MOE_LAYOUT_BLOCKS8 && moe_groups_at(p, DECODE_STEP);
}

bool avx512_bf16_decodes(const struct moe_coded_panel *p)
{
	const struct moe_format *f = p->coding->format;

	if (!whole_steps(p))
		return false;
	if (f->bits == 4)
		return true;
	if (p->coding->zero)
		return false;
	return f->codes == MOE_CODES_INTEGER ||
	       (f->codes == MOE_CODES_SIGN_MAGNITUDE && avx512_bf16_has_vbmi());
}

INLINE void decode_groups(const struct moe_coded_panel *p, const int bits,
			  const enum moe_dtype dtype, int64_t k0, int64_t k, uint16_t *dst)
{
	const struct moe_coding *c = p->coding;
	const struct moe_format *f = c->format;
	int64_t end = k0 + k, group = MOE_MIN((c->phase + k0) / c->group, p->groups - 1);
	__m512 values = _mm512_loadu_ps(f->values);
	_Alignas(64) float memory[16];

	for (int64_t next; k0 < end; k0 = next, group++) {
		const uint8_t *codes = p->codes + k0 * 16 * bits / 8;
		__m512 scale = scales_of(p, dtype, group);
		int64_t steps;

		next = group == p->groups - 1 ? end
					      : MOE_MIN(end, (group + 1) * c->group - c->phase);
		steps = (next - k0) / DECODE_STEP;
		if (bits == 4 && c->zero) {
			decode4(true, values, scale, zeros_of(p, group), steps, codes, dst);
		} else if (bits == 4) {
			decode4(false, values, scale, scale, steps, codes, dst);
		} else {
			_mm512_store_ps(memory, scale);
			if (f->codes == MOE_CODES_INTEGER)
				decode8(scale, steps, codes, dst);
			else
				avx512_bf16_decode_magnitudes(f->values, memory, steps, codes, dst);
		}
		dst += 16 * (next - k0);
	}
}

#define GROUPS(bits, dtype)                                                                        \
	NOINLINE void groups_##bits##_##dtype(const struct moe_coded_panel *p, int64_t k0,         \
					      int64_t k, uint16_t *dst)                            \
	{                                                                                          \
		decode_groups(p, bits, dtype, k0, k, dst);                                         \
	}
GROUPS(4, MOE_F32)
GROUPS(4, MOE_BF16)
GROUPS(4, MOE_F16)
GROUPS(4, MOE_SCALE_UE8M0)
GROUPS(8, MOE_F32)
GROUPS(8, MOE_BF16)
GROUPS(8, MOE_F16)
GROUPS(8, MOE_SCALE_UE8M0)

void avx512_bf16_decode(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst)
{
	enum moe_dtype scale = p->coding->scale;

	if (!avx512_bf16_decodes(p))
		moe_coded_decode(p, k0, k, dst);
	else if (p->coding->format->bits == 4)
		(scale == MOE_F32    ? groups_4_MOE_F32
		 : scale == MOE_BF16 ? groups_4_MOE_BF16
		 : scale == MOE_F16  ? groups_4_MOE_F16
				     : groups_4_MOE_SCALE_UE8M0)(p, k0, k, dst);
	else
		(scale == MOE_F32    ? groups_8_MOE_F32
		 : scale == MOE_BF16 ? groups_8_MOE_BF16
		 : scale == MOE_F16  ? groups_8_MOE_F16
				     : groups_8_MOE_SCALE_UE8M0)(p, k0, k, dst);
}
