/* SPDX-License-Identifier: Apache-2.0 */
/* config.json of a small decoder of each architecture, with what they differ in, for ref_create. */
#ifndef MOE_TESTS_MODEL_CONFIGS_H
#define MOE_TESTS_MODEL_CONFIGS_H

#include "tests/model_reference.h"

#define COMMON                                                                                     \
	"\"hidden_size\":24,\"num_attention_heads\":4,\"num_hidden_layers\":3,"                    \
	"\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\",\"max_position_embeddings\":256,"           \
	"\"rope_theta\":500.0,"

/* layer 1 dense, q, k, v biases, shared experts, tied embeddings */
static const char qwen2_moe[] =
	"{\"model_type\":\"qwen2_moe\"," COMMON
	"\"vocab_size\":97,\"num_key_value_heads\":2,\"intermediate_size\":40,"
	"\"moe_intermediate_size\":20,\"shared_expert_intermediate_size\":28,\"num_experts\":6,"
	"\"num_experts_per_tok\":3,\"decoder_sparse_step\":1,\"mlp_only_layers\":[1],"
	"\"norm_topk_prob\":false,\"tie_word_embeddings\":true,\"qkv_bias\":true}";
/* head norms, biases, two chunks of vocabulary; layer 0 dense */
static const char qwen3_moe[] =
	"{\"model_type\":\"qwen3_moe\"," COMMON
	"\"vocab_size\":4103,\"num_key_value_heads\":1,\"head_dim\":8,\"intermediate_size\":31,"
	"\"moe_intermediate_size\":20,\"num_experts\":5,\"num_experts_per_tok\":2,"
	"\"decoder_sparse_step\":1,\"mlp_only_layers\":[0],\"norm_topk_prob\":true,"
	"\"attention_bias\":true,\"tie_word_embeddings\":false}";
/* norms of whole projections */
static const char olmoe[] = "{\"model_type\":\"olmoe\"," COMMON
			    "\"vocab_size\":61,\"num_key_value_heads\":2,\"intermediate_size\":20,"
			    "\"num_experts\":4,\"num_experts_per_tok\":2,\"norm_topk_prob\":false,"
			    "\"tie_word_embeddings\":false}";
static const char mixtral[] =
	"{\"model_type\":\"mixtral\"," COMMON
	"\"vocab_size\":61,\"num_key_value_heads\":4,\"intermediate_size\":20,"
	"\"num_local_experts\":4,\"num_experts_per_tok\":2,\"tie_word_embeddings\":false}";

static const struct {
	const char *name, *config;
} model_configs[] = {
	{ "qwen2_moe", qwen2_moe },
	{ "qwen3_moe", qwen3_moe },
	{ "olmoe", olmoe },
	{ "mixtral", mixtral },
};

#endif
