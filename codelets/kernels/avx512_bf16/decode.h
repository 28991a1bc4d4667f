/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding of quantised panels (packed/coded.h) with tables in registers. A table holds code values times
 * the scale, rounded to bf16: one lookup gives what is multiplied. What these do not take (groups that begin inside
 * a step of 8 columns, other layouts) the plain decoder does.
 */
#ifndef MOE_CODELETS_KERNELS_AVX512_BF16_DECODE_H
#define MOE_CODELETS_KERNELS_AVX512_BF16_DECODE_H

#include "codelets/kernels/avx512_bf16/bf16.h"

#define DECODE_STEP 8	    /* columns: 128 elements */
#define DECODE_AHEAD 1024   /* bytes from a read to its prefetch, along a panel */

void avx512_bf16_decode(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst);

/* decode_vbmi.c: 8-bit codes of sign and magnitude; `steps` of one group, for CPUs with AVX512-VBMI */
bool avx512_bf16_has_vbmi(void);
void avx512_bf16_decode_magnitudes(const float *values, const float scale[16], int64_t steps,
				   const uint8_t *codes, uint16_t *dst);

#endif
