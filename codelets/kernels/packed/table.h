/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Binds the drivers of this folder to one struct moe_tiles. A kernels.c that includes it after
 *defining MOE_TILES (the tiles' name) writes
 *
 *	const struct moe_kernels moe_kernels_<isa> = { .name = ..., MOE_PACKED_KERNELS, ... };
 */
#ifndef MOE_CODELETS_KERNELS_PACKED_TABLE_H
#define MOE_CODELETS_KERNELS_PACKED_TABLE_H

#include "codelets/format.h"
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/packed/packed.h"

/* For ops that need one of the table's elementwise functions. */
#define MOE_BIND_WITH(function, op, params, ...)                                                   \
	static void bound_##op params                                                              \
	{                                                                                          \
		moe_packed_##op(&MOE_TILES, function, __VA_ARGS__);                                \
	}
#define MOE_BIND(type, op, params, ...)                                                            \
	static type bound_##op params                                                              \
	{                                                                                          \
		return moe_packed_##op(&MOE_TILES, __VA_ARGS__);                                   \
	}

MOE_BIND(size_t, weight_bytes, (enum moe_dtype src, int64_t n, int64_t k, enum moe_weight_use use),
	 src, n, k, use)
MOE_BIND_WITH(OWN(to_bf16), weight_pack,
	      (struct moe_weight * W, const void *src, enum moe_dtype dtype, int64_t n, int64_t k,
	       int64_t ld, enum moe_weight_use use),
	      W, src, dtype, n, k, ld, use)
MOE_BIND_WITH(OWN(pack_rows), weight_repack,
	      (const struct moe_weight *W, const float *src, int64_t n0, int64_t n1), W, src, n0, n1)
MOE_BIND(void, weight_unpack, (const struct moe_weight *W, int64_t n0, int64_t n1, float *dst), W,
	 n0, n1, dst)
MOE_BIND(size_t, lora_bytes, (enum moe_lora_side side, int64_t n, int64_t k), side, n, k)
MOE_BIND_WITH(OWN(pack_rows), lora_pack,
	      (enum moe_lora_side side, const float *src, int64_t n, int64_t k, int64_t n0,
	       int64_t n1, float scale, void *dst),
	      side, src, n, k, n0, n1, scale, dst)
MOE_BIND(void, weight_transpose, (const struct moe_weight *W, void *dst), W, dst)
MOE_BIND_WITH(OWN(pack_rows), lora_pack_t,
	      (enum moe_lora_side side, const float *src, int64_t n, int64_t k, int64_t n0,
	       int64_t n1, float scale, void *dst),
	      side, src, n, k, n0, n1, scale, dst)
MOE_BIND(size_t, linear_scratch, (int m, int64_t n, int64_t k, int r), m, n, k, r)
MOE_BIND_WITH(OWN(pack_rows), linear,
	      (int m, const struct moe_weight *W, int64_t n0, int64_t n1, const float *x,
	       int64_t ldx, const float *bias, const struct moe_lora *lora, float *y, int64_t ldy,
	       void *scratch),
	      m, W, n0, n1, x, ldx, bias, lora, y, ldy, scratch)
MOE_BIND_WITH(OWN(pack_rows), linear_bwd,
	      (int m, const struct moe_weight *W, const float *dy, int64_t lddy,
	       const struct moe_lora *lora, float *dx, int64_t lddx, bool accumulate,
	       void *scratch),
	      m, W, dy, lddy, lora, dx, lddx, accumulate, scratch)
MOE_BIND_WITH(OWN(pack_rows), linear_lora_grad,
	      (int m, int64_t n, int64_t k, const float *x, int64_t ldx, const float *dy,
	       int64_t lddy, const struct moe_lora *lora, float *ga, float *gb, void *scratch),
	      m, n, k, x, ldx, dy, lddy, lora, ga, gb, scratch)
MOE_BIND(size_t, linear_grad_scratch, (int m, int64_t n, int64_t k), m, n, k)
MOE_BIND(void, linear_weight_grad,
	 (int m, int64_t n, int64_t k, const float *x, int64_t ldx, const float *dy, int64_t lddy,
	  float *g, enum moe_weight_use use, void *scratch),
	 m, n, k, x, ldx, dy, lddy, g, use, scratch)
MOE_BIND(size_t, attention_scratch, (int dim), dim)

static const struct moe_attention_ops attention_ops = {
	&MOE_TILES,
	OWN(to_bf16),
	OWN(pack_rows),
	{ OWN(softmax_weights), OWN(softmax_finish), OWN(softmax_dot), OWN(softmax_backward) },
};

#define MOE_BIND_ATTENTION(op)                                                                     \
	static void bound_##op(const struct moe_attention *a, int i0, int i1, int h0, int h1,      \
			       void *scratch)                                                      \
	{                                                                                          \
		moe_packed_##op(&attention_ops, a, i0, i1, h0, h1, scratch);                       \
	}

MOE_BIND_ATTENTION(attention)
MOE_BIND_ATTENTION(attention_bwd_q)
MOE_BIND_ATTENTION(attention_bwd_kv)

static void bound_attention_centre(const struct moe_attention *a, int q0, int q1)
{
	moe_packed_attention_centre(&attention_ops, a, q0, q1);
}

MOE_BIND(size_t, expert_scratch, (int m, int64_t H, int64_t I, int r, enum moe_compute compute), m, H, I, r, compute)
MOE_BIND_WITH(OWN(to_bf16), expert_gather,
	      (const struct moe_expert *e, struct moe_expert_rows *w, void *scratch), e, w, scratch)
MOE_BIND(void, expert_scatter,
	 (const struct moe_expert *e, struct moe_expert_rows *w, void *scratch), e, w, scratch)

#define MOE_BIND_CHUNKS(op)                                                                        \
	MOE_BIND(void, op,                                                                         \
		 (const struct moe_expert *e, struct moe_expert_rows *w, int c0, int c1,           \
		  void *scratch),                                                                  \
		 e, w, c0, c1, scratch)
#define MOE_BIND_GRAD(op)                                                                          \
	MOE_BIND(void, op,                                                                         \
		 (const struct moe_expert *e, struct moe_expert_rows *w,                           \
		  const struct moe_expert_grad *g, void *scratch),                                 \
		 e, w, g, scratch)

MOE_BIND_CHUNKS(expert_gate_up)
MOE_BIND_CHUNKS(expert_down)
MOE_BIND_CHUNKS(expert_gate_up_bwd)
MOE_BIND(void, expert_down_bwd,
	 (const struct moe_expert *e, struct moe_expert_rows *w, const struct moe_expert_grad *g,
	  int c0, int c1, void *scratch),
	 e, w, g, c0, c1, scratch)
MOE_BIND_GRAD(expert_lora_grad)
MOE_BIND_GRAD(expert_weight_grad)

static const struct moe_coders coders = { OWN(largest), OWN(range), OWN(integers), OWN(e4m3), OWN(e2m1) };

#define MOE_PACKED_KERNELS                                                                         \
	.coders = &coders, .tiles = &MOE_TILES, .width_pad = MOE_PACK_K, .x16 = true, .kept_bytes = 2,                \
	.weight_bytes = bound_weight_bytes, .weight_pack = bound_weight_pack,                      \
	.weight_repack = bound_weight_repack,                                                      \
	.weight_unpack = bound_weight_unpack, .lora_bytes = bound_lora_bytes,                      \
	.lora_pack = bound_lora_pack, .weight_transpose = bound_weight_transpose,                  \
	.lora_pack_t = bound_lora_pack_t, .linear_scratch = bound_linear_scratch,                  \
	.linear = bound_linear, .linear_bwd = bound_linear_bwd,                                    \
	.linear_lora_grad = bound_linear_lora_grad,                                                \
	.linear_grad_scratch = bound_linear_grad_scratch,                                          \
	.linear_weight_grad = bound_linear_weight_grad,                                            \
	.attention_scratch = bound_attention_scratch, .attention = bound_attention,                \
	.attention_centre = bound_attention_centre, .attention_bwd_q = bound_attention_bwd_q,      \
	.attention_bwd_kv = bound_attention_bwd_kv, .expert_scratch = bound_expert_scratch,        \
	.expert_gather = bound_expert_gather, .expert_gate_up = bound_expert_gate_up,              \
	.expert_down = bound_expert_down, .expert_scatter = bound_expert_scatter,                  \
	.expert_down_bwd = bound_expert_down_bwd, .expert_gate_up_bwd = bound_expert_gate_up_bwd,  \
	.expert_lora_grad = bound_expert_lora_grad,                                                \
	.expert_weight_grad = bound_expert_weight_grad, MOE_ELEMENTWISE_KERNELS

#endif
