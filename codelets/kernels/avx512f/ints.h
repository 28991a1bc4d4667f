/* SPDX-License-Identifier: Apache-2.0 */
/* ints.c: struct moe_tiles.ints, int_block and fwd_ints */
#ifndef MOE_CODELETS_KERNELS_AVX512F_INTS_H
#define MOE_CODELETS_KERNELS_AVX512F_INTS_H

#include "codelets/kernels/packed/ints.h"

bool avx512f_ints(void);
void avx512f_int_block(int rows, int planes, int n, const float *x, int64_t ld, int8_t *q,
		    int32_t *sum, float *scale);
void avx512f_fwd_ints(const struct moe_int_rows *x, const struct moe_coded_panel *p,
		    const char *next, float *y, int64_t ldy, enum moe_out out);
bool avx512f_fwd_ints_run(const struct moe_int_rows *x, const struct moe_coded_panel *p,
			const struct moe_panel_run *run);

#endif
