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
	.width_pad = 1,
	.rank_pad = 1,
	.panel_bytes = sizeof(float),
	.kept_bytes = sizeof(float),
	.weight_bytes = ref_weight_bytes,
	.weight_pack = ref_weight_pack,
	.weight_repack = ref_weight_repack,
	.weight_unpack = ref_weight_unpack,
	.linear_scratch = ref_linear_scratch,
	.linear = ref_linear,
	.linear_bwd = ref_linear_bwd,
	.linear_lora_grad = ref_linear_lora_grad,
	.linear_grad_scratch = ref_linear_grad_scratch,
	.linear_weight_grad = ref_linear_weight_grad,
	.attention_scratch = ref_attention_scratch,
	.attention = ref_attention,
	.attention_centre = ref_attention_centre,
	.attention_bwd_q = ref_attention_bwd_q,
	.attention_bwd_kv = ref_attention_bwd_kv,
	.expert_scratch = ref_expert_scratch,
	.expert_gather = ref_expert_gather,
	.expert_gate_up = ref_expert_gate_up,
	.expert_down = ref_expert_down,
	.expert_scatter = ref_expert_scatter,
	.expert_down_bwd = ref_expert_down_bwd,
	.expert_gate_up_bwd = ref_expert_gate_up_bwd,
	.expert_lora_grad = ref_expert_lora_grad,
	.expert_weight_grad = ref_expert_weight_grad,
	MOE_ELEMENTWISE_KERNELS,
};
