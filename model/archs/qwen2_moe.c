/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch_reader.h"

static enum moe_status read_config(const cJSON *config, struct moe_arch *arch)
{
	bool window = false;

	arch->qkv_bias =
		true; /* Qwen1.5-MoE and Qwen2-MoE files omit the key and have the biases */
	MOE_TRY(moe_arch_read_common(config, 10000.0, arch));
	MOE_TRY(moe_arch_read_experts(config, "moe_intermediate_size", 0.001, arch));
	MOE_TRY(moe_arch_read_sparse_layers(config, arch));
	MOE_TRY(moe_json_opt_bool(config, "norm_topk_prob", &arch->norm_topk_prob));
	MOE_TRY(moe_json_opt_bool(config, "qkv_bias", &arch->qkv_bias));
	MOE_TRY(moe_json_opt_bool(config, "use_sliding_window", &window));
	if (arch->n_experts)
		MOE_TRY(moe_json_int(config, "shared_expert_intermediate_size", 1, INT32_MAX,
				     &arch->shared_intermediate));
	arch->shared_gate = true;
	return moe_arch_check_window(config, window, arch);
}

const struct moe_arch_reader moe_arch_reader_qwen2_moe = {
	.model_type = "qwen2_moe",
	.read = read_config,
};
