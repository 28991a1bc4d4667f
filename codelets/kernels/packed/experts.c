/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward of one expert. With u = x A_gu^T the accumulators of gate and up run on over r more
 * columns (u times s B), so LoRA adds no pass over a result; h A_down^T is taken per chunk of I
 * while the chunk's h is in cache.
 */
#include "codelets/kernels/packed/experts.h"

#include "codelets/kernels/ref/gemm.h"

struct moe_widths moe_expert_widths(const struct moe_tiles *t, int64_t H, int64_t I, int r, int ra)
{
	struct moe_widths d = {
		.H = moe_round_up(H, MOE_PACK_K),
		.I = moe_round_up(I, MOE_PACK_K),
		.r = moe_round_up(r, t->lora_pad),
	};

	d.ra = ra == r ? d.r : 2 * d.r;
	d.stride_h = moe_packed_stride(d.H);
	d.stride_i = moe_packed_stride(d.I);
	d.stride_r = moe_packed_stride(d.r);
	d.thin = moe_round_up(r, MOE_PACK_N);
	return d;
}

struct moe_expert_scratch moe_expert_carve(const struct moe_tiles *t, struct moe_carver *c, int m,
					   int64_t H, int64_t I, int r, enum moe_compute compute)
{
	struct moe_widths d = moe_expert_widths(t, H, I, r, 2 * r);
	size_t M = (size_t)m + (size_t)m % 2, column = M * MOE_PACK_N * sizeof(float);
	int64_t n = MOE_MAX(d.H, 2 * d.I) + 2 * d.r;
	struct moe_expert_scratch s;

	s.f0 = moe_carve(c, column);
	s.f1 = moe_carve(c, column);
	s.f2 = moe_carve(c, column);
	s.lanes = moe_carve(c, column);
	s.step = moe_carve(c, MOE_MAX(M * MOE_CHUNK, MOE_LONG_ROWS * (size_t)d.I) * sizeof(float));
	s.ups = moe_carve(c, MOE_MAX(M, MOE_RUN_ROWS * (size_t)MOE_CHUNK / MOE_PACK_N) *
				     MOE_PACK_N * sizeof(float));
	s.thin = moe_carve(c, M * 2 * (size_t)d.r * sizeof(float));
	s.thin_panel = moe_carve(c, M * 2 * (size_t)d.r * (size_t)t->panel_bytes);
	s.pair[0] = moe_carve(c, M * MOE_CHUNK * (size_t)t->pair_bytes);
	s.pair[1] = moe_carve(c, M * MOE_GRAD_STRIP * (size_t)t->pair_bytes);
	for (int i = 2; i < 5; i++)
		s.pair[i] = moe_carve(c, M * (size_t)d.r * (size_t)t->pair_bytes);
	s.weight = moe_carve(c, MOE_MAX((size_t)(MOE_PACK_N * MOE_MAX(d.H, d.I)) * sizeof *s.weight,
					moe_coded_slice_bytes(MOE_MAX(d.H, 2 * d.I))));
	s.ints = moe_carve(c, moe_int_bytes(t, compute, m, MOE_MAX(H, I)));
	s.bwd = moe_carve(c, t->bwd_scratch(m, n, (int)MOE_MAX(MOE_CHUNK, MOE_MAX(d.H, d.I))));
	return s;
}

size_t moe_packed_expert_scratch(const struct moe_tiles *t, int m, int64_t H, int64_t I, int r,
				 enum moe_compute compute)
{
	struct moe_carver c = { 0 };

	moe_expert_carve(t, &c, m, H, I, r, compute);
	return c.used;
}

void moe_sum_chunks(int chunks, size_t rows, int m, int64_t n, const float *part, float *dst)
{
	size_t count = (size_t)m * (size_t)n;

	if (!chunks) {
		memset(dst, 0, count * sizeof *dst);
		return;
	}
	memcpy(dst, part, count * sizeof *dst);
	for (int c = 1; c < chunks; c++)
		for (size_t i = 0; i < count; i++)
			dst[i] += part[(size_t)c * rows * (size_t)n + i];
}

/* 16 columns of u: rounded once, kept by rows and as the operand of gate_up */
static void keep_u(const struct moe_tiles *t, moe_to_bf16 *to_bf16, const struct moe_expert_rows *w,
		   int64_t ra, int64_t col, const float *u)
{
	t->pack_fwd(w->m, u, MOE_PACK_N, NULL, MOE_PACK_N, MOE_PACK_N, w->u_panel, ra, col);
	for (int i = 0; i < w->m; i++)
		to_bf16(1, MOE_PACK_N, u + i * MOE_PACK_N, MOE_PACK_N,
			(uint16_t *)w->u + i * ra + col, MOE_PACK_N);
}

/* u = x A^T for gate's or up's A, as columns col.. of u */
static void thin_forward(const struct moe_tiles *t, moe_to_bf16 *to_bf16,
			 const struct moe_expert_rows *w, const struct moe_widths *d,
			 const struct moe_expert_scratch *s, const void *a, int64_t col)
{
	memset(s->f0, 0, (size_t)w->m * MOE_PACK_N * sizeof *s->f0);
	for (int64_t j = d->r - MOE_PACK_N; j >= 0; j -= MOE_PACK_N) { /* zeros of the pad first */
		struct moe_fwd_seg seg = { w->panel, d->H, 0, (int)d->H,
					   moe_at(a, j / MOE_PACK_N * d->stride_h) };

		if (j < d->thin)
			t->fwd(w->m, &seg, 1, NULL, s->f0, MOE_PACK_N, MOE_OUT_STORE);
		keep_u(t, to_bf16, w, d->ra, col + j, s->f0);
	}
}

/* The same from masked x: through y and the panel, which gather fills with x afterwards. */
static void dropped_forward(const struct moe_tiles *t, moe_to_bf16 *to_bf16,
			    const struct moe_expert_rows *w, const struct moe_widths *d,
			    const struct moe_expert_scratch *s, enum moe_dropped which, const void *a,
			    int64_t col)
{
	for (int i = 0; i < w->m; i++) {
		const uint16_t *x = w->x16 + (int64_t)w->token[i] * d->H;
		float *row = w->y + i * d->H;

		for (int k = 0; k < w->H; k++)
			row[k] = moe_bf16_to_f32(x[k]);
		moe_drop(&w->drop, which, w->token[i], 0, w->H, row);
	}
	t->pack_fwd(w->m, w->y, d->H, NULL, w->H, d->H, w->panel, d->H, 0);
	thin_forward(t, to_bf16, w, d, s, a, col);
}

/* Columns begin.. of a chunk of masked h, times A_down^T */
static void dropped_v(const struct moe_tiles *t, const struct moe_expert *e, const struct moe_expert_rows *w,
		      const struct moe_widths *d, const struct moe_expert_scratch *s, int64_t begin,
		      float *part)
{
	int64_t n = MOE_MIN(MOE_CHUNK, w->I - begin), ld = moe_round_up(n, MOE_PACK_N);

	t->unpack_fwd(w->m, w->h, d->I, begin, ld, s->step, ld);
	for (int i = 0; i < w->m; i++)
		moe_drop(&w->drop, MOE_DROP_DOWN, w->token[i], w->drop.i0 + begin, n, s->step + i * ld);
	memset(part, 0, (size_t)(w->m * d->r) * sizeof *part);
	ref_gemm_nt(w->m, e->r, n, 1, s->step, ld, e->down_a + begin, w->I, 0, part, d->r);
}

void moe_packed_expert_gather(const struct moe_tiles *t, moe_to_bf16 *to_bf16,
			      const struct moe_expert *e, struct moe_expert_rows *w, void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);

	if (e->r && w->drop.p > 0) {
		dropped_forward(t, to_bf16, w, &d, &s, MOE_DROP_GATE, e->gate_a_packed, 0);
		if (e->ra > e->r)
			dropped_forward(t, to_bf16, w, &d, &s, MOE_DROP_UP, e->up_a_packed, d.r);
	}
	t->pack_fwd_bf16(w->m, w->x16, d.H, w->token, w->H, d.H, w->panel, d.H, 0);
	if (!moe_lora_fused(e, w))
		return;
	thin_forward(t, to_bf16, w, &d, &s, e->gate_a_packed, 0);
	if (e->ra > e->r)
		thin_forward(t, to_bf16, w, &d, &s, e->up_a_packed, d.r);
}

/*
 * One weight's columns col, col + 16, ... of `count` panels, each to out + m * 16 * i. `next`: what
 * is read after the last one.
 */
static void project(const struct moe_tiles *t, const struct moe_expert_rows *w,
		    const struct moe_widths *d, const struct moe_expert_scratch *s, int r,
		    const struct moe_weight *weight, const struct moe_int_rows *ints, const void *b,
		    int64_t u_col, int64_t col, int count, const uint16_t *next, float *out)
{
	for (int i = 0; i < count; i++, out += (size_t)w->m * MOE_PACK_N) {
		int64_t panel = col / MOE_PACK_N + i;
		struct moe_fwd_seg seg[2] = {
			{ w->panel, d->H, 0, (int)d->H, NULL },
			{ w->u_panel, d->ra, (int)u_col, (int)d->r, NULL },
		};

		if (r)
			seg[1].w = moe_at(b, panel * d->stride_r);
		moe_forward(t, w->m, weight, panel, ints, seg, r ? 2 : 1,
			    i + 1 < count ? moe_panel_address(weight, panel + 1) : next, out,
			    MOE_PACK_N, MOE_OUT_STORE, s->weight);
	}
}

/* gate, up and h of `count` panels of 16 columns; next: what is read then */
static void gate_up_panels(const struct moe_tiles *t, const struct moe_expert *e,
			   const struct moe_expert_rows *w, const struct moe_widths *d,
			   const struct moe_expert_scratch *s, const struct moe_int_rows *ints,
			   int64_t col, int count, const uint16_t *next)
{
	const uint16_t *up = moe_panel_address(&e->up, col / MOE_PACK_N);
	size_t step = (size_t)w->m * MOE_PACK_N;

	project(t, w, d, s, e->r, &e->gate, ints, e->gate_b_packed, 0, col, count, up, s->step);
	project(t, w, d, s, e->r, &e->up, moe_int_alike(&e->gate, &e->up) ? ints : NULL, e->up_b_packed,
		d->ra - d->r, col, count, next, s->ups);
	for (int i = 0; i < count; i++, col += MOE_PACK_N) {
		struct moe_swiglu_rows kept = moe_kept_rows(e, w, col);
		float *g = s->step + (size_t)i * step;

		(moe_glu_plain(&e->glu) ? t->swiglu : t->glu)(&kept, g, s->ups + (size_t)i * step);
		t->pack_fwd(w->m, g, MOE_PACK_N, NULL, MOE_PACK_N, MOE_PACK_N, w->h, d->I, col);
	}
}

/*
 * With few rows the weights come from memory at its full rate, which takes one long run per stream;
 * with many the results of a run would push the rows out of the cache.
 */
static int panels_at_once(int m)
{
	return m <= MOE_RUN_ROWS ? MOE_CHUNK / MOE_PACK_N : 1;
}

/* A weight's panel of column col; at `end` that of column `first` of the next expert's (NULL:
 * none). */
static const uint16_t *panel_after(const struct moe_weight *w, const struct moe_weight *next,
				   int64_t col, int64_t end, int64_t first)
{
	if (col < end)
		return moe_panel_address(w, col / MOE_PACK_N);
	return next ? moe_panel_address(next, first / MOE_PACK_N) : NULL;
}

/* Panels of an [n, k] weight hold whole panels only: columns from there up to the padded width are
 * zero. */
static void zero_columns(const struct moe_tiles *t, const struct moe_expert_rows *w,
			 const struct moe_widths *d, const struct moe_expert_scratch *s)
{
	int64_t col = moe_round_up(w->I, MOE_PACK_N);

	if (col == d->I)
		return;
	memset(s->f0, 0, (size_t)w->m * MOE_PACK_N * sizeof *s->f0);
	t->pack_fwd(w->m, s->f0, MOE_PACK_N, NULL, MOE_PACK_N, MOE_PACK_N, w->h, d->I, col);
}

void moe_packed_expert_gate_up(const struct moe_tiles *t, const struct moe_expert *e,
			       struct moe_expert_rows *w, int c0, int c1, void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);
	int64_t first = (int64_t)c0 * MOE_CHUNK;
	int64_t last = MOE_MIN((int64_t)c1 * MOE_CHUNK, moe_round_up(w->I, MOE_PACK_N));
	const struct moe_int_rows *ints = moe_int_operand(t, w->m, &e->gate, w->panel, d.H, s.ints);
	int run = panels_at_once(w->m);

	for (int c = c0; c < c1; c++) {
		int64_t begin = (int64_t)c * MOE_CHUNK;
		int64_t end = MOE_MIN(begin + MOE_CHUNK, moe_round_up(w->I, MOE_PACK_N));
		int64_t padded = MOE_MIN(begin + MOE_CHUNK, d.I);
		float *part = w->v_part + (size_t)c * w->part_rows * (size_t)d.r;

		for (int64_t col = begin; col < end; col += (int64_t)run * MOE_PACK_N) {
			int count = (int)MOE_MIN(run, (end - col) / MOE_PACK_N);

			gate_up_panels(t, e, w, &d, &s, ints, col, count,
				       panel_after(&e->gate, e->next ? &e->next->gate : NULL,
						   col + count * MOE_PACK_N, last, first));
		}
		if (end < padded)
			zero_columns(t, w, &d, &s);
		if (e->r && w->drop.p > 0) {
			dropped_v(t, e, w, &d, &s, begin, part);
			continue;
		}
		for (int64_t j = 0; j < d.r && e->r; j += MOE_PACK_N) {
			struct moe_fwd_seg seg = { w->h, d.I, (int)begin, (int)(padded - begin),
						   NULL };

			if (j >= d.thin) {
				for (int i = 0; i < w->m; i++)
					memset(part + i * d.r + j, 0, MOE_PACK_N * sizeof *part);
				continue;
			}
			seg.w = moe_at(e->down_a_packed,
				       j / MOE_PACK_N * d.stride_i + MOE_PACK_N * begin);
			t->fwd(w->m, &seg, 1, NULL, part + j, d.r, MOE_OUT_STORE);
		}
	}
}

void moe_packed_expert_down(const struct moe_tiles *t, const struct moe_expert *e,
			    struct moe_expert_rows *w, int c0, int c1, void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);
	int64_t begin = (int64_t)c0 * MOE_CHUNK;
	int64_t end = MOE_MIN((int64_t)c1 * MOE_CHUNK, moe_round_up(w->H, MOE_PACK_N));
	const struct moe_int_rows *ints = moe_int_operand(t, w->m, &e->down, w->h, d.I, s.ints);

	if (e->r) {
		moe_sum_chunks(moe_chunk_count(w->I), w->part_rows, w->m, d.r, w->v_part, s.thin);
		t->pack_fwd(w->m, s.thin, d.r, NULL, d.r, d.r, s.thin_panel, d.r, 0);
		if (c0 == 0 && c1 > 0)
			memcpy(w->v, s.thin, (size_t)w->m * (size_t)d.r * sizeof *w->v);
	}
	for (int64_t n = begin; n < end; n += MOE_PACK_N) {
		struct moe_fwd_seg seg[2] = {
			{ w->h, d.I, 0, (int)d.I, NULL },
			{ s.thin_panel, d.r, 0, (int)d.r, NULL },
		};

		if (e->r)
			seg[1].w = moe_at(e->down_b_packed, n / MOE_PACK_N * d.stride_r);
		moe_forward(t, w->m, &e->down, n / MOE_PACK_N, ints, seg, e->r ? 2 : 1,
			    panel_after(&e->down, e->next ? &e->next->down : NULL, n + MOE_PACK_N, end, begin),
			    w->y + n, d.H, moe_rows_out(w->m), s.weight);
	}
	t->fence();
}
