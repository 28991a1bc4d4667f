/* SPDX-License-Identifier: Apache-2.0 */
/* One expert of struct block_data through the expert ops of the table under test. */
#ifndef MOE_TESTS_EXPERT_CHECK_H
#define MOE_TESTS_EXPERT_CHECK_H

#include "tests/block_check.h"
#include "tests/kernel_check.h"

static const char *const expert_names[BLOCK_WEIGHTS] = {
	[MOE_BLOCK_GATE_PROJ] = "gate",	    [MOE_BLOCK_UP_PROJ] = "up",
	[MOE_BLOCK_DOWN_PROJ] = "down",	    [MOE_BLOCK_GATE_LORA_A] = "gate A",
	[MOE_BLOCK_UP_LORA_A] = "up A",	    [MOE_BLOCK_DOWN_LORA_A] = "down A",
	[MOE_BLOCK_GATE_LORA_B] = "gate B", [MOE_BLOCK_UP_LORA_B] = "up B",
	[MOE_BLOCK_DOWN_LORA_B] = "down B",
};

struct expert_run {
	const struct block_data *d; /* E = 1, k = 1: tokens of id 0 are the expert's */
	struct moe_expert e;
	struct moe_expert_rows w;
	struct moe_expert_grad g;
	int32_t *token;
	float *weight;
	void *scratch;
	float *out, *grad_x, *grad_weights; /* [T, H], [T, H], [T] */
	float *grad[BLOCK_WEIGHTS];	    /* or NULL */
};

/* Rows behind one that is another expert's: aligned as rows in a group are. */
static inline void *expert_rows(int m, size_t row_bytes)
{
	return (char *)mem((size_t)(m + 1) * row_bytes) + row_bytes;
}

static inline struct moe_weight expert_weight(const float *src, int64_t n, int64_t k)
{
	struct moe_weight W = { .data = mem(K->weight_bytes(MOE_F32, n, k, MOE_USE_GEMM)) };

	K->weight_pack(&W, src, MOE_F32, n, k, k, MOE_USE_GEMM);
	return W;
}

static inline const void *expert_lora(enum moe_lora_side side, const float *src, int64_t n, int64_t k,
				      float scale)
{
	void *p;

	if (!K->lora_pack || !src)
		return NULL;
	p = mem(K->lora_bytes(side, n, k));
	K->lora_pack(side, src, n, k, 0, n, scale, p);
	return p;
}

static inline void expert_matrices(struct expert_run *r)
{
	const struct block_case *c = &r->d->c;
	float *const *w = r->d->w;
	int64_t H = c->H, I = c->I, rank = c->r;
	float scale = 1.5f; /* block_params_of */
	float *a = floats(2 * rank * H);

	r->e = (struct moe_expert){ .gate = expert_weight(w[MOE_BLOCK_GATE_PROJ], I, H),
				    .up = expert_weight(w[MOE_BLOCK_UP_PROJ], I, H),
				    .down = expert_weight(w[MOE_BLOCK_DOWN_PROJ], H, I) };
	if (!rank)
		return;
	memcpy(a, w[MOE_BLOCK_GATE_LORA_A], (size_t)(rank * H) * sizeof *a);
	memcpy(a + rank * H, w[MOE_BLOCK_UP_LORA_A], (size_t)(rank * H) * sizeof *a);
	r->e.r = (int)rank;
	r->e.ra = (int)(c->share_a ? rank : 2 * rank);
	r->e.scale = scale;
	r->e.a_gu = a;
	r->e.gate_b = w[MOE_BLOCK_GATE_LORA_B];
	r->e.up_b = w[MOE_BLOCK_UP_LORA_B];
	r->e.down_a = w[MOE_BLOCK_DOWN_LORA_A];
	r->e.down_b = w[MOE_BLOCK_DOWN_LORA_B];
	r->e.gate_a_packed = expert_lora(MOE_LORA_A, a, rank, H, 1);
	r->e.up_a_packed = c->share_a ? r->e.gate_a_packed
				      : expert_lora(MOE_LORA_A, a + rank * H, rank, H, 1);
	r->e.gate_b_packed = expert_lora(MOE_LORA_B, r->e.gate_b, I, rank, scale);
	r->e.up_b_packed = expert_lora(MOE_LORA_B, r->e.up_b, I, rank, scale);
	r->e.down_a_packed = expert_lora(MOE_LORA_A, r->e.down_a, rank, I, 1);
	r->e.down_b_packed = expert_lora(MOE_LORA_B, r->e.down_b, H, rank, scale);
}

static inline void expert_buffers(struct expert_run *r)
{
	const struct block_case *c = &r->d->c;
	struct moe_expert_rows *w = &r->w;
	int m = w->m, chunks = (c->I + MOE_CHUNK - 1) / MOE_CHUNK;
	size_t H = (size_t)moe_pad(c->H, K->width_pad), I = (size_t)moe_pad(c->I, K->width_pad);
	size_t rank = (size_t)moe_pad(c->r, K->rank_pad), ra = (c->share_a ? 1 : 2) * rank;
	size_t panel = (size_t)K->panel_bytes, kept = (size_t)K->kept_bytes, parts;

	w->T = c->T, w->H = c->H, w->I = c->I;
	w->part_rows = (size_t)m + 3;
	parts = (size_t)chunks * w->part_rows;
	w->panel = expert_rows(m, H * panel);
	w->u = expert_rows(m, ra * kept);
	w->u_panel = expert_rows(m, ra * panel);
	w->gate = expert_rows(m, I * kept);
	w->up = expert_rows(m, I * kept);
	w->h = expert_rows(m, I * panel);
	w->dgate = expert_rows(m, I * panel);
	w->dup = expert_rows(m, I * panel);
	w->y = expert_rows(m, H * sizeof(float));
	w->v = expert_rows(m, rank * sizeof(float));
	w->z = expert_rows(m, rank * sizeof(float));
	w->wg = expert_rows(m, 2 * rank * sizeof(float));
	w->v_part = mem(parts * rank * sizeof(float));
	w->w_part = mem(parts * 2 * rank * sizeof(float));
	w->dgw_part = mem(parts * sizeof(float));
	r->scratch = mem(K->expert_scratch(m, c->H, c->I, c->r, moe_expert_compute(&r->e)));
}

/* Gradients begin as NaN: the first micro-batch overwrites. */
static inline void expert_gradients(struct expert_run *r)
{
	const struct block_data *d = r->d;
	float **g = r->grad;

	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		if (d->w[i] && (i >= MOE_BLOCK_GATE_LORA_A || d->c.base_grads))
			g[i] = floats((i == MOE_BLOCK_GATE_LORA_A ? 2 : 1) * d->n[i]);
	r->g = (struct moe_expert_grad){ .a_gu = g[MOE_BLOCK_GATE_LORA_A],
					 .gate_b = g[MOE_BLOCK_GATE_LORA_B],
					 .up_b = g[MOE_BLOCK_UP_LORA_B],
					 .down_a = g[MOE_BLOCK_DOWN_LORA_A],
					 .down_b = g[MOE_BLOCK_DOWN_LORA_B],
					 .gate = g[MOE_BLOCK_GATE_PROJ],
					 .up = g[MOE_BLOCK_UP_PROJ],
					 .down = g[MOE_BLOCK_DOWN_PROJ] };
}

/* The expert's rows run from the last token to the first. */
static inline void expert_begin(struct expert_run *r, const struct block_data *d)
{
	const struct block_case *c = &d->c;

	memset(r, 0, sizeof *r);
	r->d = d;
	r->token = mem((size_t)c->T * sizeof *r->token);
	r->weight = floats(c->T);
	for (int t = c->T - 1; t >= 0; t--)
		if (d->ids[t] == 0) {
			r->token[r->w.m] = t;
			r->weight[r->w.m++] = d->weights[t];
		}
	r->w.token = r->token;
	r->w.weight = r->weight;
	r->out = floats((int64_t)c->T * c->H);
	r->grad_x = floats((int64_t)c->T * c->H);
	r->grad_weights = floats(c->T);
	expert_matrices(r);
	expert_buffers(r);
	expert_gradients(r);
}

/* Rows of y, times the routing weight or not, to their tokens; others are zero. */
static inline void expert_combine(const struct expert_run *r, bool weighted, float *dst)
{
	const struct moe_expert_rows *w = &r->w;
	int64_t H = moe_pad(w->H, K->width_pad);

	memset(dst, 0, (size_t)w->T * (size_t)w->H * sizeof *dst);
	for (int i = 0; i < w->m; i++)
		for (int j = 0; j < w->H; j++)
			dst[(int64_t)w->token[i] * w->H + j] =
				(weighted ? w->weight[i] : 1) * w->y[i * H + j];
}

/* What codelets/lora_grad.c and combine_bwd.c add up over chunks of I. */
static inline void expert_sums(struct expert_run *r)
{
	struct moe_expert_rows *w = &r->w;
	size_t rank = 2 * (size_t)moe_pad(r->e.r, K->rank_pad);
	int chunks = (w->I + MOE_CHUNK - 1) / MOE_CHUNK;

	memset(r->grad_weights, 0, (size_t)w->T * sizeof(float));
	for (int i = 0; i < w->m; i++)
		for (int c = 0; c < chunks; c++)
			r->grad_weights[w->token[i]] += w->dgw_part[(size_t)c * w->part_rows + (size_t)i];
	for (size_t i = 0; r->e.r && i < (size_t)w->m * rank; i++) {
		w->wg[i] = 0;
		for (int c = 0; c < chunks; c++)
			w->wg[i] += w->w_part[(size_t)c * w->part_rows * rank + i];
	}
}

/* Forward and backward in calls of at most `slice` chunks. */
static inline void expert_pass(struct expert_run *r, bool first, int slice)
{
	struct moe_expert_rows *w = &r->w;
	int kept = block_count, ci = (w->I + MOE_CHUNK - 1) / MOE_CHUNK;
	int ch = (w->H + MOE_CHUNK - 1) / MOE_CHUNK;
	int64_t ld16 = moe_pad(w->H, K->width_pad);
	uint16_t *x16 = K->x16 ? mem((size_t)(w->T * ld16) * sizeof *x16) : NULL;

	w->x = copy(r->d->x, (int64_t)w->T * w->H);
	w->grad_out = copy(r->d->grad_out, (int64_t)w->T * w->H);
	w->x16 = x16;
	if (x16)
		K->to_bf16(w->T, w->H, w->x, w->H, x16, ld16);
	r->g.first = first;
	K->expert_gather(&r->e, w, r->scratch);
	for (int c = 0; c < ci; c += slice)
		K->expert_gate_up(&r->e, w, c, MOE_MIN(c + slice, ci), r->scratch);
	for (int c = 0; c < ch; c += slice)
		K->expert_down(&r->e, w, c, MOE_MIN(c + slice, ch), r->scratch);
	expert_combine(r, true, r->out);
	K->expert_scatter(&r->e, w, r->scratch);
	for (int c = 0; c < ci; c += slice)
		K->expert_down_bwd(&r->e, w, &r->g, c, MOE_MIN(c + slice, ci), r->scratch);
	expert_sums(r);
	for (int c = 0; c < ch; c += slice)
		K->expert_gate_up_bwd(&r->e, w, c, MOE_MIN(c + slice, ch), r->scratch);
	expert_combine(r, false, r->grad_x);
	if (r->e.r)
		K->expert_lora_grad(&r->e, w, &r->g, r->scratch);
	if (r->g.gate)
		K->expert_weight_grad(&r->e, w, &r->g, r->scratch);
	if (r->e.r) /* a_gu holds gate's A, then up's */
		memcpy(r->grad[MOE_BLOCK_UP_LORA_A],
		       r->g.a_gu + (int64_t)(r->e.ra - r->e.r) * w->H,
		       (size_t)r->e.r * (size_t)w->H * sizeof(float));
	release_to(kept);
}

#endif
