/* SPDX-License-Identifier: Apache-2.0 */
/* Values of MoE layers, in and out: weights packed from matrices, LoRA, masters, gradients, moments of one expert. */
#include "graphs/moe_state.h"

void moe_experts_pack(struct moe_experts *l, enum moe_expert_matrix which, int expert,
		      const void *src, enum moe_dtype dtype)
{
	for (int i = 0; i < l->P; i++)
		moe_experts_pack_part(l, which, expert, i, src, dtype);
}

int64_t moe_lora_elements(const struct moe_experts *l, enum moe_lora_array a)
{
	bool wide = a == MOE_GATE_A || a == MOE_UP_A || a == MOE_DOWN_B;

	return (int64_t)l->r * (wide ? l->H : l->I);
}

static float *field(const struct moe_param *p, enum moe_param_field f, int expert)
{
	float *base = f == MOE_VALUE	 ? p->value
		      : f == MOE_GRAD	 ? p->grad
		      : f == MOE_MOMENT1 ? p->m
					 : p->v;

	return moe_piece(base, p, expert);
}

/* Copies rows of `width` between a buffer (rows ld apart) and a contiguous piece. */
static void copy_rows(float *piece, float *buffer, int64_t rows, int64_t width, int64_t ld,
		      bool to_buffer)
{
	for (int64_t i = 0; i < rows; i++) {
		float *b = buffer + i * ld, *p = piece ? piece + i * width : NULL;

		if (to_buffer && !p)
			memset(b, 0, (size_t)width * sizeof *b);
		else if (to_buffer)
			memcpy(b, p, (size_t)width * sizeof *b);
		else if (p)
			memcpy(p, b, (size_t)width * sizeof *b);
	}
}

static void exchange(struct moe_view v, enum moe_param_field f, int expert, float *buffer, bool to_buffer)
{
	float *piece = field(v.param, f, expert);

	copy_rows(piece ? piece + v.at : NULL, buffer + v.offset, v.rows, v.width, v.ld, to_buffer);
}

static void exchange_lora(const struct moe_experts *l, enum moe_lora_array a, enum moe_param_field f,
			  int expert, float *buffer, bool to_buffer)
{
	for (int p = 0; p < (moe_lora_replicated(a) ? 1 : l->P); p++)
		exchange(moe_lora_view(l, a, p), f, expert, buffer, to_buffer);
}

void moe_experts_get(const struct moe_experts *l, enum moe_lora_array a, enum moe_param_field f,
		     int expert, float *dst)
{
	exchange_lora(l, a, f, expert, dst, true);
}

void moe_experts_set(struct moe_experts *l, enum moe_lora_array a, enum moe_param_field f,
		     int expert, const float *src)
{
	exchange_lora(l, a, f, expert, (float *)src, false);
	if (f != MOE_VALUE)
		return;
	if (a == MOE_GATE_A || a == MOE_UP_A)
		moe_param_pack_all(&l->a_gu, expert, expert + 1);
	if (a == MOE_DOWN_B)
		moe_param_pack_all(&l->down_b, expert, expert + 1);
	for (int p = 0; p < l->P; p++) {
		const struct moe_experts_part *part = &l->part[p];

		if (a == MOE_DOWN_A || a == MOE_GATE_B || a == MOE_UP_B)
			moe_param_pack_all(a == MOE_DOWN_A   ? &part->down_a
					   : a == MOE_GATE_B ? &part->gate_b
							     : &part->up_b,
					   expert, expert + 1);
	}
}

/* The packed weights of an expert in f32, or these from values that bf16 has. */
static void exchange_own(const struct moe_experts *l, enum moe_expert_matrix which, int expert, float *buffer,
			 bool to_buffer)
{
	const struct moe_kernels *k = moe_kernels();

	for (int p = 0; p < l->P; p++) {
		struct moe_view v = moe_base_view(l, which, p);
		struct moe_weight *w = &v.param->own[expert];
		float *at = buffer + v.offset;

		for (int64_t i = 0; to_buffer && i < v.rows; i++)
			k->weight_unpack(w, i, i + 1, at + i * v.ld);
		if (!to_buffer)
			moe_weight_store(w, v.rows, v.width, at, MOE_F32, v.ld);
	}
}

void moe_experts_get_base(const struct moe_experts *l, enum moe_expert_matrix which,
			  enum moe_param_field f, int expert, float *dst)
{
	if (f == MOE_VALUE && l->part[0].base[which].own) {
		exchange_own(l, which, expert, dst, true);
		return;
	}
	for (int p = 0; p < l->P; p++)
		exchange(moe_base_view(l, which, p), f, expert, dst, true);
}

void moe_experts_set_base(struct moe_experts *l, enum moe_expert_matrix which,
			  enum moe_param_field f, int expert, const float *src)
{
	if (f == MOE_VALUE && l->part[0].base[which].own)
		exchange_own(l, which, expert, (float *)src, false);
	for (int p = 0; p < l->P; p++) {
		exchange(moe_base_view(l, which, p), f, expert, (float *)src, false);
		if (f == MOE_VALUE && !l->requantise)
			moe_experts_pack_master(l, which, expert, p);
	}
	if (f == MOE_VALUE && l->requantise)
		moe_experts_requantise(l, which, expert);
}
