/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A LoRA adapter in memory, independent of the form it has on disk. W_eff = W + scaling * B A with
 * scaling = alpha / rank, or alpha / sqrt(rank) with rslora. All arrays are f32, row-major.
 */
#ifndef MOE_MODEL_ADAPTERS_ADAPTER_H
#define MOE_MODEL_ADAPTERS_ADAPTER_H

#include "model/arch.h"

enum moe_adapter_target {
	MOE_ADAPTER_Q = 0,
	MOE_ADAPTER_K,
	MOE_ADAPTER_V,
	MOE_ADAPTER_O,
	MOE_ADAPTER_EXPERTS,
	MOE_ADAPTER_TARGETS
};

/*
 * What one layer's projection, or all its routed experts, get. Arrays are borrowed when the caller
 * fills the struct, and parts of `block` when a reader does. E experts, H hidden, I intermediate.
 */
struct moe_adapter_entry {
	int layer;
	enum moe_adapter_target target;
	int64_t rank;
	double alpha;
	/* attention targets */
	int64_t in, out;
	float *a; /* [rank, in] */
	float *b; /* [out, rank] */
	/* MOE_ADAPTER_EXPERTS */
	int64_t n_experts, hidden, intermediate;
	float *gate_a; /* [E, rank, H] */
	float *up_a;   /* [E, rank, H]; with share_a NULL or gate_a */
	float *down_a; /* [E, rank, I] */
	float *gate_b; /* [E, I, rank] */
	float *up_b;   /* [E, I, rank] */
	float *down_b; /* [E, H, rank] */
	void *block;
};

struct moe_adapter {
	int64_t rank; /* the configuration's defaults; entries have their own */
	double alpha;
	bool rslora;
	bool share_a;	  /* gate and up of an expert use one A */
	char *base_model; /* name or path of the base model; NULL: unknown */
	size_t n_entries;
	struct moe_adapter_entry *entries; /* readers: ascending by layer, then target */
};

/* Releases an adapter that a reader made (NULL accepted). */
void moe_adapter_free(struct moe_adapter *adapter);

/* PEFT's name of a target: "q_proj", ..., "experts". */
const char *moe_adapter_target_name(enum moe_adapter_target target);
double moe_adapter_scaling(const struct moe_adapter *adapter,
			   const struct moe_adapter_entry *entry);
/* The entry of a layer and target, NULL if it has none. */
const struct moe_adapter_entry *moe_adapter_find(const struct moe_adapter *adapter, int layer,
						 enum moe_adapter_target target);
int64_t moe_adapter_count_params(const struct moe_adapter *adapter);

/* MOE_ERR_FORMAT naming layer and target if an entry does not fit the model. */
enum moe_status moe_adapter_check(const struct moe_adapter *adapter, const struct moe_arch *arch);

#endif
