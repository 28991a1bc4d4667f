/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch_reader.h"

static enum moe_status read_config(const cJSON *config, struct moe_arch *arch)
{
	int64_t biases;

	MOE_TRY(moe_arch_read_sizes(config, arch));
	MOE_TRY(moe_arch_read_experts(config, "intermediate_size", 0.9, arch));
	arch->qkv_bias = arch->o_bias = true;
	/* of gate, up and down of each expert, and of the router */
	biases = arch->n_experts * (2 * arch->moe_intermediate + arch->hidden + 1);
	arch->expert_params_more = arch->n_layers * biases;
	arch->attention_params_more = (int64_t)arch->n_layers * arch->n_heads; /* sinks */
	return MOE_OK;
}

const struct moe_arch_reader moe_arch_reader_gpt_oss = {
	.model_type = "gpt_oss",
	.estimate_only = "attention sinks, sliding windows and its clamped SwiGLU",
	.read = read_config,
};
