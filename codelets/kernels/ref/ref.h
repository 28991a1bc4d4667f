/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ops of the reference table (contracts in codelets/kernels/kernels.h), by the file that owns
 * them. Other tables may take those they don't replace from here.
 */
#ifndef MOE_CODELETS_KERNELS_REF_REF_H
#define MOE_CODELETS_KERNELS_REF_REF_H

#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/ref/gemm.h"

/* gemm.c */
size_t ref_weight_bytes(enum moe_dtype src, int64_t n, int64_t k, enum moe_weight_use use);
void ref_weight_pack(struct moe_weight *W, const void *src, enum moe_dtype src_dtype, int64_t n,
		     int64_t k, int64_t ld, enum moe_weight_use use);
void ref_weight_repack(const struct moe_weight *W, const float *src, int64_t n0, int64_t n1);
void ref_weight_unpack(const struct moe_weight *W, int64_t n0, int64_t n1, float *dst);

/* linear.c */
size_t ref_linear_scratch(int m, int64_t n, int64_t k, int r);
void ref_linear(int m, const struct moe_weight *W, int64_t n0, int64_t n1, const float *x,
		int64_t ldx, const float *bias, const struct moe_lora *lora, float *y, int64_t ldy,
		void *scratch);
void ref_linear_bwd(int m, const struct moe_weight *W, const float *dy, int64_t lddy,
		    const struct moe_lora *lora, float *dx, int64_t lddx, bool accumulate,
		    void *scratch);
void ref_linear_lora_grad(int m, int64_t n, int64_t k, const float *x, int64_t ldx, const float *dy,
			  int64_t lddy, const struct moe_lora *lora, float *ga, float *gb,
			  void *scratch);
size_t ref_linear_grad_scratch(int m, int64_t n, int64_t k);
void ref_linear_weight_grad(int m, int64_t n, int64_t k, const float *x, int64_t ldx,
			    const float *dy, int64_t lddy, float *g, enum moe_weight_use use,
			    void *scratch);

/* attention.c */
size_t ref_attention_scratch(int dim);
void ref_attention(const struct moe_attention *a, int q0, int q1, int h0, int h1, void *scratch);
void ref_attention_centre(const struct moe_attention *a, int q0, int q1);
void ref_attention_bwd_q(const struct moe_attention *a, int q0, int q1, int h0, int h1,
			 void *scratch);
void ref_attention_bwd_kv(const struct moe_attention *a, int k0, int k1, int g0, int g1,
			  void *scratch);

/* experts.c */
size_t ref_expert_scratch(int m, int64_t H, int64_t I, int r, enum moe_compute compute);
void ref_expert_gather(const struct moe_expert *e, struct moe_expert_rows *w, void *scratch);
void ref_expert_gate_up(const struct moe_expert *e, struct moe_expert_rows *w, int c0, int c1,
			void *scratch);
void ref_expert_down(const struct moe_expert *e, struct moe_expert_rows *w, int c0, int c1,
		     void *scratch);
void ref_expert_scatter(const struct moe_expert *e, struct moe_expert_rows *w, void *scratch);
void ref_expert_down_bwd(const struct moe_expert *e, struct moe_expert_rows *w,
			 const struct moe_expert_grad *g, int c0, int c1, void *scratch);
void ref_expert_gate_up_bwd(const struct moe_expert *e, struct moe_expert_rows *w, int c0, int c1,
			    void *scratch);
void ref_expert_lora_grad(const struct moe_expert *e, struct moe_expert_rows *w,
			  const struct moe_expert_grad *g, void *scratch);
void ref_expert_weight_grad(const struct moe_expert *e, struct moe_expert_rows *w,
			    const struct moe_expert_grad *g, void *scratch);

#endif
