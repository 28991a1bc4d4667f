/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch_reader.h"

static enum moe_status read_config(const cJSON *config, struct moe_arch *arch)
{
	MOE_TRY(moe_arch_read_common(config, 1e6, arch));
	MOE_TRY(moe_arch_read_experts(config, "intermediate_size", 0.001, arch));
	arch->norm_topk_prob = true; /* no key: Mixtral's router always normalises */
	return moe_arch_check_window(config, true, arch);
}

/* Hub checkpoints say block_sparse_moe; transformers 5 calls the module mlp in memory. */
static const struct moe_role_names names[MOE_ROLE_COUNT] = {
	[MOE_ROLE_ROUTER] = { { "model.layers.{L}.block_sparse_moe.gate.weight",
				"model.layers.{L}.mlp.gate.weight" } },
	[MOE_ROLE_EXPERT_GATE] = { { "model.layers.{L}.block_sparse_moe.experts.{E}.w1.weight",
				     "model.layers.{L}.mlp.experts.{E}.w1.weight",
				     "model.layers.{L}.mlp.experts.{E}.gate_proj.weight" } },
	[MOE_ROLE_EXPERT_UP] = { { "model.layers.{L}.block_sparse_moe.experts.{E}.w3.weight",
				   "model.layers.{L}.mlp.experts.{E}.w3.weight",
				   "model.layers.{L}.mlp.experts.{E}.up_proj.weight" } },
	[MOE_ROLE_EXPERT_DOWN] = { { "model.layers.{L}.block_sparse_moe.experts.{E}.w2.weight",
				     "model.layers.{L}.mlp.experts.{E}.w2.weight",
				     "model.layers.{L}.mlp.experts.{E}.down_proj.weight" } },
	[MOE_ROLE_EXPERTS_GATE_UP] = { { "model.layers.{L}.mlp.experts.gate_up_proj",
					 "model.layers.{L}.block_sparse_moe.experts.gate_up_proj",
					 "model.layers.{L}.mlp.experts.gate_up_proj.weight" } },
	[MOE_ROLE_EXPERTS_DOWN] = { { "model.layers.{L}.mlp.experts.down_proj",
				      "model.layers.{L}.block_sparse_moe.experts.down_proj",
				      "model.layers.{L}.mlp.experts.down_proj.weight" } },
};

const struct moe_arch_reader moe_arch_reader_mixtral = {
	.model_type = "mixtral",
	.read = read_config,
	.names = names,
};
