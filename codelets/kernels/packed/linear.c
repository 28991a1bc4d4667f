/* SPDX-License-Identifier: Apache-2.0 */
/* Dense layers on packed weights. LoRA matrices are packed per call: for a token block that is
 * nothing. */
#include "codelets/kernels/packed/ints.h"
#include "codelets/kernels/packed/packed.h"
#include "codelets/kernels/packed/scratch.h"

static bool exact(const struct moe_weight *W)
{
	return W->layout == MOE_LAYOUT_ROWS;
}

struct linear_scratch {
	void *panel, *thin;		    /* [m, kp or np], [m, rp] */
	uint16_t *a, *b;		    /* packed LoRA */
	float *z;			    /* [m, rp] */
	float *tile;			    /* [m, 16]: the last columns, or one step of bwd */
	void *pair_x, *pair_dy, *pair_thin; /* pair arrays of one strip each, and of rp */
	uint16_t *weight; /* a decoded panel or slice */
	float *masked;	  /* [m, k] under dropout */
	void *ints;	  /* x as integers */
	void *bwd;
};

#define GRAD_STRIP 64 /* columns paired at a time */

static struct linear_scratch carve(const struct moe_tiles *t, struct moe_carver *c, int m,
				   int64_t n, int64_t k, int r)
{
	int64_t np = moe_round_up(n, MOE_PACK_K), kp = moe_round_up(k, MOE_PACK_K);
	int64_t rp = moe_round_up(r, t->lora_pad);
	size_t M = (size_t)m + (size_t)m % 2;
	struct linear_scratch s;

	s.panel = moe_carve(c, M * (size_t)MOE_MAX(np, kp) * (size_t)t->panel_bytes);
	s.thin = moe_carve(c, M * (size_t)rp * (size_t)t->panel_bytes);
	s.a = moe_carve(c, r ? moe_packed_lora_bytes(t, MOE_LORA_A, r, k) : 0);
	s.b = moe_carve(c, r ? moe_packed_lora_bytes(t, MOE_LORA_B, np, r) : 0);
	s.z = moe_carve(c, M * (size_t)rp * sizeof(float));
	s.tile = moe_carve(c, M * MOE_CHUNK * sizeof(float));
	s.pair_x = moe_carve(c, M * GRAD_STRIP * (size_t)t->pair_bytes);
	s.pair_dy = moe_carve(c, M * GRAD_STRIP * (size_t)t->pair_bytes);
	s.pair_thin = moe_carve(c, M * (size_t)rp * (size_t)t->pair_bytes);
	s.weight = moe_carve(c, MOE_MAX((size_t)(MOE_PACK_N * kp) * sizeof *s.weight, moe_coded_slice_bytes(np)));
	s.masked = moe_carve(c, r ? M * (size_t)k * sizeof(float) : 0);
	s.ints = moe_carve(c, moe_int_bytes(t, MOE_COMPUTE_INT8, m, k));
	s.bwd = moe_carve(c, t->bwd_scratch(m, np + rp, (int)MOE_MAX(MOE_CHUNK, kp)));
	return s;
}

size_t moe_packed_linear_scratch(const struct moe_tiles *t, int m, int64_t n, int64_t k, int r)
{
	struct moe_carver c = { 0 };

	carve(t, &c, m, n, k, r);
	return MOE_MAX(c.used, ref_linear_scratch(m, n, k, r));
}

/* thin = x A^T as the second segment's panel */
static void thin_fwd(const struct moe_tiles *t, int m, int64_t kp, const struct moe_lora *lora,
		     const struct linear_scratch *s)
{
	int64_t rp = moe_round_up(lora->r, t->lora_pad);

	for (int64_t j = 0; j < rp; j += MOE_PACK_N) {
		struct moe_fwd_seg seg = { s->panel, kp, 0, (int)kp,
					   s->a + j / MOE_PACK_N * moe_packed_stride(kp) };

		if (j < lora->r)
			t->fwd(m, &seg, 1, NULL, s->tile, MOE_PACK_N, MOE_OUT_STORE);
		else
			memset(s->tile, 0, (size_t)m * MOE_PACK_N * sizeof *s->tile);
		t->pack_fwd(m, s->tile, MOE_PACK_N, NULL, MOE_PACK_N, MOE_PACK_N, s->thin, rp, j);
		for (int i = 0; i < m; i++)
			memcpy(s->z + i * rp + j, s->tile + i * MOE_PACK_N,
			       MOE_PACK_N * sizeof *s->z);
	}
}

static bool drops(const struct moe_lora *lora)
{
	return lora && lora->r && lora->drop;
}

/* x as A sees it. */
static const float *lora_input(int m, int64_t k, const float *x, int64_t *ldx, const struct moe_lora *lora,
			       const struct linear_scratch *s)
{
	if (!drops(lora))
		return x;
	moe_drop_rows(lora->drop, lora->token, m, k, x, *ldx, s->masked);
	*ldx = k;
	return s->masked;
}

static void add_bias(int m, int64_t n, const float *bias, float *y, int64_t ldy)
{
	for (int i = 0; bias && i < m; i++, y += ldy)
		for (int64_t j = 0; j < n; j++)
			y[j] += bias[j];
}

void moe_packed_linear(const struct moe_tiles *t, moe_pack_rows *pack, int m,
		       const struct moe_weight *W, int64_t n0, int64_t n1, const float *x,
		       int64_t ldx, const float *bias, const struct moe_lora *lora, float *y,
		       int64_t ldy, void *scratch)
{
	int64_t kp = moe_round_up(W->k, MOE_PACK_K), ldlora = ldx;
	int r = lora ? lora->r : 0;
	int64_t rp = moe_round_up(r, t->lora_pad);
	struct moe_carver c = { .base = scratch };
	const struct moe_int_rows *ints;
	struct linear_scratch s;

	if (exact(W)) {
		ref_linear(m, W, n0, n1, x, ldx, bias, lora, y, ldy, scratch);
		return;
	}
	if (m <= 0 || n1 <= n0)
		return;
	s = carve(t, &c, m, W->n, W->k, r);
	if (r) {
		const float *input = lora_input(m, W->k, x, &ldlora, lora, &s);

		moe_packed_lora_pack(t, pack, MOE_LORA_A, lora->a, r, W->k, 0, r, 1, s.a);
		moe_packed_lora_pack(t, pack, MOE_LORA_B, lora->b, W->n, r, n0, n1, lora->scale,
				     s.b);
		t->pack_fwd(m, input, ldlora, NULL, W->k, kp, s.panel, kp, 0);
		thin_fwd(t, m, kp, lora, &s);
	}
	if (!r || drops(lora))
		t->pack_fwd(m, x, ldx, NULL, W->k, kp, s.panel, kp, 0);
	ints = moe_int_operand(t, m, W, s.panel, kp, s.ints);
	for (int64_t n = n0; n < n1; n += MOE_PACK_N) {
		int64_t index = n / MOE_PACK_N;
		struct moe_fwd_seg seg[2] = {
			{ s.panel, kp, 0, (int)kp, NULL },
			{ s.thin, rp, 0, (int)rp, s.b + n / MOE_PACK_N * moe_packed_stride(rp) },
		};
		int64_t width = MOE_MIN(MOE_PACK_N, n1 - n);
		bool whole = width == MOE_PACK_N;

		moe_forward(t, m, W, index, ints, seg, r ? 2 : 1,
			    n + MOE_PACK_N < n1 ? moe_panel_address(W, index + 1) : NULL,
			    whole ? y + (n - n0) : s.tile, whole ? ldy : MOE_PACK_N, MOE_OUT_STORE, s.weight);
		for (int i = 0; !whole && i < m; i++)
			memcpy(y + i * ldy + (n - n0), s.tile + i * MOE_PACK_N,
			       (size_t)width * sizeof *y);
	}
	add_bias(m, n1 - n0, bias ? bias + n0 : NULL, y, ldy);
}

/* z = dy B (B already scaled) and its backward panel in s->thin; dy is in s->panel, np wide */
static void thin_bwd(const struct moe_tiles *t, int m, int64_t np, const struct moe_lora *lora,
		     const struct linear_scratch *s)
{
	int64_t rp = moe_round_up(lora->r, t->lora_pad);

	for (int64_t j = 0; j < rp; j += t->lora_pad) {
		struct moe_bwd_seg seg = {
			s->panel, np, 0, (int)np, s->b + MOE_PACK_N * j, moe_packed_stride(rp), NULL, NULL
		};

		t->bwd(m, &seg, 1, t->lora_pad, s->z + j, rp, MOE_OUT_STORE, s->bwd);
	}
	t->pack_bwd(m, s->z, rp, NULL, rp, rp, s->thin, rp, 0);
}

/* Rows of B beyond n up to np, which thin_bwd multiplies by zeros: they must not hold NaN. */
static void pack_b(const struct moe_tiles *t, moe_pack_rows *pack, int64_t n, int64_t np,
		   const struct moe_lora *lora, uint16_t *b)
{
	int64_t rp = moe_round_up(lora->r, t->lora_pad), panels = moe_packed_panels(n);

	moe_packed_lora_pack(t, pack, MOE_LORA_B, lora->b, n, lora->r, 0, n, lora->scale, b);
	if (np > panels * MOE_PACK_N)
		memset(b + panels * moe_packed_stride(rp), 0,
		       (size_t)moe_packed_stride(rp) * sizeof *b);
}

/* dx += LoRA's share (s->thin A), masked, a few columns at a time */
static void add_dropped(const struct moe_tiles *t, int m, int64_t k, const struct moe_lora *lora,
			const struct linear_scratch *s, float *dx, int64_t lddx)
{
	int64_t kp = moe_round_up(k, MOE_PACK_K), rp = moe_round_up(lora->r, t->lora_pad);
	int64_t step = MOE_MIN(t->bwd_columns(m), MOE_CHUNK);

	for (int64_t j = 0; j < kp; j += step) {
		int width = (int)MOE_MIN(step, kp - j);
		struct moe_bwd_seg seg = { s->thin, rp, 0, (int)moe_round_up(lora->r, MOE_PACK_N),
					   s->a + MOE_PACK_N * j, moe_packed_stride(kp), NULL, NULL };

		t->bwd(m, &seg, 1, width, s->tile, width, MOE_OUT_STORE, s->bwd);
		for (int i = 0; i < m; i++) {
			float *row = s->tile + i * width;

			moe_drop(lora->drop, (enum moe_dropped)0, lora->token + i, j, MOE_MIN(width, k - j), row);
			for (int64_t l = 0; l < width && j + l < k; l++)
				dx[i * lddx + j + l] += row[l];
		}
	}
}

void moe_packed_linear_bwd(const struct moe_tiles *t, moe_pack_rows *pack, int m,
			   const struct moe_weight *W, const float *dy, int64_t lddy,
			   const struct moe_lora *lora, float *dx, int64_t lddx, bool accumulate,
			   void *scratch)
{
	int64_t np = moe_round_up(W->n, MOE_PACK_N), kp = moe_round_up(W->k, MOE_PACK_K);
	int r = lora ? lora->r : 0, step = moe_backward_columns(t, m, W, np);
	int64_t rp = moe_round_up(r, t->lora_pad);
	struct moe_carver c = { .base = scratch };
	bool fused = r && !drops(lora);
	struct linear_scratch s;

	if (exact(W)) {
		ref_linear_bwd(m, W, dy, lddy, lora, dx, lddx, accumulate, scratch);
		return;
	}
	if (m <= 0)
		return;
	s = carve(t, &c, m, W->n, W->k, r);
	t->pack_bwd(m, dy, lddy, NULL, W->n, np, s.panel, np, 0);
	if (r) {
		moe_packed_lora_pack(t, pack, MOE_LORA_A, lora->a, r, W->k, 0, r, 1, s.a);
		pack_b(t, pack, W->n, np, lora, s.b);
		thin_bwd(t, m, np, lora, &s);
	}
	if (W->k != kp) /* the last columns go through `tile` */
		step = MOE_MIN(step, MOE_CHUNK);
	for (int64_t k = 0; k < kp; k += step) {
		int width = (int)MOE_MIN(step, kp - k);
		int64_t inside = MOE_MIN(width, W->k - k);
		struct moe_bwd_seg seg[2] = {
			{ s.panel, np, 0, (int)np, NULL, 0, NULL, NULL },
			{ s.thin, rp, 0, (int)moe_round_up(r, MOE_PACK_N), s.a + MOE_PACK_N * k,
			  moe_packed_stride(kp), NULL, NULL },
		};
		bool whole = inside == width;
		struct moe_coded_slice slice;
		enum moe_out out = accumulate && whole ? MOE_OUT_ADD : MOE_OUT_STORE;

		moe_backward_slice(t, m, W, 0, np, k, width, s.weight, &slice, &seg[0]);
		if (k + step >= kp)
			seg[0].after = seg[0].w;
		t->bwd(m, seg, fused ? 2 : 1, width, whole ? dx + k : s.tile, whole ? lddx : width, out,
		       s.bwd);
		for (int i = 0; !whole && i < m; i++)
			for (int64_t j = 0; j < inside; j++) {
				float *to = dx + i * lddx + k + j, v = s.tile[i * width + j];

				*to = accumulate ? *to + v : v;
			}
	}
	if (drops(lora))
		add_dropped(t, m, W->k, lora, &s, dx, lddx);
}

void moe_packed_linear_lora_grad(const struct moe_tiles *t, moe_pack_rows *pack, int m, int64_t n,
				 int64_t k, const float *x, int64_t ldx, const float *dy,
				 int64_t lddy, const struct moe_lora *lora, float *ga, float *gb,
				 void *scratch)
{
	int64_t np = moe_round_up(n, MOE_PACK_N), kp = moe_round_up(k, MOE_PACK_K);
	int r = lora->r;
	int64_t rp = moe_round_up(r, t->lora_pad);
	struct moe_carver c = { .base = scratch };
	struct linear_scratch s;

	if (m <= 0 || !r)
		return;
	s = carve(t, &c, m, n, k, r);
	x = lora_input(m, k, x, &ldx, lora, &s);
	moe_packed_lora_pack(t, pack, MOE_LORA_A, lora->a, r, k, 0, r, 1, s.a);
	pack_b(t, pack, n, np, lora, s.b);
	t->pack_bwd(m, dy, lddy, NULL, n, np, s.panel, np, 0);
	thin_bwd(t, m, np, lora, &s);
	t->pairs(m, s.z, rp, NULL, NULL, (int)rp, s.pair_thin);
	for (int64_t j = 0; j < k; j += GRAD_STRIP) {
		int width = (int)MOE_MIN(GRAD_STRIP, k - j);

		moe_pair_strip(t, m, x + j, ldx, NULL, width, s.tile, s.pair_x);
		t->grad(m, s.pair_thin, rp, r, s.pair_x, moe_round_up(width, 16), width, 1, ga + j,
			k, MOE_OUT_ADD);
	}
	t->pack_fwd(m, x, ldx, NULL, k, kp, s.panel, kp, 0);
	thin_fwd(t, m, kp, lora, &s);
	t->pairs(m, s.z, rp, NULL, NULL, (int)rp, s.pair_thin);
	for (int64_t j = 0; j < n; j += GRAD_STRIP) {
		int width = (int)MOE_MIN(GRAD_STRIP, n - j);

		moe_pair_strip(t, m, dy + j, lddy, NULL, width, s.tile, s.pair_dy);
		t->grad(m, s.pair_dy, moe_round_up(width, 16), width, s.pair_thin, rp, r,
			lora->scale, gb + j * r, r, MOE_OUT_ADD);
	}
}

struct grad_scratch {
	void *dy, *x; /* pair arrays of MOE_CHUNK and GRAD_STRIP columns */
	float *rows;  /* [m, MOE_CHUNK] where columns are not a multiple of 16 */
};

static struct grad_scratch carve_grad(const struct moe_tiles *t, struct moe_carver *c, int m)
{
	size_t M = (size_t)m + (size_t)m % 2;
	struct grad_scratch s;

	s.dy = moe_carve(c, M * MOE_CHUNK * (size_t)t->pair_bytes);
	s.x = moe_carve(c, M * GRAD_STRIP * (size_t)t->pair_bytes);
	s.rows = moe_carve(c, M * MOE_CHUNK * sizeof(float));
	return s;
}

size_t moe_packed_linear_grad_scratch(const struct moe_tiles *t, int m, int64_t n, int64_t k)
{
	struct moe_carver c = { 0 };

	(void)n, (void)k;
	carve_grad(t, &c, m);
	return c.used;
}

/* x is paired again per chunk of n: of a slice of an array there are few */
void moe_packed_linear_weight_grad(const struct moe_tiles *t, int m, int64_t n, int64_t k,
				   const float *x, int64_t ldx, const float *dy, int64_t lddy,
				   float *g, enum moe_weight_use use, void *scratch)
{
	struct moe_carver c = { .base = scratch };
	struct grad_scratch s;

	if (use == MOE_USE_EXACT) {
		ref_linear_weight_grad(m, n, k, x, ldx, dy, lddy, g, use, scratch);
		return;
	}
	if (m <= 0)
		return;
	s = carve_grad(t, &c, m);
	for (int64_t i = 0; i < n; i += MOE_CHUNK) {
		int rows = (int)MOE_MIN(MOE_CHUNK, n - i);

		moe_pair_strip(t, m, dy + i, lddy, NULL, rows, s.rows, s.dy);
		for (int64_t j = 0; j < k; j += GRAD_STRIP) {
			int width = (int)MOE_MIN(GRAD_STRIP, k - j);

			moe_pair_strip(t, m, x + j, ldx, NULL, width, s.rows, s.x);
			t->grad(m, s.dy, moe_round_up(rows, 16), rows, s.x, moe_round_up(width, 16), width, 1,
				g + i * k + j, k, MOE_OUT_ADD);
		}
	}
}
