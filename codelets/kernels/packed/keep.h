/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How gate and up are kept for the backward: 16 bits as sign, 6 of exponent (bias 31), 9 of
 * mantissa. Both operands of the SwiGLU backward and of the routing weight's gradient come from
 * these, nothing is multiplied in this form, so bfloat16's range is not needed and two more bits of
 * mantissa are: the relative error is at most 2^-10 where bfloat16's is 2^-8 (half precision would
 * overflow at 65504). Results below 2^-30 become 0, finite ones from 2^32 on infinite; infinities
 * and NaN stay.
 */
#ifndef MOE_CODELETS_KERNELS_PACKED_KEEP_H
#define MOE_CODELETS_KERNELS_PACKED_KEEP_H

#include <stdint.h>
#include <string.h>

#define MOE_KEEP_BIAS (96u << 9) /* (127 - 31) in units of a kept exponent */
#define MOE_KEEP_INF 0x7e00u

/* Without branches, so that loops over it vectorise. */
static inline uint16_t moe_keep(float v)
{
	uint32_t bits, abs, code, special;

	memcpy(&bits, &v, sizeof bits);
	abs = bits & 0x7fffffffu;
	code = ((abs + 0x1fffu + ((abs >> 14) & 1u)) >> 14) - MOE_KEEP_BIAS;
	code = (int32_t)code < 0x200 ? 0 : code;
	code = (int32_t)code > (int32_t)MOE_KEEP_INF ? MOE_KEEP_INF : code;
	special = abs > 0x7f800000u ? MOE_KEEP_INF | 0x100u : MOE_KEEP_INF;
	code = abs >= 0x7f800000u ? special : code;
	return (uint16_t)(code | (bits >> 31 << 15));
}

static inline float moe_kept(uint16_t v)
{
	uint32_t code = v & 0x7fffu, bits = (code << 14) + (96u << 23);
	float f;

	bits = code < 0x200u ? 0 : bits;
	bits = code >= MOE_KEEP_INF ? bits | 0x7f800000u : bits;
	bits |= (uint32_t)(v & 0x8000u) << 16;
	memcpy(&f, &bits, sizeof f);
	return f;
}

#endif
