/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The portable table: plain C in loops over 16 floats, which compilers vectorise for whatever the
 * target's baseline is (gemm.c: vectors of four floats, which every target has or gets). Panels are
 * f32 rows [m, width] as they stand, forward and backward alike; pair arrays are f32 rows. Other
 * tables may take those functions that they don't replace.
 */
#ifndef MOE_CODELETS_KERNELS_C_C_H
#define MOE_CODELETS_KERNELS_C_C_H

#include "codelets/kernels/packed/coded.h"

extern const struct moe_tiles moe_tiles_c;

/* gemm.c; contracts in packed/tiles.h */
void c_fwd(int m, const struct moe_fwd_seg *seg, int nseg, const uint16_t *next, float *y,
	   int64_t ldy, enum moe_out out);
void c_bwd(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y, int64_t ldy,
	   enum moe_out out, void *scratch);
void c_grad(int m, const void *a, int64_t lda, int na, const void *b, int64_t ldb, int nb,
	    float scale, float *c, int64_t ldc, enum moe_out out);

/* rows.c */
void c_pairs(int m, const float *src, int64_t ld, const int32_t *token, const float *scale,
	     int cols, void *dst);
void c_pairs_bf16(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols,
		  void *dst);

#endif
