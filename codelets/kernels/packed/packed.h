/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ops of struct moe_kernels over any struct moe_tiles; the contracts are in
 * codelets/kernels/kernels.h. Weights packed for MOE_USE_EXACT, and those alone, go to the
 * reference functions.
 */
#ifndef MOE_CODELETS_KERNELS_PACKED_PACKED_H
#define MOE_CODELETS_KERNELS_PACKED_PACKED_H

#include "codelets/kernels/packed/layout.h"
#include "codelets/kernels/packed/softmax.h"
#include "codelets/kernels/ref/ref.h"

/* The table's own conversions, as in struct moe_kernels and elementwise.h. */
typedef void moe_to_bf16(int m, int64_t n, const float *x, int64_t ldx, uint16_t *dst,
			 int64_t ld16);
typedef void moe_pack_rows(enum moe_layout layout, int rows, int64_t k, int64_t kp, const float *src,
			   int64_t ld, float scale, uint16_t *dst);

/* weights.c */
size_t moe_packed_weight_bytes(const struct moe_tiles *t, enum moe_dtype src, int64_t n, int64_t k,
			       enum moe_weight_use use);
void moe_packed_weight_pack(const struct moe_tiles *t, moe_to_bf16 *to_bf16, struct moe_weight *W,
			    const void *src, enum moe_dtype dtype, int64_t n, int64_t k, int64_t ld,
			    enum moe_weight_use use);
void moe_packed_weight_repack(const struct moe_tiles *t, moe_pack_rows *pack,
			      const struct moe_weight *W, const float *src, int64_t n0, int64_t n1);
void moe_packed_weight_unpack(const struct moe_tiles *t, const struct moe_weight *W, int64_t n0,
			      int64_t n1, float *dst);
size_t moe_packed_lora_bytes(const struct moe_tiles *t, enum moe_lora_side side, int64_t n,
			     int64_t k);
void moe_packed_lora_pack(const struct moe_tiles *t, moe_pack_rows *pack, enum moe_lora_side side,
			  const float *src, int64_t n, int64_t k, int64_t n0, int64_t n1,
			  float scale, void *dst);

/* transpose.c */
void moe_packed_weight_transpose(const struct moe_tiles *t, const struct moe_weight *W, void *dst);
void moe_packed_lora_pack_t(const struct moe_tiles *t, moe_pack_rows *pack, enum moe_lora_side side,
			    const float *src, int64_t n, int64_t k, int64_t n0, int64_t n1,
			    float scale, void *dst);

/* linear.c */
size_t moe_packed_linear_scratch(const struct moe_tiles *t, int m, int64_t n, int64_t k, int r);
void moe_packed_linear(const struct moe_tiles *t, moe_pack_rows *pack, int m,
		       const struct moe_weight *W, int64_t n0, int64_t n1, const float *x,
		       int64_t ldx, const float *bias, const struct moe_lora *lora, float *y,
		       int64_t ldy, void *scratch);
void moe_packed_linear_bwd(const struct moe_tiles *t, moe_pack_rows *pack, int m,
			   const struct moe_weight *W, const float *dy, int64_t lddy,
			   const struct moe_lora *lora, float *dx, int64_t lddx, bool accumulate,
			   void *scratch);
void moe_packed_linear_lora_grad(const struct moe_tiles *t, moe_pack_rows *pack, int m, int64_t n,
				 int64_t k, const float *x, int64_t ldx, const float *dy,
				 int64_t lddy, const struct moe_lora *lora, float *ga, float *gb,
				 void *scratch);
size_t moe_packed_linear_grad_scratch(const struct moe_tiles *t, int m, int64_t n, int64_t k);
void moe_packed_linear_weight_grad(const struct moe_tiles *t, int m, int64_t n, int64_t k,
				   const float *x, int64_t ldx, const float *dy, int64_t lddy,
				   float *g, enum moe_weight_use use, void *scratch);

/* attention.c */
struct moe_attention_ops {
	const struct moe_tiles *tiles;
	moe_to_bf16 *to_bf16;
	moe_pack_rows *pack_rows;
	struct moe_softmax_ops softmax;
};
size_t moe_packed_attention_scratch(const struct moe_tiles *t, int dim);
void moe_packed_attention(const struct moe_attention_ops *ops, const struct moe_attention *a,
			  int q0, int q1, int h0, int h1, void *scratch);
void moe_packed_attention_centre(const struct moe_attention_ops *ops, const struct moe_attention *a,
				 int q0, int q1);
void moe_packed_attention_bwd_q(const struct moe_attention_ops *ops, const struct moe_attention *a,
				int q0, int q1, int h0, int h1, void *scratch);
void moe_packed_attention_bwd_kv(const struct moe_attention_ops *ops, const struct moe_attention *a,
				 int k0, int k1, int g0, int g1, void *scratch);

/* experts.c, experts_bwd.c, expert_grads.c */
size_t moe_packed_expert_scratch(const struct moe_tiles *t, int m, int64_t H, int64_t I, int r,
				 enum moe_compute compute);
void moe_packed_expert_gather(const struct moe_tiles *t, moe_to_bf16 *to_bf16,
			      const struct moe_expert *e, struct moe_expert_rows *w, void *scratch);
void moe_packed_expert_gate_up(const struct moe_tiles *t, const struct moe_expert *e,
			       struct moe_expert_rows *w, int c0, int c1, void *scratch);
void moe_packed_expert_down(const struct moe_tiles *t, const struct moe_expert *e,
			    struct moe_expert_rows *w, int c0, int c1, void *scratch);
void moe_packed_expert_scatter(const struct moe_tiles *t, const struct moe_expert *e,
			       struct moe_expert_rows *w, void *scratch);
void moe_packed_expert_down_bwd(const struct moe_tiles *t, const struct moe_expert *e,
				struct moe_expert_rows *w, const struct moe_expert_grad *g, int c0,
				int c1, void *scratch);
void moe_packed_expert_gate_up_bwd(const struct moe_tiles *t, const struct moe_expert *e,
				   struct moe_expert_rows *w, int c0, int c1, void *scratch);
void moe_packed_expert_lora_grad(const struct moe_tiles *t, const struct moe_expert *e,
				 struct moe_expert_rows *w, const struct moe_expert_grad *g,
				 void *scratch);
void moe_packed_expert_weight_grad(const struct moe_tiles *t, const struct moe_expert *e,
				   struct moe_expert_rows *w, const struct moe_expert_grad *g,
				   void *scratch);

#endif
