/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GEMM and weights of the reference table. A packed weight is row-major in its source dtype (F64:
 * in F32); BF16 and F16 are expanded to f32 by MOE_CHUNK rows just before the GEMM that reads them.
 */
#include "codelets/kernels/ref/gemm.h"
#include "codelets/kernels/packed/coded.h"
#include "codelets/kernels/ref/ref.h"
#include "codelets/kernels/elementwise/vecmath.h"

#include <cblas.h>

static void scale_rows(int64_t m, int64_t n, float beta, float *c, int64_t ldc)
{
	for (int64_t i = 0; i < m; i++, c += ldc) {
		if (beta == 0.0f)
			memset(c, 0, (size_t)n * sizeof *c);
		else if (beta != 1.0f)
			for (int64_t j = 0; j < n; j++)
				c[j] *= beta;
	}
}

static void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m, int64_t n, int64_t k,
		 float alpha, const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
		 float *c, int64_t ldc)
{
	if (m <= 0 || n <= 0)
		return;
	if (k <= 0) {
		scale_rows(m, n, beta, c, ldc);
		return;
	}
	MOE_ASSERT(m <= INT32_MAX && n <= INT32_MAX && k <= INT32_MAX);
	MOE_ASSERT(lda <= INT32_MAX && ldb <= INT32_MAX && ldc <= INT32_MAX);
	cblas_sgemm(CblasRowMajor, ta, tb, (int)m, (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb,
		    beta, c, (int)ldc);
}

void ref_gemm_nt(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
		 const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
	gemm(CblasNoTrans, CblasTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void ref_gemm_nn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
		 const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
	gemm(CblasNoTrans, CblasNoTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void ref_gemm_tn(int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
		 const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
	gemm(CblasTrans, CblasNoTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

static enum moe_dtype packed_dtype(enum moe_dtype src)
{
	MOE_ASSERT(src == MOE_F32 || src == MOE_BF16 || src == MOE_F16 || src == MOE_F64);
	return src == MOE_F64 ? MOE_F32 : src;
}

size_t ref_weight_bytes(enum moe_dtype src, int64_t n, int64_t k, enum moe_weight_use use)
{
	(void)use; /* always exact */
	return (size_t)n * (size_t)k * moe_dtype_size(packed_dtype(src));
}

void ref_weight_pack(struct moe_weight *W, const void *src, enum moe_dtype src_dtype, int64_t n,
		     int64_t k, int64_t ld, enum moe_weight_use use)
{
	const char *from = src;
	char *to = W->data;
	size_t from_size = moe_dtype_size(src_dtype), to_size;

	(void)use;
	W->layout = MOE_LAYOUT_ROWS;
	W->dtype = packed_dtype(src_dtype);
	W->n = n;
	W->k = k;
	if (!src)
		return;
	to_size = moe_dtype_size(W->dtype);
	for (int64_t i = 0; i < n; i++) {
		if (src_dtype == MOE_F64)
			moe_to_f32((float *)(void *)to, from, MOE_F64, (size_t)k);
		else
			memcpy(to, from, (size_t)k * to_size);
		from += (size_t)ld * from_size;
		to += (size_t)k * to_size;
	}
}

void ref_weight_repack(const struct moe_weight *W, const float *src, int64_t n0, int64_t n1)
{
	MOE_ASSERT(W->dtype == MOE_F32);
	memcpy((float *)W->data + n0 * W->k, src, (size_t)((n1 - n0) * W->k) * sizeof *src);
}

static void expand_bf16(int64_t n, const uint16_t *restrict src, float *restrict dst)
{
	for (int64_t i = 0; i < n; i++)
		dst[i] = ref_bits_float((uint32_t)src[i] << 16);
}

/* Without branches, unlike moe_f16_to_f32, whose bits it returns. */
static void expand_f16(int64_t n, const uint16_t *restrict src, float *restrict dst)
{
	for (int64_t i = 0; i < n; i++) {
		uint32_t sign = (uint32_t)(src[i] & 0x8000) << 16, abs = src[i] & 0x7fffu;
		uint32_t bits = (abs << 13) + (112u << 23), tiny;
		/* zero and subnormals: abs * 2^-24 is exact */
		float small = (float)(int32_t)abs * 0x1p-24f;

		memcpy(&tiny, &small, sizeof tiny);
		bits = abs >= 0x7c00 ? bits | 0x7f800000u : bits;
		bits = abs < 0x400 ? tiny : bits;
		dst[i] = ref_bits_float(bits | sign);
	}
}

/* Rows n0..n1, columns k0..k1 in f32, *ld apart: in place for F32, else expanded into scratch. */
static const float *weight_block(const struct moe_weight *W, int64_t n0, int64_t n1, int64_t k0,
				 int64_t k1, float *scratch, int64_t *ld)
{
	size_t first = (size_t)n0 * (size_t)W->k + (size_t)k0;
	int64_t rows = n1 - n0, width = k1 - k0;
	const uint16_t *src;

	if (moe_is_coded(W)) {
		moe_coded_rows(W, n0, n1, k0, k1, scratch, width);
		*ld = width;
		return scratch;
	}
	if (W->dtype == MOE_F32) {
		*ld = W->k;
		return (const float *)W->data + first;
	}
	MOE_ASSERT(W->dtype == MOE_BF16 || W->dtype == MOE_F16);
	src = (const uint16_t *)W->data + first;
	if (width == W->k) { /* contiguous */
		width *= rows;
		rows = 1;
	}
	for (int64_t i = 0; i < rows; i++) {
		if (W->dtype == MOE_BF16)
			expand_bf16(width, src + i * W->k, scratch + i * width);
		else
			expand_f16(width, src + i * W->k, scratch + i * width);
	}
	*ld = k1 - k0;
	return scratch;
}

void ref_weight_unpack(const struct moe_weight *W, int64_t n0, int64_t n1, float *dst)
{
	int64_t ld;
	const float *rows;

	if (n1 <= n0 || W->k <= 0)
		return;
	rows = weight_block(W, n0, n1, 0, W->k, dst, &ld);
	if (rows != dst)
		memcpy(dst, rows, (size_t)(n1 - n0) * (size_t)W->k * sizeof *dst);
}

size_t ref_weight_scratch(int64_t n, int64_t k)
{
	return (size_t)MOE_MIN(n, MOE_CHUNK) * (size_t)k * sizeof(float);
}

void ref_weight_gemm_nt(int64_t m, const struct moe_weight *W, int64_t n0, int64_t n1,
			const float *x, int64_t ldx, float beta, float *y, int64_t ldy,
			void *scratch)
{
	if (m <= 0)
		return;
	for (int64_t n = n0; n < n1; n += MOE_CHUNK) {
		int64_t end = MOE_MIN(n + MOE_CHUNK, n1), ld;
		const float *w = weight_block(W, n, end, 0, W->k, scratch, &ld);

		ref_gemm_nt(m, end - n, W->k, 1.0f, x, ldx, w, ld, beta, y + (n - n0), ldy);
	}
}

void ref_weight_gemm_nn(int64_t m, const struct moe_weight *W, int64_t n0, int64_t n1, int64_t k0,
			int64_t k1, const float *dy, int64_t lddy, float beta, float *dx,
			int64_t lddx, void *scratch)
{
	if (m <= 0 || k1 <= k0)
		return;
	if (n1 <= n0)
		scale_rows(m, k1 - k0, beta, dx, lddx);
	for (int64_t n = n0; n < n1; n += MOE_CHUNK) {
		int64_t end = MOE_MIN(n + MOE_CHUNK, n1), ld;
		const float *w = weight_block(W, n, end, k0, k1, scratch, &ld);

		ref_gemm_nn(m, k1 - k0, end - n, 1.0f, dy + (n - n0), lddy, w, ld,
			    n == n0 ? beta : 1.0f, dx, lddx);
	}
}
