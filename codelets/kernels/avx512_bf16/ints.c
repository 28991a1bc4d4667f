/* SPDX-License-Identifier: Apache-2.0 */
/* Integer dot products, for CPUs with AVX512-VNNI: the caller asks avx512_bf16_ints. */
#pragma GCC target("avx512vnni")
#include "codelets/kernels/avx512_bf16/ints.h"
#include "codelets/kernels/vnni/ints.h"

bool avx512_bf16_ints(void)
{
	return int_supported();
}

void avx512_bf16_int_block(int rows, int planes, int n, const float *x, int64_t ld, int8_t *q,
		    int32_t *sum, float *scale)
{
	int_block(rows, planes, n, x, ld, q, sum, scale);
}

void avx512_bf16_fwd_ints(const struct moe_int_rows *x, const struct moe_coded_panel *p,
		    const char *next, float *y, int64_t ldy, enum moe_out out)
{
	int_forward(x, p, next, y, ldy, out);
}

bool avx512_bf16_fwd_ints_run(const struct moe_int_rows *x, const struct moe_coded_panel *p,
			const struct moe_panel_run *run)
{
	return int_forward_run(x, p, run);
}
