/* SPDX-License-Identifier: Apache-2.0 */
/* What a file of model/archs/ provides, and what it may share with the others. */
#ifndef MOE_MODEL_ARCH_READER_H
#define MOE_MODEL_ARCH_READER_H

#include "model/arch.h"
#include "model/json.h"

#define MOE_NAME_VARIANTS 4

/* Names of one tensor, in the order of trying; {L} is the layer, {E} the expert. NULL ends. */
struct moe_role_names {
	const char *names[MOE_NAME_VARIANTS];
};

/*
 * One architecture. read fills an arch that is zeroed but for name, reader, rope defaults and ids;
 * keys that are absent from config take transformers' defaults where it has harmless ones.
 * names: indexed by role; a role without names there takes the common ones (model/arch.c).
 */
struct moe_arch_reader {
	const char *model_type;
	/* NULL, or what training it lacks: then only an estimate opens it, and shapes may stand in for
	 * what is not implemented. */
	const char *estimate_only;
	enum moe_status (*read)(const cJSON *config, struct moe_arch *arch);
	const struct moe_role_names *names; /* MOE_ROLE_COUNT entries, or NULL */
};

/* The registry generated from model/archs/; NULL ends. */
extern const struct moe_arch_reader *const moe_arch_reader_list[];

/*
 * The keys that every Llama-like config.json has: vocab_size, hidden_size, num_hidden_layers,
 * num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rms_norm_eps,
 * max_position_embeddings, tie_word_embeddings, hidden_act, swiglu_limit, token ids and rotary embedding
 * (rope_parameters, or rope_theta with rope_scaling; default_theta if neither gives one).
 */
enum moe_status moe_arch_read_common(const cJSON *config, double default_theta,
				     struct moe_arch *arch);
/* quantization_config, if there is one. MOE_ERR_FORMAT, MOE_ERR_UNSUPPORTED: what it names cannot be read. */
enum moe_status moe_arch_check_quantisation(const cJSON *config);
/* num_experts (or num_local_experts), num_experts_per_tok, router_aux_loss_coef, key for the size.
 */
enum moe_status moe_arch_read_experts(const cJSON *config, const char *intermediate_key,
				      double default_aux, struct moe_arch *arch);
/*
 * For estimates of architectures that are not trained yet: sizes only. Attention of hidden_size, heads and
 * head_dim as the config has them; what else it says of positions and quantisation is not looked at.
 */
enum moe_status moe_arch_read_sizes(const cJSON *config, struct moe_arch *arch);
/*
 * DeepSeek-V3 and its kin: latent attention (counted exactly, planned as plain heads), n_routed_experts,
 * n_shared_experts, first_k_dense_replace.
 */
enum moe_status moe_arch_read_deepseek(const cJSON *config, struct moe_arch *arch);
/* n_routed_experts, num_experts_per_tok, n_shared_experts, first_k_dense_replace. */
enum moe_status moe_arch_read_routed(const cJSON *config, struct moe_arch *arch);
/* Qwen's mlp_only_layers and decoder_sparse_step; needs n_layers and n_experts. */
enum moe_status moe_arch_read_sparse_layers(const cJSON *config, struct moe_arch *arch);
/*
 * sliding_window, when enabled: MOE_ERR_UNSUPPORTED if a sequence of max_positions would feel it.
 */
enum moe_status moe_arch_check_window(const cJSON *config, bool enabled,
				      const struct moe_arch *arch);

#endif
