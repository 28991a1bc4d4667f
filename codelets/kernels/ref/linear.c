/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/ref/gemm.h"
#include "codelets/kernels/ref/ref.h"

/* Scratch: two thin [m, r] matrices, then the expanded chunk of the weight, then (LoRA) masked rows [m, k]. */
static float *weight_part(int m, const struct moe_lora *lora, void *scratch)
{
	return (float *)scratch + (lora ? 2 * (size_t)m * (size_t)lora->r : 0);
}

size_t ref_linear_scratch(int m, int64_t n, int64_t k, int r)
{
	size_t rows = r ? (size_t)m * (size_t)k : 0;

	return (2 * (size_t)m * (size_t)r + rows) * sizeof(float) + ref_weight_scratch(n, k);
}

static bool drops(const struct moe_lora *lora)
{
	return lora && lora->r && lora->drop;
}

/* x as A sees it. */
static const float *lora_input(int m, int64_t n, int64_t k, const float *x, int64_t *ldx,
			       const struct moe_lora *lora, void *scratch)
{
	float *rows;

	if (!drops(lora))
		return x;
	rows = (float *)((char *)weight_part(m, lora, scratch) + ref_weight_scratch(n, k));
	moe_drop_rows(lora->drop, lora->token, m, k, x, *ldx, rows);
	*ldx = k;
	return rows;
}

void ref_linear(int m, const struct moe_weight *W, int64_t n0, int64_t n1, const float *x,
		int64_t ldx, const float *bias, const struct moe_lora *lora, float *y, int64_t ldy,
		void *scratch)
{
	float *u = scratch;

	MOE_ASSERT(n0 % MOE_CHUNK == 0);
	ref_weight_gemm_nt(m, W, n0, n1, x, ldx, 0.0f, y, ldy, weight_part(m, lora, scratch));
	if (lora && lora->r) {
		x = lora_input(m, W->n, W->k, x, &ldx, lora, scratch);
		ref_gemm_nt(m, lora->r, W->k, 1.0f, x, ldx, lora->a, W->k, 0.0f, u, lora->r);
		for (int64_t n = n0; n < n1; n += MOE_CHUNK)
			ref_gemm_nt(m, MOE_MIN(MOE_CHUNK, n1 - n), lora->r, lora->scale, u, lora->r,
				    lora->b + n * lora->r, lora->r, 1.0f, y + (n - n0), ldy);
	}
	if (!bias)
		return;
	for (int64_t i = 0; i < m; i++) {
		float *row = y + i * ldy;

		for (int64_t j = 0; j < n1 - n0; j++)
			row[j] += bias[n0 + j];
	}
}

/* z[m, r] = dy[m, n] B[n, r], in index order over chunks of n */
static void thin_grad(int m, int64_t n, const float *dy, int64_t lddy, const struct moe_lora *lora,
		      float *z)
{
	int r = lora->r;

	if (n <= 0)
		memset(z, 0, (size_t)m * (size_t)r * sizeof *z);
	for (int64_t c = 0; c < n; c += MOE_CHUNK)
		ref_gemm_nn(m, r, MOE_MIN(MOE_CHUNK, n - c), 1.0f, dy + c, lddy, lora->b + c * r, r,
			    c ? 1.0f : 0.0f, z, r);
}

/* dx += mask scale z A */
static void add_dropped(int m, const struct moe_weight *W, const struct moe_lora *lora, const float *z, float *dx,
			int64_t lddx, void *scratch)
{
	float *rows = (float *)((char *)weight_part(m, lora, scratch) + ref_weight_scratch(W->n, W->k));

	ref_gemm_nn(m, W->k, lora->r, lora->scale, z, lora->r, lora->a, W->k, 0.0f, rows, W->k);
	for (int64_t i = 0; i < m; i++) {
		float *row = rows + i * W->k;

		moe_drop(lora->drop, (enum moe_dropped)0, lora->token + i, 0, W->k, row);
		for (int64_t j = 0; j < W->k; j++)
			dx[i * lddx + j] += row[j];
	}
}

void ref_linear_bwd(int m, const struct moe_weight *W, const float *dy, int64_t lddy,
		    const struct moe_lora *lora, float *dx, int64_t lddx, bool accumulate,
		    void *scratch)
{
	float *z = scratch;

	ref_weight_gemm_nn(m, W, 0, W->n, 0, W->k, dy, lddy, accumulate ? 1.0f : 0.0f, dx, lddx,
			   weight_part(m, lora, scratch));
	if (!lora || !lora->r)
		return;
	thin_grad(m, W->n, dy, lddy, lora, z);
	if (drops(lora)) {
		add_dropped(m, W, lora, z, dx, lddx, scratch);
		return;
	}
	ref_gemm_nn(m, W->k, lora->r, lora->scale, z, lora->r, lora->a, W->k, 1.0f, dx, lddx);
}

void ref_linear_lora_grad(int m, int64_t n, int64_t k, const float *x, int64_t ldx, const float *dy,
			  int64_t lddy, const struct moe_lora *lora, float *ga, float *gb,
			  void *scratch)
{
	int r = lora->r;
	float *u = scratch, *z = u + (size_t)m * (size_t)r;

	if (m <= 0 || !r)
		return;
	x = lora_input(m, n, k, x, &ldx, lora, scratch);
	thin_grad(m, n, dy, lddy, lora, z);
	ref_gemm_tn(r, k, m, lora->scale, z, r, x, ldx, 1.0f, ga, k);
	ref_gemm_nt(m, r, k, 1.0f, x, ldx, lora->a, k, 0.0f, u, r);
	for (int64_t c = 0; c < n; c += MOE_CHUNK)
		ref_gemm_tn(MOE_MIN(MOE_CHUNK, n - c), r, m, lora->scale, dy + c, lddy, u, r, 1.0f,
			    gb + c * r, r);
}

size_t ref_linear_grad_scratch(int m, int64_t n, int64_t k)
{
	(void)m, (void)n, (void)k;
	return 0;
}

void ref_linear_weight_grad(int m, int64_t n, int64_t k, const float *x, int64_t ldx,
			    const float *dy, int64_t lddy, float *g, enum moe_weight_use use,
			    void *scratch)
{
	(void)use, (void)scratch;
	for (int64_t c = 0; c < n; c += MOE_CHUNK)
		ref_gemm_tn(MOE_MIN(MOE_CHUNK, n - c), k, m, 1.0f, dy + c, lddy, x, ldx, 1.0f,
			    g + c * k, k);
}
