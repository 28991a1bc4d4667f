/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An adapter's tensors sorted by place: what forms read from. Names are PEFT's,
 * [base_model.model.]model.layers.N.<module>.lora_A.weight and lora_B. Private to model/adapters/.
 */
#ifndef MOE_MODEL_ADAPTERS_ADAPTER_INPUT_H
#define MOE_MODEL_ADAPTERS_ADAPTER_INPUT_H

#include "model/adapters/adapter_config.h"
#include "model/readers/safetensors.h"

#define MOE_ADAPTER_FILE "adapter_model.safetensors"
#define MOE_ADAPTER_CONFIG_FILE "adapter_config.json"
#define MOE_ADAPTER_KT_FILE "fused_expert_lora.safetensors"

/* Projections of an expert. */
enum { MOE_ADAPTER_GATE, MOE_ADAPTER_UP, MOE_ADAPTER_DOWN, MOE_ADAPTER_PROJECTIONS };

struct moe_adapter_pair {
	const struct moe_st_tensor *a, *b; /* NULL: absent */
	const struct moe_st_tensor *weight; /* of a router in modules_to_save */
};

struct moe_adapter_layer {
	struct moe_adapter_pair matrix[MOE_ADAPTER_TARGETS]; /* not [MOE_ADAPTER_EXPERTS] */
	/* PEFT's nested wrappers of fused experts: "experts", and "experts.base_layer" in it */
	struct moe_adapter_pair outer, inner;
	/* experts by number */
	int n_experts;
	struct moe_adapter_pair (*expert)[MOE_ADAPTER_PROJECTIONS];
};

struct moe_adapter_input {
	char *dir;
	struct moe_adapter_config config;
	struct moe_safetensors *file, *kt; /* kt: NULL without the file */
	struct moe_adapter *adapter;
	int n_layers;
	struct moe_adapter_layer *layer; /* [MOE_ARCH_MAX_LAYERS] */
};

/* "'name'" of one of the pair's tensors is missing its partner, or not a matrix, or they do not
 * fit. */
enum moe_status moe_adapter_check_pair(const struct moe_adapter_pair *pair);
static inline bool moe_adapter_has(const struct moe_adapter_pair *pair)
{
	return pair->a || pair->b || pair->weight;
}
/* All of t as f32. MOE_ERR_UNSUPPORTED: another dtype. */
enum moe_status moe_adapter_to_f32(const struct moe_st_tensor *t, float *out);

#endif
