/* SPDX-License-Identifier: Apache-2.0 */
/* The reference table: portable C over OpenBLAS sgemm, f32 throughout. Exact, not fast. */
#include "codelets/kernels/ref/ref.h"

static bool always(void)
{
	return true;
}

extern const struct moe_kernels moe_kernels_ref;
const struct moe_kernels moe_kernels_ref = {
	.name = "ref",
	.rank = 0,
	.supported = always,
	.peak = NULL, /* OpenBLAS chooses its instructions itself */
	.weight_bytes = ref_weight_bytes,
	.weight_pack = ref_weight_pack,
	.weight_unpack = ref_weight_unpack,
	.linear_scratch = ref_linear_scratch,
	.linear = ref_linear,
	.linear_bwd = ref_linear_bwd,
	.linear_lora_grad = ref_linear_lora_grad,
	.linear_weight_grad = ref_linear_weight_grad,
	.rmsnorm = ref_rmsnorm,
	.rmsnorm_bwd = ref_rmsnorm_bwd,
	.rope = ref_rope,
	.swiglu = ref_swiglu,
	.swiglu_bwd = ref_swiglu_bwd,
	.attention_scratch = ref_attention_scratch,
	.attention = ref_attention,
	.attention_bwd_q = ref_attention_bwd_q,
	.attention_bwd_kv = ref_attention_bwd_kv,
	.ce_partial = ref_ce_partial,
	.ce_bwd = ref_ce_bwd,
	.expert_scratch = ref_expert_scratch,
	.expert_gather = ref_expert_gather,
	.expert_gate_up = ref_expert_gate_up,
	.expert_down = ref_expert_down,
	.expert_scatter = ref_expert_scatter,
	.expert_down_bwd = ref_expert_down_bwd,
	.expert_gate_up_bwd = ref_expert_gate_up_bwd,
	.expert_lora_grad = ref_expert_lora_grad,
	.expert_weight_grad = ref_expert_weight_grad,
	.sum_squares = ref_sum_squares,
	.adamw = ref_adamw,
};
