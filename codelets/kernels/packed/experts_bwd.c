/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward of one expert. dh = grad_out W_down + z A_down with z = grad_out (s B_down), all without
 * the routing weight, so that dot(dh, h) is the routing weight's gradient; dgate and dup carry it.
 * The gradients of the I side (B of gate and up, A of down) are taken 16 columns at a time while
 * these are in cache.
 *
 * Two ways: the products by W itself (bwd, activations in backward panels), or by transposed copies
 * (fwd, activations in forward panels) where the expert has them. The functions of the second end
 * in _t.
 */
#include "codelets/kernels/packed/experts.h"

/* Products of forward panels with the r rows of a packed B^T, depth k from column col: 16 columns
 * each of dst, rows ld apart; zeros up to the padded rank. */
static void thin_t(const struct moe_tiles *t, int m, const struct moe_widths *d,
		   struct moe_fwd_seg seg, const void *b, int64_t stride, float *dst, int64_t ld)
{
	for (int64_t j = 0; j < d->r; j += MOE_PACK_N) {
		if (j < d->thin) {
			seg.w = moe_at(b, j / MOE_PACK_N * stride + MOE_PACK_N * seg.col);
			t->fwd(m, &seg, 1, NULL, dst + j, ld, MOE_OUT_STORE);
			continue;
		}
		for (int i = 0; i < m; i++)
			memset(dst + i * ld + j, 0, MOE_PACK_N * sizeof *dst);
	}
}

static void scatter_t(const struct moe_tiles *t, const struct moe_expert *e,
		      struct moe_expert_rows *w)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_fwd_seg seg = { w->panel, d.H, 0, (int)d.H, NULL };

	t->pack_fwd(w->m, w->grad_out, w->H, w->token, w->H, d.H, w->panel, d.H, 0);
	if (e->r)
		thin_t(t, w->m, &d, seg, e->down_b_t, d.stride_h, w->z, d.r);
}

void moe_packed_expert_scatter(const struct moe_tiles *t, const struct moe_expert *e,
			       struct moe_expert_rows *w, void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);
	int64_t n = moe_round_up(w->H, MOE_PACK_N);

	if (e->gate_t.data) {
		scatter_t(t, e, w);
		return;
	}
	t->pack_bwd(w->m, w->grad_out, w->H, w->token, w->H, d.H, w->panel, d.H, 0);
	for (int64_t j = 0; e->r && j < d.r; j += t->lora_pad) {
		struct moe_bwd_seg seg = {
			w->panel,  d.H, 0, (int)n, moe_at(e->down_b_packed, MOE_PACK_N * j),
			d.stride_r, NULL, NULL
		};

		t->bwd(w->m, &seg, 1, t->lora_pad, w->z + j, d.r, MOE_OUT_STORE, s.bwd);
	}
}

/* Operands of one down_bwd call that all its columns share. */
struct down_bwd {
	const struct moe_tiles *t;
	const struct moe_expert *e;
	const struct moe_expert_rows *w;
	const struct moe_expert_grad *g;
	struct moe_widths d;
	struct moe_expert_scratch s;
	const void *u_gate, *u_up, *zw; /* pair arrays [m, r'] */
	int64_t first, end;		/* columns of I */
	bool transposed;
};

/* 16 columns of dgate or dup, f32 rows, as what the rest of the backward reads */
static void pack_columns(const struct down_bwd *b, const float *src, void *panel, int64_t col)
{
	(b->transposed ? b->t->pack_fwd : b->t->pack_bwd)(
		b->w->m, src, MOE_PACK_N, NULL, MOE_PACK_N, MOE_PACK_N, panel, b->d.I, col);
}

/* z as operand; u and w z as pair arrays */
static void prepare_thin(struct down_bwd *b)
{
	const struct moe_expert_rows *w = b->w;
	const struct moe_expert_scratch *s = &b->s;
	int64_t r = b->d.r, ra = b->d.ra;
	const uint16_t *u = w->u;

	(b->transposed ? b->t->pack_fwd : b->t->pack_bwd)(w->m, w->z, r, NULL, r, r, s->thin_panel,
							  r, 0);
	if (!b->g->down_a)
		return;
	b->t->pairs_bf16(w->m, u, ra, NULL, (int)r, s->pair[2]);
	b->u_gate = b->u_up = s->pair[2];
	if (ra > r) {
		b->t->pairs_bf16(w->m, u + r, ra, NULL, (int)r, s->pair[3]);
		b->u_up = s->pair[3];
	}
	b->t->pairs(w->m, w->z, r, NULL, w->weight, (int)r, s->pair[4]);
	b->zw = s->pair[4];
}

/* Columns col..col+width of dh: LoRA's share, through the mask of h. */
static void add_dropped(const struct down_bwd *b, int64_t col, int64_t width, float *dh, int64_t ld)
{
	const struct moe_expert_rows *w = b->w;
	int64_t n = MOE_MIN(width, w->I - col);

	for (int i = 0; b->e->r && i < w->m; i++)
		for (int64_t j0 = 0; j0 < n; j0 += MOE_PACK_N) {
			int64_t count = MOE_MIN(MOE_PACK_N, n - j0);
			float sum[MOE_PACK_N] = { 0 };

			for (int q = 0; q < b->e->r; q++)
				for (int64_t j = 0; j < count; j++)
					sum[j] += w->z[i * b->d.r + q] * b->e->down_a[q * w->I + col + j0 + j];
			moe_drop(&w->drop, MOE_DROP_DOWN, w->token[i], w->drop.i0 + col + j0, count, sum);
			for (int64_t j = 0; j < count; j++)
				dh[i * ld + j0 + j] += sum[j];
		}
}

/* LoRA gradients of 16 columns of I from dgate (f0), dup (f1) and h (f2) */
static void thin_gradients(const struct down_bwd *b, int64_t col)
{
	const struct moe_tiles *t = b->t;
	const struct moe_expert_scratch *s = &b->s;
	int m = b->w->m, r = b->e->r, n = (int)MOE_MIN(MOE_PACK_N, b->w->I - col);
	enum moe_out out = b->g->first ? MOE_OUT_STREAM : MOE_OUT_ADD;

	t->pairs(m, s->f0, MOE_PACK_N, NULL, NULL, MOE_PACK_N, s->pair[0]);
	t->grad(m, s->pair[0], MOE_PACK_N, n, b->u_gate, b->d.r, r, b->e->scale,
		b->g->gate_b + col * r, r, out);
	t->pairs(m, s->f1, MOE_PACK_N, NULL, NULL, MOE_PACK_N, s->pair[0]);
	t->grad(m, s->pair[0], MOE_PACK_N, n, b->u_up, b->d.r, r, b->e->scale, b->g->up_b + col * r,
		r, out);
	for (int i = 0; b->w->drop.p > 0 && i < m; i++)
		moe_drop(&b->w->drop, MOE_DROP_DOWN, b->w->token[i], b->w->drop.i0 + col, n,
			 s->f2 + i * MOE_PACK_N);
	t->pairs(m, s->f2, MOE_PACK_N, NULL, NULL, MOE_PACK_N, s->pair[0]);
	t->grad(m, b->zw, b->d.r, r, s->pair[0], MOE_PACK_N, n, 1, b->g->down_a + col, b->w->I,
		out);
}

/* SwiGLU backward of 16 columns from dh */
static void column(const struct down_bwd *b, int64_t col, const float *dh, int64_t ld)
{
	const struct moe_expert_rows *w = b->w;
	const struct moe_expert_scratch *s = &b->s;
	struct moe_swiglu_rows kept = moe_kept_rows(b->e, w, col);

	(moe_glu_plain(&b->e->glu) ? b->t->swiglu_bwd : b->t->glu_bwd)(&kept, dh, ld, s->f0, s->f1, s->f2,
								       s->lanes);
	pack_columns(b, s->f0, w->dgate, col);
	pack_columns(b, s->f1, w->dup, col);
	if (b->g->down) /* weight_grad reads h again */
		b->t->pack_fwd(w->m, s->f2, MOE_PACK_N, NULL, MOE_PACK_N, MOE_PACK_N, w->h, b->d.I,
			       col);
	if (b->e->r && b->g->down_a) /* may mask h */
		thin_gradients(b, col);
}

/*
 * What bwd reads after columns col.. of a weight that ends at `end`, where the next expert's begin
 * at column `first`: NULL for its following columns; itself where nothing is known.
 */
static const uint16_t *columns_after(const struct moe_weight *w, const struct moe_weight *next,
				     int64_t col, int64_t width, int64_t end, int64_t first)
{
	if (col + width < end || moe_is_coded(w))
		return NULL;
	return next ? moe_at(next->data, MOE_PACK_N * first) : moe_at(w->data, MOE_PACK_N * col);
}

/* Columns of W that one call of bwd takes. */
static int step_of(const struct moe_tiles *t, const struct moe_weight *W, int m)
{
	return moe_backward_columns(t, m, W, moe_round_up(W->n, MOE_PACK_N));
}

/* dh of `width` columns into step */
static void hidden_gradient(const struct down_bwd *b, int64_t col, int width)
{
	const struct moe_expert *next = b->e->next;
	const struct moe_expert_rows *w = b->w;
	const struct moe_expert_scratch *s = &b->s;
	int64_t n = moe_round_up(w->H, MOE_PACK_N);
	struct moe_coded_slice slice;
	struct moe_bwd_seg seg[2] = {
		{ w->panel, b->d.H, 0, (int)n, NULL, 0,
		  columns_after(&b->e->down, next ? &next->down : NULL, col, width, b->end,
				b->first), NULL },
		{ s->thin_panel, b->d.r, 0, (int)b->d.thin, NULL, b->d.stride_i, NULL, NULL },
	};

	moe_backward_slice(b->t, w->m, &b->e->down, 0, n, col, width, s->weight, &slice, &seg[0]);
	if (b->e->r)
		seg[1].w = moe_at(b->e->down_a_packed, MOE_PACK_N * col);
	b->t->bwd(w->m, seg, moe_lora_fused(b->e, w) ? 2 : 1, width, s->step, width, MOE_OUT_STORE,
		  s->bwd);
	if (w->drop.p > 0)
		add_dropped(b, col, width, s->step, width);
}

/* Columns begin..end of I, one chunk or less; dh (rows ld apart): NULL where it is still to be
 * computed. */
static void chunk(const struct down_bwd *b, int64_t begin, int64_t end, const float *dh, int64_t ld)
{
	int64_t step = dh ? MOE_CHUNK : step_of(b->t, &b->e->down, b->w->m);

	for (int64_t col = begin; col < end; col += step) {
		int width = (int)MOE_MIN(step, end - col);

		if (!dh)
			hidden_gradient(b, col, width);
		for (int i = 0; i < width; i += MOE_PACK_N)
			column(b, col + i, dh ? dh + (col - begin) + i : b->s.step + i,
			       dh ? ld : width);
	}
}

/* The same by transposed copies: 16 columns at a time. */
static void chunk_t(const struct down_bwd *b, int64_t begin, int64_t end)
{
	const struct moe_expert_rows *w = b->w;
	const struct moe_expert_scratch *s = &b->s;

	for (int64_t col = begin; col < end; col += MOE_PACK_N) {
		const uint16_t *down = moe_at(b->e->down_t.data, col / MOE_PACK_N * b->d.stride_h);
		struct moe_fwd_seg seg[2] = {
			{ w->panel, b->d.H, 0, (int)b->d.H, down },
			{ s->thin_panel, b->d.r, 0, (int)b->d.r, NULL },
		};

		if (b->e->r)
			seg[1].w = moe_at(b->e->down_a_t, col / MOE_PACK_N * b->d.stride_r);
		b->t->fwd(w->m, seg, moe_lora_fused(b->e, w) ? 2 : 1,
			  col + MOE_PACK_N < end ? down + b->d.stride_h : NULL, s->step, MOE_PACK_N,
			  MOE_OUT_STORE);
		if (w->drop.p > 0)
			add_dropped(b, col, MOE_PACK_N, s->step, MOE_PACK_N);
		column(b, col, s->step, MOE_PACK_N);
	}
	if (end == b->d.I || end < moe_round_up(w->I, MOE_PACK_N))
		return;
	memset(s->f0, 0, (size_t)w->m * MOE_PACK_N * sizeof *s->f0); /* the panels' padding */
	pack_columns(b, s->f0, w->dgate, end);
	pack_columns(b, s->f0, w->dup, end);
}

static void thin_backward_t(const struct down_bwd *b, int c, int64_t begin, int64_t end)
{
	const struct moe_expert_rows *w = b->w;
	int64_t r = b->d.r, padded = MOE_MIN(moe_round_up(end, MOE_PACK_K), b->d.I);
	float *part = w->w_part + (size_t)c * w->part_rows * 2 * (size_t)r;
	struct moe_fwd_seg seg = { w->dgate, b->d.I, (int)begin, (int)(padded - begin), NULL };

	thin_t(b->t, w->m, &b->d, seg, b->e->gate_b_t, b->d.stride_i, part, 2 * r);
	seg.x = w->dup;
	thin_t(b->t, w->m, &b->d, seg, b->e->up_b_t, b->d.stride_i, part + r, 2 * r);
}

/* The chunk's share of dgate B and dup B */
static void thin_backward(const struct down_bwd *b, int c, int64_t begin, int64_t end)
{
	const struct moe_expert_rows *w = b->w;
	int64_t r = b->d.r;
	float *part = w->w_part + (size_t)c * w->part_rows * 2 * (size_t)r;

	for (int64_t j = 0; j < r; j += b->t->lora_pad) {
		int64_t at = begin / MOE_PACK_N * b->d.stride_r + MOE_PACK_N * j;
		struct moe_bwd_seg seg = { w->dgate,
					   b->d.I,
					   (int)begin,
					   (int)(end - begin),
					   moe_at(b->e->gate_b_packed, at),
					   b->d.stride_r,
					   NULL,
					   NULL };

		b->t->bwd(w->m, &seg, 1, b->t->lora_pad, part + j, 2 * r, MOE_OUT_STORE, b->s.bwd);
		seg.g = w->dup;
		seg.w = moe_at(b->e->up_b_packed, at);
		b->t->bwd(w->m, &seg, 1, b->t->lora_pad, part + r + j, 2 * r, MOE_OUT_STORE,
			  b->s.bwd);
	}
}

/* Pairwise: the order of the sum is part of the result. */
static float sum16(const float *v)
{
	float s[8];

	for (int i = 0; i < 8; i++)
		s[i] = v[i] + v[i + 8];
	return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

void moe_packed_expert_down_bwd(const struct moe_tiles *t, const struct moe_expert *e,
				struct moe_expert_rows *w, const struct moe_expert_grad *g, int c0,
				int c1, void *scratch)
{
	struct down_bwd b = { .t = t,
			      .e = e,
			      .w = w,
			      .g = g,
			      .d = moe_widths_of(t, e, w),
			      .s = moe_expert_scratch_of(t, e, w, scratch),
			      .transposed = e->gate_t.data != NULL };
	int64_t first = b.first = (int64_t)c0 * MOE_CHUNK;
	int64_t all = MOE_MIN((int64_t)c1 * MOE_CHUNK, moe_round_up(w->I, MOE_PACK_N)) - first;
	bool at_once = !b.transposed && step_of(t, &e->down, w->m) > MOE_CHUNK && all > 0;

	b.end = first + all;
	if (e->r)
		prepare_thin(&b);
	if (at_once)
		hidden_gradient(&b, first, (int)all);
	for (int c = c0; c < c1; c++) {
		int64_t begin = (int64_t)c * MOE_CHUNK;
		int64_t end = MOE_MIN(begin + MOE_CHUNK, moe_round_up(w->I, MOE_PACK_N));
		float *dgw = w->dgw_part + (size_t)c * w->part_rows;

		memset(b.s.lanes, 0, (size_t)w->m * MOE_PACK_N * sizeof *b.s.lanes);
		if (b.transposed)
			chunk_t(&b, begin, end);
		else
			chunk(&b, begin, end, at_once ? b.s.step + (begin - first) : NULL, all);
		for (int i = 0; i < w->m; i++)
			dgw[i] = sum16(b.s.lanes + i * MOE_PACK_N);
		if (e->r)
			(b.transposed ? thin_backward_t : thin_backward)(&b, c, begin, end);
	}
	t->fence();
}

/* Columns begin..end of y: LoRA's share, through the masks of x. thin: [m, 2 r'] */
static void add_dropped_x(const struct moe_tiles *t, const struct moe_expert *e, const struct moe_expert_rows *w,
			  const struct moe_widths *d, const float *thin, int64_t begin, int64_t end)
{
	t->fence(); /* y was streamed */
	for (int i = 0; i < w->m; i++)
		for (int64_t k = begin; k < MOE_MIN(end, w->H); k += MOE_PACK_N)
			for (int up = 0; up < 2; up++) {
				const float *a = e->a_gu + (up ? (int64_t)(e->ra - e->r) * w->H : 0) + k;
				int64_t n = MOE_MIN(MOE_PACK_N, MOE_MIN(end, w->H) - k);
				float sum[MOE_PACK_N] = { 0 };

				for (int q = 0; q < e->r; q++)
					for (int64_t j = 0; j < n; j++)
						sum[j] += thin[(2 * i + up) * d->r + q] * a[q * w->H + j];
				moe_drop(&w->drop, up ? MOE_DROP_UP : MOE_DROP_GATE, w->token[i], k, n, sum);
				for (int64_t j = 0; j < n; j++)
					w->y[i * d->H + k + j] += sum[j];
			}
}

/* Columns begin..end of y, 16 at a time: through gate, up, or both. */
static void columns_t(const struct moe_tiles *t, const struct moe_expert *e,
		      const struct moe_expert_rows *w, const struct moe_widths *d, const void *thin,
		      bool gate, bool up, int64_t begin, int64_t end, enum moe_out out)
{
	const struct moe_weight *first = gate ? &e->gate_t : &e->up_t;

	for (int64_t n = begin; n < end; n += MOE_PACK_N) {
		int64_t at = n / MOE_PACK_N;
		struct moe_fwd_seg seg[4];
		int count = 0;

		if (gate)
			seg[count++] =
				(struct moe_fwd_seg){ w->dgate, d->I, 0, (int)d->I,
						      moe_at(e->gate_t.data, at * d->stride_i) };
		if (up)
			seg[count++] =
				(struct moe_fwd_seg){ w->dup, d->I, 0, (int)d->I,
						      moe_at(e->up_t.data, at * d->stride_i) };
		if (gate && e->r)
			seg[count++] =
				(struct moe_fwd_seg){ thin, 2 * d->r, 0, (int)d->r,
						      moe_at(e->gate_a_t, at * d->stride_r) };
		if (up && e->r)
			seg[count++] = (struct moe_fwd_seg){ thin, 2 * d->r, (int)d->r, (int)d->r,
							     moe_at(e->up_a_t, at * d->stride_r) };
		t->fwd(w->m, seg, count,
		       n + MOE_PACK_N < end ? moe_at(first->data, (at + 1) * d->stride_i) : NULL,
		       w->y + n, d->H, out);
	}
}

static void gate_up_bwd_t(const struct moe_tiles *t, const struct moe_expert *e,
			  struct moe_expert_rows *w, int c0, int c1, void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);
	struct moe_expert plain = *e;

	if (w->drop.p > 0) { /* LoRA's share is added at the end */
		plain.r = 0;
		e = &plain;
	}
	if (e->r) {
		moe_sum_chunks(moe_chunk_count(w->I), w->part_rows, w->m, 2 * d.r, w->w_part,
			       s.thin);
		t->pack_fwd(w->m, s.thin, 2 * d.r, NULL, 2 * d.r, 2 * d.r, s.thin_panel, 2 * d.r,
			    0);
	}
	for (int c = c0; c < c1; c++) {
		int64_t begin = (int64_t)c * MOE_CHUNK;
		int64_t end = MOE_MIN(begin + MOE_CHUNK, moe_round_up(w->H, MOE_PACK_N));

		if (w->m > MOE_RUN_ROWS) {
			columns_t(t, e, w, &d, s.thin_panel, true, true, begin, end,
				  MOE_OUT_STREAM);
			continue;
		}
		/* few rows: memory decides, and reads one stream faster than two in turn */
		columns_t(t, e, w, &d, s.thin_panel, true, false, begin, end, MOE_OUT_STORE);
		columns_t(t, e, w, &d, s.thin_panel, false, true, begin, end, MOE_OUT_ADD);
	}
	t->fence();
}

/* With dropout: LoRA's share of columns begin..end. */
static void dropped_end(const struct moe_tiles *t, const struct moe_expert *e, struct moe_expert_rows *w,
			int64_t begin, int64_t end, void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);

	if (!e->r || !(w->drop.p > 0))
		return;
	moe_sum_chunks(moe_chunk_count(w->I), w->part_rows, w->m, 2 * d.r, w->w_part, s.thin);
	add_dropped_x(t, e, w, &d, s.thin, begin, end);
}

void moe_packed_expert_gate_up_bwd(const struct moe_tiles *t, const struct moe_expert *e,
				   struct moe_expert_rows *w, int c0, int c1, void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);
	int64_t n = moe_round_up(w->I, MOE_PACK_N);
	int64_t begin = (int64_t)c0 * MOE_CHUNK, end = MOE_MIN((int64_t)c1 * MOE_CHUNK, d.H);
	bool fused = moe_lora_fused(e, w);
	int step = MOE_MIN(moe_backward_columns(t, w->m, &e->gate, 2 * n),
			   moe_backward_columns(t, w->m, &e->up, 2 * n));

	if (e->gate_t.data) {
		gate_up_bwd_t(t, e, w, c0, c1, scratch);
		dropped_end(t, e, w, begin, end, scratch);
		return;
	}
	if (fused) {
		moe_sum_chunks(moe_chunk_count(w->I), w->part_rows, w->m, 2 * d.r, w->w_part,
			       s.thin);
		t->pack_bwd(w->m, s.thin, 2 * d.r, NULL, 2 * d.r, 2 * d.r, s.thin_panel, 2 * d.r,
			    0);
	}
	for (int64_t k = begin; k < end; k += step) {
		int width = (int)MOE_MIN(step, end - k);
		struct moe_coded_slice slice[2];
		struct moe_bwd_seg seg[4] = {
			{ w->dgate, d.I, 0, (int)n, NULL, 0,
			  columns_after(&e->gate, e->next ? &e->next->gate : NULL, k, width, end,
					begin), NULL },
			{ w->dup, d.I, 0, (int)n, NULL, 0,
			  columns_after(&e->up, e->next ? &e->next->up : NULL, k, width, end,
					begin), NULL },
			{ s.thin_panel, 2 * d.r, 0, (int)d.thin, NULL, d.stride_h, NULL, NULL },
			{ s.thin_panel, 2 * d.r, (int)d.r, (int)d.thin, NULL, d.stride_h, NULL, NULL },
		};

		moe_backward_slice(t, w->m, &e->gate, 0, n, k, width, s.weight, &slice[0], &seg[0]);
		moe_backward_slice(t, w->m, &e->up, 0, n, k, width,
				   s.weight + n / MOE_PACK_N * moe_packed_stride(step), &slice[1],
				   &seg[1]);
		if (fused) {
			seg[2].w = moe_at(e->gate_a_packed, MOE_PACK_N * k);
			seg[3].w = moe_at(e->up_a_packed, MOE_PACK_N * k);
		}
		t->bwd(w->m, seg, fused ? 4 : 2, width, w->y + k, d.H, moe_rows_out(w->m), s.bwd);
	}
	dropped_end(t, e, w, begin, end, scratch);
	t->fence();
}
