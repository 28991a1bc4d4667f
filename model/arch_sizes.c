/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of architectures that are estimated only: keys that DeepSeek-V3, Kimi-K2 and GLM-4.5 share. */
#include "model/arch_reader.h"

enum moe_status moe_arch_read_routed(const cJSON *config, struct moe_arch *arch)
{
	int64_t experts, k, shared = 0, dense = 0;

	MOE_TRY(moe_json_int(config, "n_routed_experts", 1, 1 << 16, &experts));
	MOE_TRY(moe_json_int(config, "num_experts_per_tok", 1, experts, &k));
	MOE_TRY(moe_json_int(config, "moe_intermediate_size", 1, INT32_MAX,
			     &arch->moe_intermediate));
	MOE_TRY(moe_json_opt_int(config, "n_shared_experts", 0, 1 << 10, &shared));
	MOE_TRY(moe_json_opt_int(config, "first_k_dense_replace", 0, arch->n_layers, &dense));
	arch->n_experts = (int)experts;
	arch->top_k = (int)k;
	arch->router = "softmax_topk"; /* of the same cost as theirs */
	arch->shared_intermediate = shared * arch->moe_intermediate;
	for (int i = 0; i < arch->n_layers; i++)
		arch->layer_is_moe[i] = i >= dense;
	if (dense)
		MOE_TRY(moe_json_int(config, "intermediate_size", 1, INT32_MAX,
				     &arch->intermediate));
	return MOE_OK;
}

/* Weights of latent attention in one layer, its two norms included. */
static int64_t latent_params(int64_t H, int64_t heads, int64_t q_rank, int64_t kv_rank,
			     int64_t nope, int64_t rope, int64_t v)
{
	int64_t q = heads * (nope + rope);

	q = q_rank ? H * q_rank + q_rank + q_rank * q : H * q;
	return q + H * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + v) + heads * v * H;
}

enum moe_status moe_arch_read_deepseek(const cJSON *config, struct moe_arch *arch)
{
	int64_t q_rank = 0, kv_rank, nope, rope, v, plain;

	MOE_TRY(moe_arch_read_sizes(config, arch));
	MOE_TRY(moe_arch_read_routed(config, arch));
	MOE_TRY(moe_json_opt_int(config, "q_lora_rank", 1, INT32_MAX, &q_rank));
	MOE_TRY(moe_json_int(config, "kv_lora_rank", 1, INT32_MAX, &kv_rank));
	MOE_TRY(moe_json_int(config, "qk_nope_head_dim", 1, 1 << 16, &nope));
	MOE_TRY(moe_json_int(config, "qk_rope_head_dim", 1, 1 << 16, &rope));
	MOE_TRY(moe_json_int(config, "v_head_dim", 2, 1 << 16, &v));
	arch->head_dim = (int)(v - v % 2);
	arch->n_kv_heads = arch->n_heads;
	plain = 4 * (int64_t)arch->n_heads * arch->head_dim * arch->hidden;
	arch->attention_params_more =
		arch->n_layers *
		(latent_params(arch->hidden, arch->n_heads, q_rank, kv_rank, nope, rope, v) -
		 plain);
	return MOE_OK;
}
