/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention inside documents by blocks of MOE_TOKEN_BLOCK rows and keys with a running
 * softmax (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2): memory is linear in the length.
 * Key blocks lie at multiples of MOE_TOKEN_BLOCK, so that a result never depends on how rows and
 * heads are dealt out. A masked weight is exactly 0, but 0 times a NaN value of the same key block
 * is NaN.
 */
#include "codelets/kernels/ref/ref.h"
#include "codelets/kernels/elementwise/vecmath.h"

#define BLOCK MOE_TOKEN_BLOCK

/* One block of query rows against one block of key rows, for one query head. */
struct tile {
	const struct moe_attention *a;
	int h, q0, m, k0, n;
	int64_t ldq, ldk; /* rows of q, o and of k, v */
	size_t q, k;	  /* first element of the tile's rows in q, o and in k, v */
};

size_t ref_attention_scratch(int dim)
{
	(void)dim;
	return 2 * BLOCK * BLOCK * sizeof(float);
}

static void tile_rows(struct tile *t, const struct moe_attention *a, int h, int q0, int m)
{
	t->a = a;
	t->h = h;
	t->q0 = q0;
	t->m = m;
	t->ldq = (int64_t)a->heads * a->dim;
	t->ldk = (int64_t)a->kv_heads * a->dim;
	t->q = (size_t)q0 * (size_t)t->ldq + (size_t)h * (size_t)a->dim;
}

static void tile_keys(struct tile *t, int k0, int n)
{
	int g = t->h / (t->a->heads / t->a->kv_heads);

	t->k0 = k0;
	t->n = n;
	t->k = (size_t)k0 * (size_t)t->ldk + (size_t)g * (size_t)t->a->dim;
}

/* s[m, n] (rows BLOCK apart) = scale q k^T */
static void tile_scores(const struct tile *t, float *s)
{
	ref_gemm_nt(t->m, t->n, t->a->dim, t->a->scale, t->a->q + t->q, t->ldq, t->a->k + t->k,
		    t->ldk, 0.0f, s, BLOCK);
}

/* The keys lo..hi of the tile that its row i sees; none: lo >= hi. */
static void tile_span(const struct tile *t, int i, int *lo, int *hi)
{
	*lo = MOE_MAX(t->a->doc_start[t->q0 + i] - t->k0, 0);
	*hi = MOE_MIN(t->a->past + t->q0 + i + 1 - t->k0, t->n);
}

/* Zeroes what lies outside of lo..hi. */
static void mask_row(float *row, int lo, int hi, int n)
{
	if (lo >= hi)
		lo = hi = 0;
	memset(row, 0, (size_t)lo * sizeof *row);
	memset(row + hi, 0, (size_t)(n - hi) * sizeof *row);
}

/* First key block that any row of q0..q1 sees. */
static int first_key_block(const struct moe_attention *a, int q0, int q1)
{
	int first = a->past + q0;

	for (int i = q0; i < q1; i++)
		first = MOE_MIN(first, a->doc_start[i]);
	return first - first % BLOCK;
}

/* row[i] = e^(row[i] - base); returns their sum */
static float exp_row(int n, float *row, float base)
{
	float lane[REF_LANES] = { 0 }, sum = 0.0f;
	int i = 0;

	for (int j = 0; j < n; j++)
		row[j] = ref_exp(row[j] - base);
	for (; i + REF_LANES <= n; i += REF_LANES)
		for (int l = 0; l < REF_LANES; l++)
			lane[l] += row[i + l];
	for (; i < n; i++)
		sum += row[i];
	for (int l = 0; l < REF_LANES; l++)
		sum += lane[l];
	return sum;
}

/* Scores to weights relative to the rows' new maxima; what o and sum hold so far is rescaled. */
static void running_softmax(const struct tile *t, bool first, float *s, float *max, float *sum)
{
	for (int i = 0; i < t->m; i++) {
		float *row = s + i * BLOCK, *o = t->a->o + t->q + i * t->ldq;
		float new_max, base, keep;
		int lo, hi;

		tile_span(t, i, &lo, &hi);
		mask_row(row, lo, hi, t->n);
		if (lo >= hi)
			continue;
		new_max = ref_max(hi - lo, row + lo);
		new_max = new_max > max[i] ? new_max : max[i];
		base = ref_softmax_base(new_max);
		keep = ref_exp(max[i] - base);
		sum[i] = sum[i] * keep + exp_row(hi - lo, row + lo, base);
		max[i] = new_max;
		if (first || keep == 1.0f)
			continue;
		for (int d = 0; d < t->a->dim; d++)
			o[d] *= keep;
	}
}

/* Rows q0..q0+m (at most BLOCK) of head h. */
static void forward_rows(const struct moe_attention *a, int q0, int m, int h, float *s)
{
	float max[BLOCK], sum[BLOCK];
	int end = a->past + q0 + m;
	struct tile t;
	bool first = true;

	tile_rows(&t, a, h, q0, m);
	for (int i = 0; i < m; i++) {
		max[i] = -INFINITY;
		sum[i] = 0.0f;
	}
	for (int k = first_key_block(a, q0, q0 + m); k < end; k += BLOCK, first = false) {
		tile_keys(&t, k, MOE_MIN(BLOCK, end - k));
		tile_scores(&t, s);
		running_softmax(&t, first, s, max, sum);
		ref_gemm_nn(m, a->dim, t.n, 1.0f, s, BLOCK, a->v + t.k, t.ldk, first ? 0.0f : 1.0f,
			    a->o + t.q, t.ldq);
	}
	for (int i = 0; i < m; i++) {
		float *o = a->o + t.q + i * t.ldq, inverse = 1.0f / sum[i];

		for (int d = 0; d < a->dim; d++)
			o[d] *= inverse;
		a->lse[(size_t)h * (size_t)a->T + (size_t)(q0 + i)] = max[i] + logf(sum[i]);
	}
}

void ref_attention(const struct moe_attention *a, int q0, int q1, int h0, int h1, void *scratch)
{
	for (int h = h0; h < h1; h++)
		for (int q = q0; q < q1; q += BLOCK)
			forward_rows(a, q, MOE_MIN(BLOCK, q1 - q), h, scratch);
}

void ref_attention_centre(const struct moe_attention *a, int q0, int q1)
{
	for (int i = q0; i < q1; i++)
		for (int h = 0; h < a->heads; h++) {
			size_t at = ((size_t)i * (size_t)a->heads + (size_t)h) * (size_t)a->dim;

			a->centre[(size_t)h * (size_t)a->T + (size_t)i] =
				(float)ref_dot(a->dim, a->grad_o + at, a->o + at);
		}
}

/* p = softmax weights and ds = gradients of the scaled scores, both [m, n] with rows BLOCK apart */
static void tile_grad(const struct tile *t, float *p, float *ds)
{
	const struct moe_attention *a = t->a;
	size_t row0 = (size_t)t->h * (size_t)a->T + (size_t)t->q0;
	const float *lse = a->lse + row0, *centre = a->centre + row0;

	tile_scores(t, p);
	ref_gemm_nt(t->m, t->n, a->dim, 1.0f, a->grad_o + t->q, t->ldq, a->v + t->k, t->ldk, 0.0f,
		    ds, BLOCK);
	for (int i = 0; i < t->m; i++) {
		float *prow = p + i * BLOCK, *drow = ds + i * BLOCK;
		int lo, hi;

		tile_span(t, i, &lo, &hi);
		mask_row(prow, lo, hi, t->n);
		mask_row(drow, lo, hi, t->n);
		for (int j = lo; j < hi; j++)
			prow[j] = ref_exp(prow[j] - lse[i]);
		for (int j = lo; j < hi; j++)
			drow[j] = prow[j] * (drow[j] - centre[i]);
	}
}

void ref_attention_bwd_q(const struct moe_attention *a, int q0, int q1, int h0, int h1,
			 void *scratch)
{
	float *p = scratch, *ds = p + BLOCK * BLOCK;
	struct tile t;

	for (int h = h0; h < h1; h++)
		for (int q = q0; q < q1; q += BLOCK) {
			int end = MOE_MIN(q + BLOCK, q1), first = first_key_block(a, q, end);

			tile_rows(&t, a, h, q, end - q);
			for (int k = first; k < end; k += BLOCK) {
				tile_keys(&t, k, MOE_MIN(BLOCK, end - k));
				tile_grad(&t, p, ds);
				ref_gemm_nn(t.m, a->dim, t.n, a->scale, ds, BLOCK, a->k + t.k,
					    t.ldk, k > first ? 1.0f : 0.0f, a->grad_q + t.q, t.ldq);
			}
		}
}

/* One block of key rows, summed over the query heads h0..h1 of its group. */
static void backward_keys(const struct moe_attention *a, int k0, int n, int h0, int h1, float *p)
{
	float *ds = p + BLOCK * BLOCK, beta = 0.0f;
	struct tile t;
	int end = k0;

	while (end < a->T && a->doc_start[end] < k0 + n) /* later rows see none of these keys */
		end++;
	for (int h = h0; h < h1; h++)
		for (int q = k0; q < end; q += BLOCK) {
			tile_rows(&t, a, h, q, MOE_MIN(BLOCK, end - q));
			tile_keys(&t, k0, n);
			tile_grad(&t, p, ds);
			ref_gemm_tn(n, a->dim, t.m, a->scale, ds, BLOCK, a->q + t.q, t.ldq, beta,
				    a->grad_k + t.k, t.ldk);
			ref_gemm_tn(n, a->dim, t.m, 1.0f, p, BLOCK, a->grad_o + t.q, t.ldq, beta,
				    a->grad_v + t.k, t.ldk);
			beta = 1.0f;
		}
}

void ref_attention_bwd_kv(const struct moe_attention *a, int k0, int k1, int g0, int g1,
			  void *scratch)
{
	int group = a->heads / a->kv_heads;

	for (int g = g0; g < g1; g++)
		for (int k = k0; k < k1; k += BLOCK)
			backward_keys(a, k, MOE_MIN(BLOCK, k1 - k), g * group, (g + 1) * group,
				      scratch);
}
