/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reference expert ops. With g = x Wg^T + s (x Ag^T) Bg^T, u likewise, h = silu(g) u and
 * y = h Wd^T + s (h Ad^T) Bd^T, the block adds w y to the token's output. All products with a chunk
 * of I or H have that chunk's width, whatever the slicing.
 */
#include "codelets/kernels/ref/gemm.h"
#include "codelets/kernels/ref/ref.h"

#define ROW_BLOCK 256 /* rows gathered at a time where no panel is kept */

static int64_t chunk_end(int c, int64_t n)
{
	return MOE_MIN((int64_t)(c + 1) * MOE_CHUNK, n);
}

static int chunks_of(int64_t n)
{
	return (int)((n + MOE_CHUNK - 1) / MOE_CHUNK);
}

size_t ref_expert_scratch(int m, int64_t H, int64_t I, int r, enum moe_compute compute)
{
	size_t weight = MOE_MAX(ref_weight_scratch(I, H), ref_weight_scratch(H, I));
	size_t thin = (size_t)m * (size_t)r * 2 * sizeof(float);
	size_t rows = (size_t)ROW_BLOCK * (size_t)MOE_MAX(H, I) * sizeof(float);

	(void)compute; /* no integers */
	return weight + thin + rows;
}

/* dst[m, n] = sum over chunks of part[c][row][n], in index order */
static void sum_chunks(int chunks, size_t stride, int m, int n, const float *part, float *dst)
{
	size_t count = (size_t)m * (size_t)n;

	if (!chunks) {
		memset(dst, 0, count * sizeof *dst);
		return;
	}
	memcpy(dst, part, count * sizeof *dst);
	for (int c = 1; c < chunks; c++)
		for (size_t i = 0; i < count; i++)
			dst[i] += part[(size_t)c * stride * (size_t)n + i];
}

/* dst[m, H] = rows token[row0..] of src */
static void gather_rows(const struct moe_expert_rows *w, const float *src, int row0, int m, float *dst)
{
	for (int i = 0; i < m; i++)
		memcpy(dst + (size_t)i * (size_t)w->H, src + (size_t)w->token[row0 + i] * (size_t)w->H,
		       (size_t)w->H * sizeof *dst);
}

/* dst[m, r] = weight[row] * src[m, r] */
static void scale_rows(int m, int r, const float *weight, const float *src, float *dst)
{
	for (int i = 0; i < m; i++)
		for (int j = 0; j < r; j++)
			dst[(size_t)i * r + j] = weight[i] * src[(size_t)i * r + j];
}

/* The rows' arrays of this table are float. */
static float *f32(void *rows)
{
	return rows;
}

/* h of n columns of a row, at element `at` of gate, up and h */
static void hidden(const struct moe_expert *e, const struct moe_expert_rows *w, int n, size_t at)
{
	if (moe_glu_plain(&e->glu))
		OWN(swiglu)(n, f32(w->gate) + at, f32(w->up) + at, f32(w->h) + at);
	else
		OWN(glu)(&e->glu, n, f32(w->gate) + at, f32(w->up) + at, f32(w->h) + at);
}

/* dgate and dup from dh, which lies where dgate will */
static void hidden_bwd(const struct moe_expert *e, const struct moe_expert_rows *w, int n, size_t at)
{
	float *dgate = f32(w->dgate) + at, *dup = f32(w->dup) + at;

	if (moe_glu_plain(&e->glu))
		OWN(swiglu_bwd)(n, f32(w->gate) + at, f32(w->up) + at, dgate, dgate, dup);
	else
		OWN(glu_bwd)(&e->glu, n, f32(w->gate) + at, f32(w->up) + at, dgate, dgate, dup);
}

/* Rows row0.. of src [., ld], columns n0..n0+n, masked, into dst [m, n] */
static void drop_rows(const struct moe_expert_rows *w, enum moe_dropped which, int64_t first, int row0, int m,
		      const float *src, int64_t ld, int64_t n0, int64_t n, float *dst)
{
	for (int i = 0; i < m; i++) {
		memcpy(dst + i * n, src + (row0 + i) * ld + n0, (size_t)n * sizeof *dst);
		moe_drop(&w->drop, which, w->token[row0 + i], first + n0, n, dst + i * n);
	}
}

/* c[m, n] += mask * (scale thin[m, r] a[r, n]), in blocks of rows; rows: [ROW_BLOCK, n] */
static void add_dropped(const struct moe_expert_rows *w, enum moe_dropped which, int64_t first, int64_t n0,
			int64_t n, float scale, const float *thin, int64_t ldt, int r, const float *a,
			int64_t lda, float *c, int64_t ldc, float *rows)
{
	for (int i0 = 0; i0 < w->m; i0 += ROW_BLOCK) {
		int m = MOE_MIN(ROW_BLOCK, w->m - i0);

		ref_gemm_nn(m, n, r, scale, thin + i0 * ldt, ldt, a + n0, lda, 0, rows, n);
		for (int i = 0; i < m; i++) {
			moe_drop(&w->drop, which, w->token[i0 + i], first + n0, n, rows + i * n);
			for (int64_t j = 0; j < n; j++)
				c[(i0 + i) * ldc + n0 + j] += rows[i * n + j];
		}
	}
}

/* u from masked x */
static void dropped_u(const struct moe_expert *e, struct moe_expert_rows *w, float *rows)
{
	for (int i0 = 0; i0 < w->m; i0 += ROW_BLOCK) {
		int m = MOE_MIN(ROW_BLOCK, w->m - i0);
		float *u = f32(w->u) + (size_t)i0 * (size_t)e->ra;

		drop_rows(w, MOE_DROP_GATE, 0, i0, m, f32(w->panel), w->H, 0, w->H, rows);
		ref_gemm_nt(m, e->r, w->H, 1, rows, w->H, e->a_gu, w->H, 0, u, e->ra);
		if (e->ra == e->r)
			continue;
		drop_rows(w, MOE_DROP_UP, 0, i0, m, f32(w->panel), w->H, 0, w->H, rows);
		ref_gemm_nt(m, e->r, w->H, 1, rows, w->H, e->a_gu + (size_t)e->r * (size_t)w->H, w->H, 0,
			    u + e->r, e->ra);
	}
}

void ref_expert_gather(const struct moe_expert *e, struct moe_expert_rows *w, void *scratch)
{
	gather_rows(w, w->x, 0, w->m, f32(w->panel));
	if (e->r && w->drop.p > 0)
		dropped_u(e, w, scratch);
	else if (e->r)
		ref_gemm_nt(w->m, e->ra, w->H, 1, f32(w->panel), w->H, e->a_gu, w->H, 0, f32(w->u), e->ra);
}

void ref_expert_gate_up(const struct moe_expert *e, struct moe_expert_rows *w, int c0, int c1,
			void *scratch)
{
	const float *u_up = e->r ? f32(w->u) + (e->ra - e->r) : NULL; /* 0 when gate and up share A */
	int I = w->I;

	for (int c = c0; c < c1; c++) {
		int64_t n0 = (int64_t)c * MOE_CHUNK, n1 = chunk_end(c, I);
		int n = (int)(n1 - n0);

		ref_weight_gemm_nt(w->m, &e->gate, n0, n1, f32(w->panel), w->H, 0, f32(w->gate) + n0, I, scratch);
		ref_weight_gemm_nt(w->m, &e->up, n0, n1, f32(w->panel), w->H, 0, f32(w->up) + n0, I, scratch);
		if (e->r) {
			ref_gemm_nt(w->m, n, e->r, e->scale, f32(w->u), e->ra, e->gate_b + n0 * e->r, e->r, 1,
				    f32(w->gate) + n0, I);
			ref_gemm_nt(w->m, n, e->r, e->scale, u_up, e->ra, e->up_b + n0 * e->r, e->r, 1,
				    f32(w->up) + n0, I);
		}
		for (int i = 0; i < w->m; i++) {
			size_t at = (size_t)i * (size_t)I + (size_t)n0;

			hidden(e, w, n, at);
		}
		for (int i0 = 0; e->r && w->drop.p > 0 && i0 < w->m; i0 += ROW_BLOCK) {
			int m = MOE_MIN(ROW_BLOCK, w->m - i0);

			drop_rows(w, MOE_DROP_DOWN, w->drop.i0, i0, m, f32(w->h), I, n0, n, scratch);
			ref_gemm_nt(m, e->r, n, 1, scratch, n, e->down_a + n0, I, 0,
				    w->v_part + ((size_t)c * w->part_rows + (size_t)i0) * e->r, e->r);
		}
		if (e->r && !(w->drop.p > 0))
			ref_gemm_nt(w->m, e->r, n, 1, f32(w->h) + n0, I, e->down_a + n0, I, 0,
				    w->v_part + (size_t)c * w->part_rows * e->r, e->r);
	}
}

void ref_expert_down(const struct moe_expert *e, struct moe_expert_rows *w, int c0, int c1,
		     void *scratch)
{
	float *v = scratch;
	void *rest = v + (size_t)w->m * (size_t)e->r;

	if (e->r)
		sum_chunks(chunks_of(w->I), w->part_rows, w->m, e->r, w->v_part, v);
	if (e->r && c0 == 0 && c1 > 0)
		memcpy(w->v, v, (size_t)w->m * (size_t)e->r * sizeof *v);
	for (int c = c0; c < c1; c++) {
		int64_t n0 = (int64_t)c * MOE_CHUNK, n1 = chunk_end(c, w->H);

		ref_weight_gemm_nt(w->m, &e->down, n0, n1, f32(w->h), w->I, 0, w->y + n0, w->H, rest);
		if (e->r)
			ref_gemm_nt(w->m, (int)(n1 - n0), e->r, e->scale, v, e->r,
				    e->down_b + n0 * e->r, e->r, 1, w->y + n0, w->H);
	}
}

void ref_expert_scatter(const struct moe_expert *e, struct moe_expert_rows *w, void *scratch)
{
	(void)scratch;
	gather_rows(w, w->grad_out, 0, w->m, f32(w->panel));
	if (e->r)
		ref_gemm_nn(w->m, e->r, w->H, 1, f32(w->panel), w->H, e->down_b, e->r, 0, w->z, e->r);
}

/* One chunk of dh (unweighted, left in dgate), h again, and the routing-weight gradient's share. */
static void chunk_dh(const struct moe_expert *e, struct moe_expert_rows *w, int c, int64_t n0, int n,
		     void *scratch)
{
	ref_weight_gemm_nn(w->m, &e->down, 0, w->H, n0, n0 + n, f32(w->panel), w->H, 0, f32(w->dgate) + n0, w->I,
			   scratch);
	if (e->r && w->drop.p > 0)
		add_dropped(w, MOE_DROP_DOWN, w->drop.i0, n0, n, e->scale, w->z, e->r, e->r, e->down_a, w->I,
			    f32(w->dgate), w->I, scratch);
	else if (e->r)
		ref_gemm_nn(w->m, n, e->r, e->scale, w->z, e->r, e->down_a + n0, w->I, 1, f32(w->dgate) + n0,
			    w->I);
	for (int i = 0; i < w->m; i++) {
		size_t at = (size_t)i * (size_t)w->I + (size_t)n0;
		double dot = 0;

		hidden(e, w, n, at);
		for (int j = 0; j < n; j++)
			dot += (double)f32(w->dgate)[at + (size_t)j] * f32(w->h)[at + (size_t)j];
		w->dgw_part[(size_t)c * w->part_rows + (size_t)i] = (float)dot;
	}
}

void ref_expert_down_bwd(const struct moe_expert *e, struct moe_expert_rows *w,
			 const struct moe_expert_grad *g, int c0, int c1, void *scratch)
{
	float *zw = scratch;
	void *rest = zw + (size_t)w->m * (size_t)e->r;
	const float *u_up = e->r ? f32(w->u) + (e->ra - e->r) : NULL;
	float beta = g->first ? 0 : 1;
	int I = w->I, r = e->r;

	if (r && g->down_a)
		scale_rows(w->m, r, w->weight, w->z, zw);
	for (int c = c0; c < c1; c++) {
		int64_t n0 = (int64_t)c * MOE_CHUNK;
		int n = (int)(chunk_end(c, I) - n0);
		float *part = w->w_part + (size_t)c * w->part_rows * 2 * (size_t)r;

		chunk_dh(e, w, c, n0, n, rest);
		for (int i = 0; i < w->m; i++) {
			size_t at = (size_t)i * (size_t)I + (size_t)n0;

			for (int j = 0; j < n; j++)
				f32(w->dgate)[at + (size_t)j] *= w->weight[i];
			hidden_bwd(e, w, n, at);
		}
		if (!r)
			continue;
		ref_gemm_nn(w->m, r, n, 1, f32(w->dgate) + n0, I, e->gate_b + n0 * r, r, 0, part, 2 * r);
		ref_gemm_nn(w->m, r, n, 1, f32(w->dup) + n0, I, e->up_b + n0 * r, r, 0, part + r, 2 * r);
		if (!g->down_a)
			continue;
		for (int i0 = 0; w->drop.p > 0 && i0 < w->m; i0 += ROW_BLOCK) {
			int m = MOE_MIN(ROW_BLOCK, w->m - i0);

			drop_rows(w, MOE_DROP_DOWN, w->drop.i0, i0, m, f32(w->h), I, n0, n, rest);
			ref_gemm_tn(r, n, m, e->scale, zw + (size_t)i0 * r, r, rest, n, i0 ? 1 : beta,
				    g->down_a + n0, I);
		}
		if (!(w->drop.p > 0))
			ref_gemm_tn(r, n, w->m, e->scale, zw, r, f32(w->h) + n0, I, beta, g->down_a + n0, I);
		ref_gemm_tn(n, r, w->m, e->scale, f32(w->dgate) + n0, I, f32(w->u), e->ra, beta, g->gate_b + n0 * r, r);
		ref_gemm_tn(n, r, w->m, e->scale, f32(w->dup) + n0, I, u_up, e->ra, beta, g->up_b + n0 * r, r);
	}
}

void ref_expert_gate_up_bwd(const struct moe_expert *e, struct moe_expert_rows *w, int c0, int c1,
			    void *scratch)
{
	float *wg = scratch;
	void *rest = wg + (size_t)w->m * 2 * (size_t)e->r;
	int H = w->H, r = e->r;

	if (r)
		sum_chunks(chunks_of(w->I), w->part_rows, w->m, 2 * r, w->w_part, wg);
	for (int c = c0; c < c1; c++) {
		int64_t n0 = (int64_t)c * MOE_CHUNK, n1 = chunk_end(c, H);
		int n = (int)(n1 - n0);

		ref_weight_gemm_nn(w->m, &e->gate, 0, w->I, n0, n1, f32(w->dgate), w->I, 0, w->y + n0, H, rest);
		ref_weight_gemm_nn(w->m, &e->up, 0, w->I, n0, n1, f32(w->dup), w->I, 1, w->y + n0, H, rest);
		if (!r)
			continue;
		if (w->drop.p > 0) {
			add_dropped(w, MOE_DROP_GATE, 0, n0, n, e->scale, wg, 2 * r, r, e->a_gu, H, w->y, H, rest);
			add_dropped(w, MOE_DROP_UP, 0, n0, n, e->scale, wg + r, 2 * r, r,
				    e->a_gu + (size_t)(e->ra - r) * (size_t)H, H, w->y, H, rest);
			continue;
		}
		ref_gemm_nn(w->m, n, r, e->scale, wg, 2 * r, e->a_gu + n0, H, 1, w->y + n0, H);
		ref_gemm_nn(w->m, n, r, e->scale, wg + r, 2 * r,
			    e->a_gu + (size_t)(e->ra - r) * (size_t)H + n0, H, 1, w->y + n0, H);
	}
}

/* Gathered rows of x, in place; without dropout as they are. */
static void mask_rows(const struct moe_expert_rows *w, enum moe_dropped which, int row0, int m, float *rows)
{
	for (int i = 0; w->drop.p > 0 && i < m; i++)
		moe_drop(&w->drop, which, w->token[row0 + i], 0, w->H, rows + (size_t)i * (size_t)w->H);
}

void ref_expert_lora_grad(const struct moe_expert *e, struct moe_expert_rows *w,
			  const struct moe_expert_grad *g, void *scratch)
{
	int H = w->H, r = e->r;
	float *vw = scratch, *rows = vw + (size_t)w->m * (size_t)r;

	scale_rows(w->m, r, w->weight, w->v, vw);
	for (int i0 = 0; i0 < w->m; i0 += ROW_BLOCK) {
		int m = MOE_MIN(ROW_BLOCK, w->m - i0);
		const float *wg = w->wg + (size_t)i0 * 2 * (size_t)r;
		float beta = g->first && i0 == 0 ? 0 : 1;

		gather_rows(w, w->x, i0, m, rows);
		mask_rows(w, MOE_DROP_GATE, i0, m, rows);
		ref_gemm_tn(r, H, m, e->scale, wg, 2 * r, rows, H, beta, g->a_gu, H);
		if (w->drop.p > 0) {
			gather_rows(w, w->x, i0, m, rows);
			mask_rows(w, MOE_DROP_UP, i0, m, rows);
		}
		ref_gemm_tn(r, H, m, e->scale, wg + r, 2 * r, rows, H, e->ra == r ? 1 : beta,
			    g->a_gu + (size_t)(e->ra - r) * (size_t)H, H);
		gather_rows(w, w->grad_out, i0, m, rows);
		ref_gemm_tn(H, r, m, e->scale, rows, H, vw + (size_t)i0 * (size_t)r, r, beta, g->down_b, r);
	}
}

void ref_expert_weight_grad(const struct moe_expert *e, struct moe_expert_rows *w,
			    const struct moe_expert_grad *g, void *scratch)
{
	int H = w->H, I = w->I;
	float *rows = scratch;

	(void)e;
	for (int i0 = 0; i0 < w->m; i0 += ROW_BLOCK) {
		int m = MOE_MIN(ROW_BLOCK, w->m - i0);
		size_t at = (size_t)i0 * (size_t)I;
		float beta = g->first && i0 == 0 ? 0 : 1;

		if (g->gate || g->up)
			gather_rows(w, w->x, i0, m, rows);
		if (g->gate)
			ref_gemm_tn(I, H, m, 1, f32(w->dgate) + at, I, rows, H, beta, g->gate, H);
		if (g->up)
			ref_gemm_tn(I, H, m, 1, f32(w->dup) + at, I, rows, H, beta, g->up, H);
		if (!g->down)
			continue;
		gather_rows(w, w->grad_out, i0, m, rows);
		for (int i = 0; i < m; i++)
			for (int j = 0; j < H; j++)
				rows[(size_t)i * (size_t)H + (size_t)j] *= w->weight[i0 + i];
		ref_gemm_tn(H, I, m, 1, rows, H, f32(w->h) + at, I, beta, g->down, I);
	}
}
