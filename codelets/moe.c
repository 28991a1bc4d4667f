/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/moe.h"
#include "codelets/kernels/packed/requantise.h"

/* One of a piece's matrices, of which there are `stack`. */
static void *matrix_at(void *packed, size_t piece, int stack, int e, int i)
{
	return packed ? (char *)packed + (size_t)e * piece + (size_t)i * (piece / (size_t)stack) : NULL;
}

void moe_param_pack(const struct moe_param *p, int e, int64_t first, int64_t count)
{
	const float *src = p->value + (int64_t)e * p->piece;
	const struct moe_kernels *k = moe_kernels();

	if (p->weight && moe_is_coded(&p->weight[e]))
		moe_requantise_rows(&p->weight[e], first, first + count, src + first * p->cols, p->cols);
	else if (p->weight)
		k->weight_repack(&p->weight[e], src + first * p->cols, first, first + count);
	for (int i = 0; i < p->stack && p->packed; i++, src += p->rows * p->cols) {
		int64_t n0 = MOE_MAX(first - i * p->rows, 0);
		int64_t n1 = MOE_MIN(first + count - i * p->rows, p->rows);

		if (n0 >= n1)
			continue;
		k->lora_pack(p->side, src, p->rows, p->cols, n0, n1, p->pack_scale,
			     matrix_at(p->packed, p->packed_piece, p->stack, e, i));
		if (p->packed_t)
			k->lora_pack_t(p->side, src, p->rows, p->cols, n0, n1, p->pack_scale,
				       matrix_at(p->packed_t, p->packed_t_piece, p->stack, e, i));
	}
}

void moe_param_pack_all(const struct moe_param *p, int e0, int e1)
{
	for (int e = e0; e < e1; e++)
		moe_param_pack(p, e, 0, p->stack * p->rows);
}

static const void *packed_of(const struct moe_param *p, int e, int i)
{
	return matrix_at(p->packed, p->packed_piece, p->stack, e, i);
}

static const void *packed_t_of(const struct moe_param *p, int e, int i)
{
	return matrix_at(p->packed_t, p->packed_t_piece, p->stack, e, i);
}

static struct moe_weight transposed_of(const struct moe_weight *W, void *data)
{
	return (struct moe_weight){
		.data = data, .layout = W->layout, .dtype = W->dtype, .n = W->k, .k = W->n
	};
}

static char *copies_of(const struct moe_transposed *copy, int p, int e)
{
	return copy->part[p].data + (size_t)e * (2 * copy->part[p].gate + copy->part[p].down);
}

static void add_copies(struct moe_expert *x, const struct moe_experts *l,
		       const struct moe_transposed *copy, int p, int e)
{
	const struct moe_experts_part *part = &l->part[p];
	char *data = copies_of(copy, p, e);

	x->gate_t = transposed_of(&x->gate, data);
	x->up_t = transposed_of(&x->up, data + copy->part[p].gate);
	x->down_t = transposed_of(&x->down, data + 2 * copy->part[p].gate);
	x->gate_a_t = packed_t_of(&l->a_gu, e, 0);
	x->up_a_t = packed_t_of(&l->a_gu, e, l->a_gu.stack - 1);
	x->gate_b_t = packed_t_of(&part->gate_b, e, 0);
	x->up_b_t = packed_t_of(&part->up_b, e, 0);
	x->down_a_t = packed_t_of(&part->down_a, e, 0);
	x->down_b_t = packed_t_of(&l->down_b, e, 0);
}

struct moe_expert moe_expert_of(const struct moe_experts *l, const struct moe_transposed *copy, int p,
				int e)
{
	const struct moe_experts_part *part = &l->part[p];
	struct moe_expert x = {
		.gate = part->gate[e],
		.up = part->up[e],
		.down = part->down[e],
		.a_gu = moe_piece(l->a_gu.value, &l->a_gu, e),
		.gate_b = moe_piece(part->gate_b.value, &part->gate_b, e),
		.up_b = moe_piece(part->up_b.value, &part->up_b, e),
		.down_a = moe_piece(part->down_a.value, &part->down_a, e),
		.down_b = moe_piece(l->down_b.value, &l->down_b, e),
		.gate_a_packed = packed_of(&l->a_gu, e, 0),
		.up_a_packed = packed_of(&l->a_gu, e, l->a_gu.stack - 1),
		.gate_b_packed = packed_of(&part->gate_b, e, 0),
		.up_b_packed = packed_of(&part->up_b, e, 0),
		.down_a_packed = packed_of(&part->down_a, e, 0),
		.down_b_packed = packed_of(&l->down_b, e, 0),
		.r = l->r,
		.ra = l->ra,
		.scale = l->scale,
		.glu = l->glu,
	};

	if (copy)
		add_copies(&x, l, copy, p, e);
	return x;
}

void moe_expert_transpose(const struct moe_experts *l, const struct moe_transposed *copy, int p, int e,
			  enum moe_expert_matrix which)
{
	const struct moe_experts_part *part = &l->part[p];
	const struct moe_weight *W = which == MOE_GATE ? part->gate : which == MOE_UP ? part->up : part->down;

	moe_kernels()->weight_transpose(&W[e], copies_of(copy, p, e) + (size_t)which * copy->part[p].gate);
}

void moe_weight_pack(struct moe_weight *w, const void *src, enum moe_dtype dtype, int64_t n, int64_t k, int64_t ld)
{
	struct moe_weight packed = *w;

	moe_kernels()->weight_pack(&packed, src, dtype, n, k, ld, MOE_USE_GEMM);
	if (packed.layout != w->layout || packed.dtype != w->dtype || packed.n != w->n || packed.k != w->k)
		*w = packed;
}

void moe_weight_store(struct moe_weight *w, int64_t n, int64_t k, const void *src, enum moe_dtype dtype, int64_t ld)
{
	size_t size = moe_dtype_size(dtype);
	float wide[256];

	moe_weight_pack(w, NULL, MOE_BF16, n, k, k); /* described: the table's layout */
	if (dtype == MOE_BF16 || w->layout != MOE_LAYOUT_ROWS) {
		moe_weight_pack(w, src, dtype, n, k, ld);
		return;
	}
	for (int64_t i = 0; i < n; i++)
		for (int64_t j = 0; j < k; j += MOE_COUNT(wide)) {
			size_t width = (size_t)MOE_MIN(k - j, (int64_t)MOE_COUNT(wide));

			moe_to_f32(wide, (const char *)src + (size_t)(i * ld + j) * size, dtype, width);
			moe_from_f32((uint16_t *)w->data + i * k + j, MOE_BF16, wide, width);
		}
}

static struct moe_weight *weight_of(const struct moe_experts_part *part, enum moe_expert_matrix which,
				    int e)
{
	struct moe_weight *w = which == MOE_GATE ? part->gate : which == MOE_UP ? part->up : part->down;

	return &w[e];
}

struct moe_pack_source moe_experts_source(const struct moe_experts *l, enum moe_expert_matrix which,
					  int expert, int part, const void *src,
					  enum moe_dtype dtype)
{
	const struct moe_experts_part *p = &l->part[part];
	size_t size = src ? moe_dtype_size(dtype) : 0; /* NULL stays NULL */
	struct moe_weight *w = weight_of(p, which, expert);
	const char *at = src;

	if (which == MOE_DOWN)
		return (struct moe_pack_source){ w, at + (size_t)p->i0 * size, l->H, p->I, l->I };
	return (struct moe_pack_source){ w, at + (size_t)p->i0 * (size_t)l->H * size, p->I, l->H,
					 l->H };
}

void moe_experts_pack_master(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
			     int part)
{
	const struct moe_param *b = &l->part[part].base[which];

	if (b->value)
		moe_weight_pack(weight_of(&l->part[part], which, expert), moe_piece(b->value, b, expert),
				MOE_F32, b->rows, b->cols, b->cols);
	if (l->transposed)
		moe_expert_transpose(l, l->transposed, part, expert, which);
}

void moe_experts_pack_part(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
			   int part, const void *src, enum moe_dtype dtype)
{
	struct moe_pack_source s = moe_experts_source(l, which, expert, part, src, dtype);
	const struct moe_param *b = &l->part[part].base[which];

	if (src && b->value) {
		for (int64_t i = 0; i < s.n; i++)
			moe_to_f32(moe_piece(b->value, b, expert) + i * s.k,
				   s.src + (size_t)(i * s.ld) * moe_dtype_size(dtype), dtype,
				   (size_t)s.k);
		moe_experts_pack_master(l, which, expert, part);
		return;
	}
	moe_weight_pack(s.w, s.src, dtype, s.n, s.k, s.ld);
	if (src && l->transposed)
		moe_expert_transpose(l, l->transposed, part, expert, which);
}

int64_t moe_experts_pack_coded(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
			       int part, const struct moe_quantised *q, int64_t n0, int64_t step)
{
	const struct moe_experts_part *p = &l->part[part];
	struct moe_coded_window w = { .n0 = n0, .n = l->H, .k0 = p->i0, .k = p->I, .step = step };
	struct moe_weight *W = weight_of(p, which, expert);
	int64_t nan;

	if (which != MOE_DOWN)
		w = (struct moe_coded_window){
			.n0 = n0 + p->i0 * step, .n = p->I, .k = l->H, .step = step
		};
	nan = moe_coded_pack(moe_coded_order(moe_kernels()), W, q, &w);
	/* h has heavier tails than x: in 8 bits it makes most of an expert's error (docs/formats.md) */
	if (which == MOE_DOWN && W->coding.compute == MOE_COMPUTE_INT8)
		W->coding.compute = MOE_COMPUTE_INT16;
	return nan;
}

/* ---- trained quantised weights ---- */

void moe_experts_coded(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
		       struct moe_coded_matrix *m)
{
	bool down = which == MOE_DOWN;

	m->n = down ? l->H : l->I;
	m->k = down ? l->I : l->H;
	m->windows = l->P;
	for (int p = 0; p < l->P; p++) {
		int64_t i0 = l->part[p].i0;

		m->window[p] = (struct moe_coded_part){ weight_of(&l->part[p], which, expert), down ? 0 : i0,
							down ? i0 : 0 };
	}
}

/* Masters of one expert's matrix, in all parts. */
struct masters {
	const struct moe_experts *l;
	enum moe_expert_matrix which;
	int expert;
};

/* What a part has of a block [n, k]: from [row, col] of its piece on; that is [down, right] in the block. */
struct overlap {
	int64_t row, col, n, k, down, right;
};

static struct overlap overlap(const struct masters *s, int p, int64_t n0, int64_t n, int64_t k0, int64_t k)
{
	const struct moe_experts_part *part = &s->l->part[p];
	const struct moe_param *b = &part->base[s->which];
	int64_t row = s->which == MOE_DOWN ? 0 : part->i0, col = s->which == MOE_DOWN ? part->i0 : 0;
	struct overlap o = { .row = MOE_MAX(n0 - row, 0), .col = MOE_MAX(k0 - col, 0) };

	o.n = MOE_MIN(n0 + n - row, b->rows) - o.row;
	o.k = MOE_MIN(k0 + k - col, b->cols) - o.col;
	o.down = o.row + row - n0;
	o.right = o.col + col - k0;
	return o;
}

static const float *master_source(const void *user, int64_t n0, int64_t n, int64_t k0, int64_t k, float *buffer,
				  int64_t *ld)
{
	const struct masters *s = user;

	*ld = k;
	for (int p = 0; p < s->l->P; p++) {
		const struct moe_param *b = &s->l->part[p].base[s->which];
		struct overlap o = overlap(s, p, n0, n, k0, k);
		float *to = buffer + o.down * k + o.right;
		const float *from;

		if (o.n <= 0 || o.k <= 0)
			continue;
		if (!b->value) {
			moe_plain_values(&b->own[s->expert], o.row, o.n, o.col, o.k, to, k);
			continue;
		}
		from = moe_piece(b->value, b, s->expert) + o.row * b->cols + o.col;
		if (o.n == n && o.k == k) {
			*ld = b->cols;
			return from;
		}
		for (int64_t i = 0; i < o.n; i++)
			memcpy(to + i * k, from + i * b->cols, (size_t)o.k * sizeof *to);
	}
	return buffer;
}

void moe_experts_requantise(const struct moe_experts *l, enum moe_expert_matrix which, int expert)
{
	struct masters s = { l, which, expert };
	struct moe_coded_matrix m;

	moe_experts_coded(l, which, expert, &m);
	moe_requantise_matrix(&m, 0, m.n, master_source, &s);
}

void moe_experts_take_master(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
			     const void *src, enum moe_dtype dtype)
{
	for (int p = 0; p < l->P; p++) {
		struct moe_pack_source s = moe_experts_source(l, which, expert, p, src, dtype);
		const struct moe_param *b = &l->part[p].base[which];

		for (int64_t i = 0; b->value && i < s.n; i++)
			moe_to_f32(moe_piece(b->value, b, expert) + i * s.k,
				   s.src + (size_t)(i * s.ld) * moe_dtype_size(dtype), dtype, (size_t)s.k);
		if (b->own)
			moe_weight_store(&b->own[expert], s.n, s.k, s.src, dtype, s.ld);
	}
}

void moe_experts_dequantise_master(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
				   const struct moe_quantised *q, int64_t n0)
{
	for (int p = 0; p < l->P; p++) {
		const struct moe_param *b = &l->part[p].base[which];
		int64_t i0 = l->part[p].i0, row = which == MOE_DOWN ? 0 : i0, k0 = which == MOE_DOWN ? i0 : 0;

		for (int64_t i = 0; i < b->rows; i++)
			moe_dequantise_row(q, n0 + row + i, k0, b->cols, moe_piece(b->value, b, expert) + i * b->cols);
	}
}

struct moe_view moe_lora_view(const struct moe_experts *l, enum moe_lora_array a, int part)
{
	const struct moe_experts_part *p = &l->part[part];

	switch (a) {
	case MOE_GATE_A:
	case MOE_UP_A:
		return (struct moe_view){ &l->a_gu, a == MOE_UP_A ? (int64_t)(l->ra - l->r) * l->H : 0,
					  l->r, l->H, 0, l->H };
	case MOE_DOWN_B:
		return (struct moe_view){ &l->down_b, 0, l->H, l->r, 0, l->r };
	case MOE_DOWN_A:
		return (struct moe_view){ &p->down_a, 0, l->r, p->I, p->i0, l->I };
	default:
		return (struct moe_view){ a == MOE_GATE_B ? &p->gate_b : &p->up_b, 0, p->I, l->r,
					  p->i0 * l->r, l->r };
	}
}

struct moe_view moe_base_view(const struct moe_experts *l, enum moe_expert_matrix which, int part)
{
	const struct moe_experts_part *p = &l->part[part];

	if (which == MOE_DOWN)
		return (struct moe_view){ &p->base[which], 0, l->H, p->I, p->i0, l->I };
	return (struct moe_view){ &p->base[which], 0, p->I, l->H, p->i0 * l->H, l->H };
}

/* Row `row` of an array of rows of `bytes`. */
static void *rows_at(void *base, size_t row, size_t bytes)
{
	return base ? (char *)base + row * bytes : NULL;
}

static struct moe_dropout dropout_of(const struct moe_experts *l, const struct moe_experts_state *s, int p,
				     int e)
{
	struct moe_dropout d = { .position = s->drop.position, .i0 = l->part[p].i0 };

	if (!s->drop.on)
		return d;
	d.p = l->dropout;
	for (int i = 0; i < MOE_DROPPED; i++)
		d.key[i] = moe_drop_key(&s->drop, i, e);
	return d;
}

struct moe_expert_rows moe_expert_rows_of(const struct moe_experts *l,
					  const struct moe_experts_state *s, int p, int e)
{
	const struct moe_experts_part_state *ps = &s->part[p];
	const struct moe_kernels *k = moe_kernels();
	size_t o = (size_t)s->plan.offset[e], panel = (size_t)k->panel_bytes;
	size_t kept = (size_t)k->kept_bytes, f32 = sizeof(float);
	size_t H = (size_t)moe_width(l->H), I = (size_t)moe_width(l->part[p].I);
	size_t r = (size_t)moe_rank_width(l->r), ra = l->ra == l->r ? r : 2 * r;

	return (struct moe_expert_rows){
		.m = s->plan.offset[e + 1] - s->plan.offset[e],
		.T = s->plan.T,
		.H = l->H,
		.I = (int)l->part[p].I,
		.token = s->plan.token + o,
		.weight = s->plan.row_weight + o,
		.x = s->x,
		.x16 = s->x16,
		.grad_out = s->grad_out,
		.panel = rows_at(ps->panel, o, H * panel),
		.u = rows_at(ps->u, o, ra * kept),
		.u_panel = rows_at(ps->u_panel, o, ra * panel),
		.gate = rows_at(ps->gate, o, I * kept),
		.up = rows_at(ps->up, o, I * kept),
		.h = rows_at(ps->h, o, I * panel),
		.v_part = rows_at(ps->v_part, o, r * f32),
		.v = rows_at(ps->v, o, r * f32),
		.z = rows_at(ps->z, o, r * f32),
		.dgate = rows_at(ps->dgate, o, I * panel),
		.dup = rows_at(ps->dup, o, I * panel),
		.dgw_part = rows_at(ps->dgw_part, o, f32),
		.w_part = rows_at(ps->w_part, o, 2 * r * f32),
		.y = rows_at(ps->y, o, H * f32),
		.part_rows = s->part_rows,
		.drop = dropout_of(l, s, p, e),
	};
}

void *moe_expert_late_h(const struct moe_experts *l, const struct moe_experts_state *s, int p, int e)
{
	const struct moe_experts_part_state *ps = &s->part[p];
	size_t row = (size_t)moe_width(l->part[p].I) * (size_t)moe_kernels()->panel_bytes;

	return rows_at(ps->h_late ? ps->h_late : ps->h, (size_t)s->plan.offset[e], row);
}

struct moe_expert_grad moe_expert_grad_of(const struct moe_experts *l, int p, int e, bool first)
{
	const struct moe_experts_part *part = &l->part[p];

	return (struct moe_expert_grad){
		.first = first,
		.a_gu = moe_piece(l->a_gu.grad, &l->a_gu, e),
		.gate_b = moe_piece(part->gate_b.grad, &part->gate_b, e),
		.up_b = moe_piece(part->up_b.grad, &part->up_b, e),
		.down_a = moe_piece(part->down_a.grad, &part->down_a, e),
		.down_b = moe_piece(l->down_b.grad, &l->down_b, e),
		.gate = moe_piece(part->base[MOE_GATE].grad, &part->base[MOE_GATE], e),
		.up = moe_piece(part->base[MOE_UP].grad, &part->base[MOE_UP], e),
		.down = moe_piece(part->base[MOE_DOWN].grad, &part->base[MOE_DOWN], e),
	};
}
