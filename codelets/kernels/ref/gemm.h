/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Row-major GEMM of the reference kernels, on OpenBLAS's sgemm. A result depends on the shape of
 * the call and the data only, provided OpenBLAS is held to one thread (the engine does, once, at
 * open). Any dimension may be 0: m or n = 0 does nothing, k = 0 multiplies C by beta. beta 0 never
 * reads C.
 */
#ifndef MOE_CODELETS_KERNELS_REF_GEMM_H
#define MOE_CODELETS_KERNELS_REF_GEMM_H

#include "codelets/kernels/kernels.h"

/* C[m, n] = alpha A[m, k] B[n, k]^T + beta C; leading dimensions in elements */
void ref_gemm_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
		 const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
/* C[m, n] = alpha A[m, k] B[k, n] + beta C */
void ref_gemm_nn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
		 const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
/* C[m, n] = alpha A[k, m]^T B[k, n] + beta C */
void ref_gemm_tn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
		 const float *b, int64_t ldb, float beta, float *c, int64_t ldc);

/* Bytes of scratch of the two functions below for any range of an [n, k] weight. */
size_t ref_weight_scratch(int64_t n, int64_t k);
/* y[m, n1-n0] = x[m, k] W[n0:n1]^T + beta y, one GEMM per MOE_CHUNK rows of W counted from n0 */
void ref_weight_gemm_nt(int64_t m, const struct moe_weight *W, int64_t n0, int64_t n1,
			const float *x, int64_t ldx, float beta, float *y, int64_t ldy,
			void *scratch);
/*
 * dx[m, k1-k0] = dy[m, n1-n0] W[n0:n1, k0:k1] + beta dx, accumulated over MOE_CHUNK rows of W at a
 * time in index order, counted from n0
 */
void ref_weight_gemm_nn(int64_t m, const struct moe_weight *W, int64_t n0, int64_t n1, int64_t k0,
			int64_t k1, const float *dy, int64_t lddy, float beta, float *dx,
			int64_t lddx, void *scratch);

#endif
