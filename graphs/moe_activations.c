/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of a pass through a MoE layer. What is kept per (slot, layer): the plan, x in bf16, v = h A_down^T,
 * and u, gate and up where they are not computed again. Everything else is scratch that a micro-batch's
 * layers share.
 */
#include "codelets/combine_bwd.h"
#include "codelets/combine_part.h"
#include "codelets/lora_grad.h"
#include "codelets/route.h"
#include "codelets/update.h"
#include "graphs/moe_state.h"

struct taker {
	struct moe_engine *e; /* NULL: only count */
	size_t bytes;
	enum moe_status st;
};

static void *take(struct taker *t, size_t count, size_t size, int part)
{
	void *p;

	t->bytes += count * size;
	if (!t->e || t->st != MOE_OK || !count)
		return NULL;
	p = moe_memory_alloc(t->e, count * size, part, "activations");
	if (!p)
		t->st = moe_fail(MOE_ERR_NOMEM, "no memory for %zu bytes of activations",
				 count * size);
	return p;
}

static float *take_f32(struct taker *t, size_t rows, int64_t width, int part)
{
	return take(t, rows * (size_t)width, sizeof(float), part);
}

static size_t rows_of(const struct moe_experts *l, int T)
{
	return (size_t)T * (size_t)l->k;
}

/* Rows of the table's own elements: panel (or kept) ones, of a padded width. */
static void *take_panel(struct taker *t, size_t rows, int64_t width, int part)
{
	return take(t, rows * (size_t)width, (size_t)moe_kernels()->panel_bytes, part);
}

static void *take_kept(struct taker *t, size_t rows, int64_t width, int part)
{
	return take(t, rows * (size_t)width, (size_t)moe_kernels()->kept_bytes, part);
}

static int64_t thin_width(const struct moe_experts *l)
{
	int64_t r = moe_rank_width(l->r);

	return l->ra == l->r ? r : 2 * r;
}

/* u, gate and up of a part: kept, or scratch where they are computed again. */
static void activations_take(struct taker *t, const struct moe_experts *l, size_t R, int p,
			     struct moe_experts_part_state *ps)
{
	int64_t I = moe_width(l->part[p].I);

	ps->u = take_kept(t, R, thin_width(l), p);
	ps->gate = take_kept(t, R, I, p);
	ps->up = take_kept(t, R, I, p);
}

static bool trains_base(const struct moe_experts *l)
{
	return l->part[0].base[MOE_GATE].grad != NULL;
}

/* What gradients of base weights read when the backward is layers further down: a ring of two, with h beside the
 * forward's. */
static void late_take(struct taker *t, size_t R, int64_t I, int p, bool base, struct moe_experts_scratch *s)
{
	for (int i = 0; i <= base; i++) {
		struct moe_experts_part_state *ps = &s->ring[i][p];

		ps->dgate = take_panel(t, R, I, p);
		ps->dup = take_panel(t, R, I, p);
		ps->h_late = base ? take_panel(t, R, I, p) : NULL;
	}
}

static void scratch_take(struct taker *t, const struct moe_experts *l, int T, bool backward,
			 struct moe_experts_scratch *s)
{
	size_t R = rows_of(l, T);
	int64_t H = moe_width(l->H), r = moe_rank_width(l->r);

	for (int p = 0; p < l->P; p++) {
		struct moe_experts_part_state *ps = &s->part[p];
		int64_t I = moe_width(l->part[p].I);
		size_t chunks = (size_t)moe_chunks(l->part[p].I);

		if (l->recompute)
			activations_take(t, l, R, p, ps);
		ps->panel = take_panel(t, R, H, p);
		ps->u_panel = take_panel(t, R, thin_width(l), p);
		ps->h = take_panel(t, R, I, p);
		ps->v_part = take_f32(t, R * chunks, r, p);
		ps->y = take_f32(t, R, H, p);
		if (l->P > 1) /* one part: combine sums rows itself */
			ps->sum = take_f32(t, (size_t)T, l->H, p);
		if (!backward)
			continue;
		ps->z = take_f32(t, R, r, p);
		ps->dgw_part = take_f32(t, R * chunks, 1, p);
		for (int i = 0; i < 2; i++)
			s->ring[i][p].w_part = take_f32(t, R * chunks, 2 * r, p);
		late_take(t, R, I, p, trains_base(l), s);
	}
	for (int i = 0; backward && l->router && i <= (l->grad_router != NULL); i++)
		s->grad_logits[i] = take_f32(t, (size_t)T, l->E, -1);
}

enum moe_status moe_experts_scratch_alloc(struct moe_engine *e, const struct moe_experts *l, int T,
					  bool backward, struct moe_experts_scratch *s)
{
	struct taker t = { .e = e, .st = MOE_OK };

	memset(s, 0, sizeof *s);
	scratch_take(&t, l, T, backward, s);
	if (t.st != MOE_OK)
		moe_experts_scratch_free(e, s, l->P);
	return t.st;
}

void moe_experts_scratch_free(struct moe_engine *e, struct moe_experts_scratch *s, int P)
{
	for (int p = 0; p < P; p++) {
		struct moe_experts_part_state *ps = &s->part[p];

		moe_memory_free(e, ps->u);
		moe_memory_free(e, ps->gate);
		moe_memory_free(e, ps->up);
		moe_memory_free(e, ps->panel);
		moe_memory_free(e, ps->u_panel);
		moe_memory_free(e, ps->h);
		moe_memory_free(e, ps->v_part);
		moe_memory_free(e, ps->y);
		moe_memory_free(e, ps->sum);
		moe_memory_free(e, ps->z);
		moe_memory_free(e, ps->dgw_part);
		for (int i = 0; i < 2; i++) {
			moe_memory_free(e, s->ring[i][p].w_part);
			moe_memory_free(e, s->ring[i][p].dgate);
			moe_memory_free(e, s->ring[i][p].dup);
			moe_memory_free(e, s->ring[i][p].h_late);
		}
	}
	for (int i = 0; i < 2; i++)
		moe_memory_free(e, s->grad_logits[i]);
	memset(s, 0, sizeof *s);
}

static void plan_take(struct taker *t, const struct moe_experts *l, int T, struct moe_plan *plan)
{
	size_t R = rows_of(l, T), logits = l->router ? (size_t)T * (size_t)l->E : 0;

	plan->ids = take(t, R, sizeof *plan->ids, -1);
	plan->weights = take(t, R, sizeof *plan->weights, -1);
	plan->logits = take(t, logits, sizeof *plan->logits, -1);
	plan->prob_sum = take(t, (size_t)(l->router ? moe_token_blocks(T) : 0) * (size_t)l->E,
			      sizeof *plan->prob_sum, -1);
	plan->z_sum = take(t, (size_t)(l->router ? moe_token_blocks(T) : 0), sizeof *plan->z_sum, -1);
	plan->offset = take(t, (size_t)l->E + 1, sizeof *plan->offset, -1);
	plan->token = take(t, R, sizeof *plan->token, -1);
	plan->position = take(t, R, sizeof *plan->position, -1);
	plan->row_weight = take(t, R, sizeof *plan->row_weight, -1);
	plan->grad_weights = take(t, R, sizeof *plan->grad_weights, -1);
}

static void state_take(struct taker *t, const struct moe_experts *l, int T,
		       struct moe_experts_state *s)
{
	size_t R = rows_of(l, T);

	plan_take(t, l, T, &s->plan);
	if (moe_kernels()->x16 && !l->recompute_x)
		s->x16 = take(t, (size_t)T * (size_t)moe_width(l->H), sizeof *s->x16, -1);
	for (int p = 0; p < l->P; p++) {
		struct moe_experts_part_state *ps = &s->part[p];

		if (!l->recompute)
			activations_take(t, l, R, p, ps);
		ps->v = take_f32(t, R, moe_rank_width(l->r), p);
	}
}

enum moe_status moe_experts_state_alloc(struct moe_engine *e, const struct moe_experts *l, int T,
					struct moe_experts_state *st)
{
	struct taker t = { .e = e, .st = MOE_OK };

	memset(st, 0, sizeof *st);
	st->recompute = l->recompute;
	st->recompute_x = l->recompute_x;
	state_take(&t, l, T, st);
	st->part_rows = rows_of(l, T);
	if (t.st != MOE_OK)
		moe_experts_state_free(e, st, l->P);
	return t.st;
}

void moe_experts_state_free(struct moe_engine *e, struct moe_experts_state *st, int P)
{
	struct moe_plan *plan = &st->plan;

	moe_memory_free(e, plan->ids);
	moe_memory_free(e, plan->weights);
	moe_memory_free(e, plan->logits);
	moe_memory_free(e, plan->prob_sum);
	moe_memory_free(e, plan->z_sum);
	moe_memory_free(e, plan->offset);
	moe_memory_free(e, plan->token);
	moe_memory_free(e, plan->position);
	moe_memory_free(e, plan->row_weight);
	moe_memory_free(e, plan->grad_weights);
	if (!st->recompute_x)
		moe_memory_free(e, st->x16);
	for (int p = 0; p < P; p++) {
		if (!st->recompute) { /* else they are scratch */
			moe_memory_free(e, st->part[p].u);
			moe_memory_free(e, st->part[p].gate);
			moe_memory_free(e, st->part[p].up);
		}
		moe_memory_free(e, st->part[p].v);
	}
	memset(st, 0, sizeof *st);
}

void moe_experts_state_bind(struct moe_experts_state *st, const struct moe_experts *l,
			    const struct moe_experts_scratch *s, int ring, int T)
{
	st->plan.T = T;
	st->plan.grad_logits = s->grad_logits[s->grad_logits[1] ? ring : 0];
	st->part_rows = rows_of(l, T);
	for (int p = 0; p < l->P; p++) {
		struct moe_experts_part_state *ps = &st->part[p];
		const struct moe_experts_part_state *late = &s->ring[s->ring[1][p].dgate ? ring : 0][p];

		if (l->recompute) {
			ps->u = s->part[p].u;
			ps->gate = s->part[p].gate;
			ps->up = s->part[p].up;
		}
		ps->panel = s->part[p].panel;
		ps->u_panel = s->part[p].u_panel;
		ps->h = s->part[p].h;
		ps->v_part = s->part[p].v_part;
		ps->y = s->part[p].y;
		ps->sum = s->part[p].sum;
		ps->z = s->part[p].z;
		ps->dgate = late->dgate;
		ps->dup = late->dup;
		ps->h_late = late->h_late;
		ps->dgw_part = s->part[p].dgw_part;
		ps->w_part = s->ring[ring][p].w_part;
	}
}

size_t moe_experts_state_bytes(const struct moe_experts *l, int T)
{
	struct taker t = { 0 };
	struct moe_experts_state s;

	state_take(&t, l, T, &s);
	return t.bytes;
}

size_t moe_experts_scratch_bytes(const struct moe_experts *l, int T, bool backward)
{
	struct taker t = { 0 };
	struct moe_experts_scratch s;

	scratch_take(&t, l, T, backward, &s);
	return t.bytes;
}

size_t moe_experts_worker_scratch(const struct moe_experts *l, int T)
{
	/* a router takes k different experts; a caller's ids may name one again and again */
	int m = l->router ? T : (int)rows_of(l, T);
	size_t n = moe_lora_grad_scratch(l, m);

	n = MOE_MAX(n, moe_combine_bwd_scratch(l));
	n = MOE_MAX(n, moe_combine_scratch(l));
	if (l->part[0].base[MOE_GATE].own)
		n = MOE_MAX(n, moe_update_scratch(MOE_MAX(l->H, l->I), l->part[0].gate));
	return l->router ? MOE_MAX(n, moe_route_scratch(l)) : n;
}

enum moe_status moe_ffn_state_alloc(struct moe_engine *e, const struct moe_ffn *f, int T,
				    struct moe_ffn_state *s)
{
	struct taker t = { .e = e, .st = MOE_OK };

	memset(s, 0, sizeof *s);
	s->gate = take_f32(&t, (size_t)T, f->I, -1);
	s->up = take_f32(&t, (size_t)T, f->I, -1);
	s->h = take_f32(&t, (size_t)T, f->I, -1);
	s->dgate = take_f32(&t, (size_t)T, f->I, -1);
	s->dup = take_f32(&t, (size_t)T, f->I, -1);
	s->sigmoid = take_f32(&t, (size_t)T, 1, -1);
	s->dsigmoid = take_f32(&t, (size_t)T, 1, -1);
	if (t.st != MOE_OK)
		moe_ffn_state_free(e, s);
	return t.st;
}

void moe_ffn_state_free(struct moe_engine *e, struct moe_ffn_state *s)
{
	moe_memory_free(e, s->gate);
	moe_memory_free(e, s->up);
	moe_memory_free(e, s->h);
	moe_memory_free(e, s->dgate);
	moe_memory_free(e, s->dup);
	moe_memory_free(e, s->sigmoid);
	moe_memory_free(e, s->dsigmoid);
	memset(s, 0, sizeof *s);
}
