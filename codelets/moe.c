/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/moe.h"

struct moe_expert moe_expert_of(const struct moe_experts *l, int p, int e)
{
	const struct moe_experts_part *part = &l->part[p];

	return (struct moe_expert){
		.gate = part->gate[e],
		.up = part->up[e],
		.down = part->down[e],
		.a_gu = moe_piece(l->a_gu.value, &l->a_gu, e),
		.gate_b = moe_piece(part->gate_b.value, &part->gate_b, e),
		.up_b = moe_piece(part->up_b.value, &part->up_b, e),
		.down_a = moe_piece(part->down_a.value, &part->down_a, e),
		.down_b = moe_piece(l->down_b.value, &l->down_b, e),
		.r = l->r,
		.ra = l->ra,
		.scale = l->scale,
	};
}

static float *rows_at(float *base, size_t row, int64_t width)
{
	return base ? base + row * (size_t)width : NULL;
}

struct moe_expert_rows moe_expert_rows_of(const struct moe_experts *l,
					  const struct moe_experts_state *s, int p, int e)
{
	const struct moe_experts_part_state *ps = &s->part[p];
	size_t o = (size_t)s->plan.offset[e];
	int64_t I = l->part[p].I;

	return (struct moe_expert_rows){
		.m = s->plan.offset[e + 1] - s->plan.offset[e],
		.T = s->plan.T,
		.H = l->H,
		.I = (int)I,
		.token = s->plan.token + o,
		.weight = s->plan.row_weight + o,
		.x = s->x,
		.grad_out = s->grad_out,
		.panel = rows_at(ps->panel, o, l->H),
		.u = rows_at(ps->u, o, l->ra),
		.gate = rows_at(ps->gate, o, I),
		.up = rows_at(ps->up, o, I),
		.h = rows_at(ps->h, o, I),
		.v_part = rows_at(ps->v_part, o, l->r),
		.z = rows_at(ps->z, o, l->r),
		.dgate = rows_at(ps->dgate, o, I),
		.dup = rows_at(ps->dup, o, I),
		.dgw_part = rows_at(ps->dgw_part, o, 1),
		.w_part = rows_at(ps->w_part, o, 2 * l->r),
		.y = rows_at(ps->y, o, l->H),
		.part_rows = s->part_rows,
	};
}

struct moe_expert_grad moe_expert_grad_of(const struct moe_experts *l, int p, int e)
{
	const struct moe_experts_part *part = &l->part[p];
	int64_t base = part->I * l->H * e;

	return (struct moe_expert_grad){
		.a_gu = moe_piece(l->a_gu.grad, &l->a_gu, e),
		.gate_b = moe_piece(part->gate_b.grad, &part->gate_b, e),
		.up_b = moe_piece(part->up_b.grad, &part->up_b, e),
		.down_a = moe_piece(part->down_a.grad, &part->down_a, e),
		.down_b = moe_piece(l->down_b.grad, &l->down_b, e),
		.gate = part->grad_gate ? part->grad_gate + base : NULL,
		.up = part->grad_up ? part->grad_up + base : NULL,
		.down = part->grad_down ? part->grad_down + base : NULL,
	};
}
