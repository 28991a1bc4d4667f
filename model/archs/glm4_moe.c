/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch_reader.h"

static enum moe_status read_config(const cJSON *config, struct moe_arch *arch)
{
	bool norm = false;

	MOE_TRY(moe_arch_read_sizes(config, arch));
	MOE_TRY(moe_arch_read_routed(config, arch));
	MOE_TRY(moe_json_opt_bool(config, "attention_bias", &arch->qkv_bias));
	MOE_TRY(moe_json_opt_bool(config, "use_qk_norm", &norm));
	arch->qk_norm = norm ? MOE_QK_NORM_HEAD : MOE_QK_NORM_NONE;
	return MOE_OK;
}

const struct moe_arch_reader moe_arch_reader_glm4_moe = {
	.model_type = "glm4_moe",
	.estimate_only = "partial rotary embedding and the sigmoid router",
	.read = read_config,
};
