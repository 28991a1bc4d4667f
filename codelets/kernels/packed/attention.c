/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention inside documents by blocks of MOE_TOKEN_BLOCK rows and keys with a running
 * softmax (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2): memory is linear in the length.
 * A block of k and v is packed as if it were a weight, once for the query heads that share it; then
 * q k^T and grad_o v^T are forward GEMMs, p v and ds k backward ones. For the gradients of k and v
 * the roles change: q and grad_o are the weights, and tiles are transposed.
 *
 * Key blocks lie at multiples of MOE_TOKEN_BLOCK, so that a result never depends on how rows and
 * heads are dealt out. A masked weight is exactly 0, but 0 times a NaN value of the same key block
 * is NaN.
 */
#include "codelets/kernels/packed/packed.h"
#include "codelets/kernels/packed/scratch.h"

#include <math.h>

#define BLOCK MOE_TOKEN_BLOCK
#define HEADS 8 /* query heads that share a packed block; more of them would leave L2 */

struct attention_scratch {
	uint16_t *rows;	       /* bf16 [BLOCK, kp] */
	uint16_t *w[2];	       /* packed blocks: k and v, or q and grad_o */
	void *panel[2][HEADS]; /* forward panels: q and grad_o, or k and v (one each) */
	float *s, *d;	       /* tiles */
	void *tile_panel;      /* backward panel of a tile */
	/* [BLOCK, kp]: o or grad_q by head, or grad_k and grad_v. The caller's rows lie a power of
	 * two apart as often as not, where a few of them fill their cache sets. */
	float *sum[HEADS];
	void *bwd;
};

/* The whole of one call. */
struct call {
	const struct moe_attention_ops *ops;
	const struct moe_tiles *t;
	const struct moe_attention *a;
	int64_t kp, ldq, ldk; /* padded dim; rows of q, o and of k, v */
	struct attention_scratch s;
};

/* Of a block or what is left of one: few rows may need more than many. */
static size_t bwd_bytes(const struct moe_tiles *t, int64_t kp)
{
	size_t most = 0;

	for (int m = 1; m <= BLOCK; m++)
		most = MOE_MAX(most, t->bwd_scratch(m, BLOCK, (int)MOE_MAX(MOE_CHUNK, kp)));
	return most;
}

static struct attention_scratch carve(const struct moe_tiles *t, struct moe_carver *c, int64_t kp)
{
	struct attention_scratch s;
	size_t panel = BLOCK * (size_t)t->panel_bytes;

	s.rows = moe_carve(c, BLOCK * (size_t)kp * sizeof *s.rows);
	for (int i = 0; i < 2; i++) {
		s.w[i] = moe_carve(c, moe_packed_bytes(BLOCK, kp));
		for (int h = 0; h < HEADS; h++)
			s.panel[i][h] = moe_carve(c, (size_t)kp * panel);
	}
	s.s = moe_carve(c, BLOCK * MOE_TILE_LD * sizeof(float));
	s.d = moe_carve(c, BLOCK * MOE_TILE_LD * sizeof(float));
	s.tile_panel = moe_carve(c, BLOCK * panel);
	for (int h = 0; h < HEADS; h++)
		s.sum[h] = moe_carve(c, BLOCK * (size_t)kp * sizeof(float));
	s.bwd = moe_carve(c, bwd_bytes(t, kp));
	return s;
}

size_t moe_packed_attention_scratch(const struct moe_tiles *t, int dim)
{
	struct moe_carver c = { 0 };

	carve(t, &c, moe_round_up(dim, MOE_PACK_K));
	return c.used;
}

static struct call call_of(const struct moe_attention_ops *ops, const struct moe_attention *a,
			   void *scratch)
{
	struct moe_carver carver = { .base = scratch };
	struct call c = { ops, ops->tiles, a, .kp = moe_round_up(a->dim, MOE_PACK_K) };

	c.ldq = (int64_t)a->heads * a->dim;
	c.ldk = (int64_t)a->kv_heads * a->dim;
	c.s = carve(c.t, &carver, c.kp);
	return c;
}

static size_t at_q(const struct call *c, int row, int head)
{
	return (size_t)row * (size_t)c->ldq + (size_t)head * (size_t)c->a->dim;
}

static size_t at_row(const struct moe_attention *a, int row, int head)
{
	return (size_t)head * (size_t)a->T + (size_t)row;
}

static size_t at_k(const struct call *c, int row, int kv_head)
{
	return (size_t)row * (size_t)c->ldk + (size_t)kv_head * (size_t)c->a->dim;
}

/* n rows of dim as a packed weight */
static void pack_weight(const struct call *c, int n, const float *src, int64_t ld, uint16_t *w)
{
	for (int i = 0; i < n; i += MOE_PACK_N, w += moe_packed_stride(c->kp))
		c->ops->pack_rows(c->t->layout, MOE_MIN(MOE_PACK_N, n - i), c->a->dim, c->kp, src + i * ld,
				  ld, 1, w);
}

/*
 * Rounded to bf16 in every table: the backward swaps operands, and its scores must be the ones that
 * lse came from.
 */
static void pack_panel(const struct call *c, int m, const float *src, int64_t ld, void *panel)
{
	if (c->t->panel_bytes == sizeof(uint16_t)) {
		c->t->pack_fwd(m, src, ld, NULL, c->a->dim, c->kp, panel, c->kp, 0);
		return;
	}
	c->ops->to_bf16(m, c->a->dim, src, ld, c->s.rows, c->kp);
	c->t->pack_fwd_bf16(m, c->s.rows, c->kp, NULL, c->kp, c->kp, panel, c->kp, 0);
}

/* tile[m, n] = panel w^T; n a multiple of 16 */
static void products(const struct call *c, int m, int n, const void *panel, const uint16_t *w,
		     float *tile)
{
	struct moe_fwd_seg seg = { panel, c->kp, 0, (int)c->kp, w };

	for (int j = 0; j < n; j += MOE_PACK_N, seg.w += moe_packed_stride(c->kp))
		c->t->fwd(m, &seg, 1, NULL, tile + j, MOE_TILE_LD, MOE_OUT_STORE);
}

/* sum[m, kp] (+)= tile[m, n] w */
static void apply(const struct call *c, int m, int n, const float *tile, const uint16_t *w,
		  float *sum, bool add)
{
	const struct moe_tiles *t = c->t;
	int columns = (int)c->kp, step = t->bwd_columns(m);

	t->pack_bwd(m, tile, MOE_TILE_LD, NULL, n, n, c->s.tile_panel, n, 0);
	for (int k = 0; k < columns; k += step) {
		struct moe_bwd_seg seg = { c->s.tile_panel,	    n, 0, n, w + MOE_PACK_N * k,
					   moe_packed_stride(c->kp), NULL, NULL };

		t->bwd(m, &seg, 1, MOE_MIN(step, columns - k), sum + k, c->kp,
		       add ? MOE_OUT_ADD : MOE_OUT_STORE, c->s.bwd);
	}
}

static void copy_rows(const struct call *c, int m, const float *sum, float *dst, int64_t ld)
{
	for (int i = 0; i < m; i++)
		memcpy(dst + i * ld, sum + i * c->kp, (size_t)c->a->dim * sizeof *dst);
}

/* First key block that any row of q0..q1 sees. */
static int first_key_block(const struct moe_attention *a, int q0, int q1)
{
	int first = a->past + q0;

	for (int i = q0; i < q1; i++)
		first = MOE_MIN(first, a->doc_start[i]);
	return first - first % BLOCK;
}

/* Rows q0..q0+m against keys k0..k0+n. */
static void spans(const struct moe_attention *a, int q0, int m, int k0, int n,
		  struct moe_score_tile *t)
{
	t->m = m;
	t->n = (int)moe_round_up(n, MOE_PACK_N);
	t->scale = a->scale;
	for (int i = 0; i < m; i++) {
		t->lo[i] = MOE_MAX(a->doc_start[q0 + i] - k0, 0);
		t->hi[i] = MOE_MIN(a->past + q0 + i + 1 - k0, n);
	}
}

/* Keys k0..k0+n against rows q0..q0+m: a key is seen by the rest of its document. */
static void spans_of_keys(const struct moe_attention *a, int k0, int n, int q0, int m,
			  struct moe_score_tile *t)
{
	int hi = 0;

	t->m = n;
	t->n = (int)moe_round_up(m, MOE_PACK_N);
	t->scale = a->scale;
	for (int j = 0; j < n; j++) {
		while (hi < m && a->doc_start[q0 + hi] <= k0 + j)
			hi++;
		t->lo[j] = MOE_MAX(k0 + j - q0, 0);
		t->hi[j] = hi;
	}
}

/* The next heads of h..h1 that share keys, up to HEADS. */
static int heads_end(const struct moe_attention *a, int h, int h1)
{
	int group = a->heads / a->kv_heads;

	return MOE_MIN(MOE_MIN(h1, h + HEADS), (h / group + 1) * group);
}

/* Rows q0..q0+m of heads h0..h1 of one kv head. */
static void forward_rows(const struct call *c, int q0, int m, int h0, int h1)
{
	const struct moe_attention *a = c->a;
	int g = h0 / (a->heads / a->kv_heads), first = first_key_block(a, q0, q0 + m);
	int end = a->past + q0 + m;
	struct moe_softmax_state state[HEADS];
	struct moe_score_tile tile;

	for (int h = h0; h < h1; h++) {
		struct moe_softmax_state *s = &state[h - h0];

		s->o = c->s.sum[h - h0];
		s->ldo = c->kp;
		s->dim = a->dim;
		for (int i = 0; i < m; i++) {
			s->max[i] = -INFINITY;
			s->sum[i] = 0.0f;
		}
		pack_panel(c, m, a->q + at_q(c, q0, h), c->ldq, c->s.panel[0][h - h0]);
	}
	for (int k = first; k < end; k += BLOCK) {
		int n = MOE_MIN(BLOCK, end - k);

		pack_weight(c, n, a->k + at_k(c, k, g), c->ldk, c->s.w[0]);
		pack_weight(c, n, a->v + at_k(c, k, g), c->ldk, c->s.w[1]);
		spans(a, q0, m, k, n, &tile);
		for (int h = 0; h < h1 - h0; h++) {
			products(c, m, tile.n, c->s.panel[0][h], c->s.w[0], c->s.s);
			c->ops->softmax.weights(&tile, k == first, c->s.s, &state[h]);
			apply(c, m, tile.n, c->s.s, c->s.w[1], c->s.sum[h], k > first);
		}
	}
	for (int h = h0; h < h1; h++)
		c->ops->softmax.finish(m, &state[h - h0], a->o + at_q(c, q0, h), c->ldq,
				       a->lse + at_row(a, q0, h));
}

void moe_packed_attention(const struct moe_attention_ops *ops, const struct moe_attention *a,
			  int q0, int q1, int h0, int h1, void *scratch)
{
	struct call c = call_of(ops, a, scratch);

	for (int h = h0, end; h < h1; h = end) {
		end = heads_end(a, h, h1);
		for (int q = q0; q < q1; q += BLOCK)
			forward_rows(&c, q, MOE_MIN(BLOCK, q1 - q), h, end);
	}
}

void moe_packed_attention_centre(const struct moe_attention_ops *ops, const struct moe_attention *a,
				 int q0, int q1)
{
	for (int i = q0; i < q1; i++)
		for (int h = 0; h < a->heads; h++) {
			size_t at = ((size_t)i * (size_t)a->heads + (size_t)h) * (size_t)a->dim;

			a->centre[at_row(a, i, h)] =
				ops->softmax.dot(a->dim, a->grad_o + at, a->o + at);
		}
}

static void backward_rows(const struct call *c, int q0, int m, int h0, int h1)
{
	const struct moe_attention *a = c->a;
	int g = h0 / (a->heads / a->kv_heads), first = first_key_block(a, q0, q0 + m);
	struct moe_score_tile tile;

	for (int h = h0; h < h1; h++) {
		pack_panel(c, m, a->q + at_q(c, q0, h), c->ldq, c->s.panel[0][h - h0]);
		pack_panel(c, m, a->grad_o + at_q(c, q0, h), c->ldq, c->s.panel[1][h - h0]);
	}
	for (int k = first; k < q0 + m; k += BLOCK) {
		int n = MOE_MIN(BLOCK, q0 + m - k);

		pack_weight(c, n, a->k + at_k(c, k, g), c->ldk, c->s.w[0]);
		pack_weight(c, n, a->v + at_k(c, k, g), c->ldk, c->s.w[1]);
		spans(a, q0, m, k, n, &tile);
		for (int h = 0; h < h1 - h0; h++) {
			size_t row = at_row(a, q0, h0 + h);

			products(c, m, tile.n, c->s.panel[0][h], c->s.w[0], c->s.s);
			products(c, m, tile.n, c->s.panel[1][h], c->s.w[1], c->s.d);
			c->ops->softmax.backward(&tile, false, a->lse + row, a->centre + row,
						 c->s.s, c->s.d);
			apply(c, m, tile.n, c->s.d, c->s.w[0], c->s.sum[h], k > first);
		}
	}
	for (int h = h0; h < h1; h++)
		copy_rows(c, m, c->s.sum[h - h0], a->grad_q + at_q(c, q0, h), c->ldq);
}

void moe_packed_attention_bwd_q(const struct moe_attention_ops *ops, const struct moe_attention *a,
				int q0, int q1, int h0, int h1, void *scratch)
{
	struct call c = call_of(ops, a, scratch);

	for (int h = h0, end; h < h1; h = end) {
		end = heads_end(a, h, h1);
		for (int q = q0; q < q1; q += BLOCK)
			backward_rows(&c, q, MOE_MIN(BLOCK, q1 - q), h, end);
	}
}

/* What the rows q0..q0+m of head h add to the gradients of keys k0..k0+n. */
static void add_rows(const struct call *c, int k0, int n, int h, int q0, int m, bool first)
{
	const struct moe_attention *a = c->a;
	size_t q = at_q(c, q0, h), row = at_row(a, q0, h);
	float centre[BLOCK] = { 0 }, lse[BLOCK] = { 0 };
	struct moe_score_tile tile;

	memcpy(lse, a->lse + row, (size_t)m * sizeof *lse);
	memcpy(centre, a->centre + row, (size_t)m * sizeof *centre);
	pack_weight(c, m, a->q + q, c->ldq, c->s.w[0]);
	pack_weight(c, m, a->grad_o + q, c->ldq, c->s.w[1]);
	spans_of_keys(a, k0, n, q0, m, &tile);
	products(c, n, tile.n, c->s.panel[0][0], c->s.w[0], c->s.s);
	products(c, n, tile.n, c->s.panel[1][0], c->s.w[1], c->s.d);
	c->ops->softmax.backward(&tile, true, lse, centre, c->s.s, c->s.d);
	apply(c, n, tile.n, c->s.d, c->s.w[0], c->s.sum[0], !first);
	apply(c, n, tile.n, c->s.s, c->s.w[1], c->s.sum[1], !first);
}

/* One block of key rows, summed over the query heads of its group. */
static void backward_keys(const struct call *c, int k0, int n, int g)
{
	const struct moe_attention *a = c->a;
	int group = a->heads / a->kv_heads, end = k0;
	bool first = true;

	while (end < a->T && a->doc_start[end] < k0 + n) /* later rows see none of these keys */
		end++;
	pack_panel(c, n, a->k + at_k(c, k0, g), c->ldk, c->s.panel[0][0]);
	pack_panel(c, n, a->v + at_k(c, k0, g), c->ldk, c->s.panel[1][0]);
	for (int h = g * group; h < (g + 1) * group; h++)
		for (int q = k0; q < end; q += BLOCK, first = false)
			add_rows(c, k0, n, h, q, MOE_MIN(BLOCK, end - q), first);
	copy_rows(c, n, c->s.sum[0], a->grad_k + at_k(c, k0, g), c->ldk);
	copy_rows(c, n, c->s.sum[1], a->grad_v + at_k(c, k0, g), c->ldk);
}

void moe_packed_attention_bwd_kv(const struct moe_attention_ops *ops, const struct moe_attention *a,
				 int k0, int k1, int g0, int g1, void *scratch)
{
	struct call c = call_of(ops, a, scratch);

	for (int g = g0; g < g1; g++)
		for (int k = k0; k < k1; k += BLOCK)
			backward_keys(&c, k, MOE_MIN(BLOCK, k1 - k), g);
}
