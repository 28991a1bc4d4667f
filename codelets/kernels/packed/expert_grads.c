/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients that no other task waits for: LoRA's H side, and whole weights. */
#include "codelets/kernels/packed/experts.h"

/* Pair array of columns col..col+width of the expert's rows of x. */
static void pair_x(const struct moe_tiles *t, const struct moe_expert_rows *w, int64_t ld,
		   int64_t col, int width, void *dst)
{
	t->pairs_bf16(w->m, w->x16 + col, ld, w->token, (int)moe_round_up(width, 16), dst);
}

/* The same of masked x, through step. */
static void pair_dropped(const struct moe_tiles *t, const struct moe_expert_rows *w,
			 const struct moe_expert_scratch *s, enum moe_dropped which, int64_t ld, int64_t col,
			 int n, void *dst)
{
	int64_t width = moe_round_up(n, 16);

	for (int i = 0; i < w->m; i++) {
		const uint16_t *x = w->x16 + (int64_t)w->token[i] * ld + col;
		float *row = s->step + i * width;

		for (int64_t j = 0; j < width; j++)
			row[j] = j < n ? moe_bf16_to_f32(x[j]) : 0;
		moe_drop(&w->drop, which, w->token[i], col, n, row);
	}
	t->pairs(w->m, s->step, width, NULL, NULL, (int)width, dst);
}

void moe_packed_expert_lora_grad(const struct moe_tiles *t, const struct moe_expert *e,
				 struct moe_expert_rows *w, const struct moe_expert_grad *g,
				 void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);
	enum moe_out out = g->first ? MOE_OUT_STREAM : MOE_OUT_ADD;
	int r = e->r;
	float *up_a = g->a_gu + (size_t)(e->ra - r) * (size_t)w->H;

	t->pairs(w->m, w->wg, 2 * d.r, NULL, NULL, (int)d.r, s.pair[2]);
	t->pairs(w->m, w->wg + d.r, 2 * d.r, NULL, NULL, (int)d.r, s.pair[3]);
	t->pairs(w->m, w->v, d.r, NULL, w->weight, (int)d.r, s.pair[4]);
	for (int64_t k = 0; k < w->H; k += MOE_GRAD_STRIP) {
		int n = (int)MOE_MIN(MOE_GRAD_STRIP, w->H - k);
		int64_t ld = moe_round_up(n, 16);

		if (w->drop.p > 0)
			pair_dropped(t, w, &s, MOE_DROP_GATE, d.H, k, n, s.pair[0]);
		else
			pair_x(t, w, d.H, k, n, s.pair[0]);
		t->grad(w->m, s.pair[2], d.r, r, s.pair[0], ld, n, 1, g->a_gu + k, w->H, out);
		if (w->drop.p > 0)
			pair_dropped(t, w, &s, MOE_DROP_UP, d.H, k, n, s.pair[0]);
		t->grad(w->m, s.pair[3], d.r, r, s.pair[0], ld, n, 1, up_a + k, w->H,
			e->ra == r ? MOE_OUT_ADD : out);
		moe_pair_strip(t, w->m, w->grad_out + k, w->H, w->token, n, s.step, s.pair[1]);
		t->grad(w->m, s.pair[1], ld, n, s.pair[4], d.r, r, e->scale, g->down_b + k * r, r,
			out);
	}
	t->fence();
}

/* c[n, k] (+)= rows^T columns, by strips of both; the wide operand x or grad_out is paired again
 * per strip of n */
static void weight_gradient(const struct moe_tiles *t, const struct moe_expert *e,
			    const struct moe_expert_rows *w, const struct moe_expert_scratch *s,
			    int64_t H, const void *panel, float *c, enum moe_out out)
{
	for (int64_t i = 0; i < w->I; i += MOE_CHUNK) {
		int n = (int)MOE_MIN(MOE_CHUNK, w->I - i);
		int64_t ld = moe_round_up(n, 16);

		(e->gate_t.data ? t->unpack_fwd : t->unpack_bwd)(
			w->m, panel, moe_round_up(w->I, MOE_PACK_K), i, ld, s->step, ld);
		t->pairs(w->m, s->step, ld, NULL, NULL, (int)ld, s->pair[0]);
		for (int64_t k = 0; k < w->H; k += MOE_GRAD_STRIP) {
			int width = (int)MOE_MIN(MOE_GRAD_STRIP, w->H - k);

			pair_x(t, w, H, k, width, s->pair[1]);
			t->grad(w->m, s->pair[0], ld, n, s->pair[1], moe_round_up(width, 16), width,
				1, c + i * w->H + k, w->H, out);
		}
	}
}

/* h is read from the forward panel that down_bwd left. */
static void down_gradient(const struct moe_tiles *t, const struct moe_expert_rows *w,
			  const struct moe_expert_scratch *s, float *c, enum moe_out out)
{
	int64_t I = moe_round_up(w->I, MOE_PACK_K);

	for (int64_t i = 0; i < w->I; i += MOE_CHUNK) {
		int n = (int)MOE_MIN(MOE_CHUNK, w->I - i);
		int64_t ld = moe_round_up(n, 16);

		t->unpack_fwd(w->m, w->h, I, i, ld, s->step, ld);
		t->pairs(w->m, s->step, ld, NULL, w->weight, (int)ld, s->pair[0]);
		for (int64_t k = 0; k < w->H; k += MOE_GRAD_STRIP) {
			int width = (int)MOE_MIN(MOE_GRAD_STRIP, w->H - k);

			moe_pair_strip(t, w->m, w->grad_out + k, w->H, w->token, width, s->step,
				       s->pair[1]);
			t->grad(w->m, s->pair[1], moe_round_up(width, 16), width, s->pair[0], ld, n,
				1, c + k * w->I + i, w->I, out);
		}
	}
}

void moe_packed_expert_weight_grad(const struct moe_tiles *t, const struct moe_expert *e,
				   struct moe_expert_rows *w, const struct moe_expert_grad *g,
				   void *scratch)
{
	struct moe_widths d = moe_widths_of(t, e, w);
	struct moe_expert_scratch s = moe_expert_scratch_of(t, e, w, scratch);
	enum moe_out out = g->first ? MOE_OUT_STREAM : MOE_OUT_ADD;

	if (g->gate)
		weight_gradient(t, e, w, &s, d.H, w->dgate, g->gate, out);
	if (g->up)
		weight_gradient(t, e, w, &s, d.H, w->dup, g->up, out);
	if (g->down)
		down_gradient(t, w, &s, g->down, out);
	t->fence();
}
