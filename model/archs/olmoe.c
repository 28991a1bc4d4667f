/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch_reader.h"

static enum moe_status read_config(const cJSON *config, struct moe_arch *arch)
{
	bool bias = false;

	MOE_TRY(moe_arch_read_common(config, 10000.0, arch));
	MOE_TRY(moe_arch_read_experts(config, "intermediate_size", 0.01, arch));
	MOE_TRY(moe_json_opt_bool(config, "norm_topk_prob", &arch->norm_topk_prob));
	MOE_TRY(moe_json_opt_bool(config, "attention_bias", &bias));
	if (moe_json_get(config, "clip_qkv"))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"clip_qkv is set: clipping of q, k and v is not "
				"implemented");
	/* transformers sizes the q norm by hidden_size */
	if ((int64_t)arch->n_heads * arch->head_dim != arch->hidden)
		return moe_fail(MOE_ERR_FORMAT,
				"num_attention_heads %d x head_dim %d is not hidden_size %lld",
				arch->n_heads, arch->head_dim, (long long)arch->hidden);
	arch->qkv_bias = arch->o_bias = bias;
	arch->qk_norm = MOE_QK_NORM_FULL;
	return MOE_OK;
}

const struct moe_arch_reader moe_arch_reader_olmoe = {
	.model_type = "olmoe",
	.read = read_config,
};
