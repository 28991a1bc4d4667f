/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch_reader.h"

static enum moe_status read_config(const cJSON *config, struct moe_arch *arch)
{
	bool bias = false, window = false;

	MOE_TRY(moe_arch_read_common(config, 10000.0, arch));
	MOE_TRY(moe_arch_read_experts(config, "moe_intermediate_size", 0.001, arch));
	MOE_TRY(moe_arch_read_sparse_layers(config, arch));
	MOE_TRY(moe_json_opt_bool(config, "norm_topk_prob", &arch->norm_topk_prob));
	MOE_TRY(moe_json_opt_bool(config, "attention_bias", &bias));
	MOE_TRY(moe_json_opt_bool(config, "use_sliding_window", &window));
	arch->qkv_bias = arch->o_bias = bias;
	arch->qk_norm = MOE_QK_NORM_HEAD;
	return moe_arch_check_window(config, window, arch);
}

const struct moe_arch_reader moe_arch_reader_qwen3_moe = {
	.model_type = "qwen3_moe",
	.read = read_config,
};
