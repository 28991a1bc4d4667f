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
	MOE_ADAPTER_ROUTER,
	MOE_ADAPTER_SHARED_GATE, /* the sigmoid gate of the shared expert */
	MOE_ADAPTER_SHARED_FFN,	 /* gate, up and down of the shared expert */
	MOE_ADAPTER_DENSE_FFN = MOE_ADAPTER_SHARED_FFN + 3, /* the same of a layer without experts */
	MOE_ADAPTER_TARGETS = MOE_ADAPTER_DENSE_FFN + 3
};
#define MOE_ADAPTER_ATTENTION MOE_ADAPTER_EXPERTS /* targets below it */

/*
 * What one layer's matrix, or all its routed experts, get. Arrays are borrowed when the caller
 * fills the struct, and parts of `block` when a reader does. E experts, H hidden, I intermediate.
 * Experts: rank r and alpha are those of down, R and gate_up_alpha those of gate and of up, or of
 * the A that both share. A rank of 0: these matrices are not adapted, and have no arrays.
 */
struct moe_adapter_entry {
	int layer;
	enum moe_adapter_target target;
	int64_t rank;
	double alpha;
	/* single matrices */
	int64_t in, out;
	float *a; /* [rank, in] */
	float *b; /* [out, rank] */
	/* MOE_ADAPTER_ROUTER: not LoRA but the weight itself (PEFT's modules_to_save), [out, in]; then rank 0 */
	float *weight;
	/* MOE_ADAPTER_EXPERTS */
	int64_t gate_up_rank;
	double gate_up_alpha;
	int64_t n_experts, hidden, intermediate;
	float *gate_a; /* [E, R, H] */
	float *up_a;   /* [E, R, H]; with share_a NULL or gate_a */
	float *down_a; /* [E, r, I] */
	float *gate_b; /* [E, I, R] */
	float *up_b;   /* [E, I, R] */
	float *down_b; /* [E, H, r] */
	void *block;
};

struct moe_adapter {
	int64_t rank; /* the configuration's defaults; entries have their own */
	double alpha;
	double dropout; /* of training; forms write it where no expert is adapted */
	bool rslora;
	bool share_a; /* gate and up of an expert use one A */
	/* Not every layer that has the target is adapted: a form must name the layers. */
	bool partial[MOE_ADAPTER_TARGETS];
	bool mixtral;	  /* experts are called block_sparse_moe.experts.N.w1, w3, w2 */
	char *base_model; /* name or path of the base model; NULL: unknown */
	const char *form; /* readers: the name of the form that it was read from */
	size_t n_entries;
	struct moe_adapter_entry *entries; /* readers: ascending by layer, then target */
};

/* Releases an adapter that a reader made (NULL accepted). */
void moe_adapter_free(struct moe_adapter *adapter);

/* PEFT's name of a target: "q_proj", ..., "experts", "gate", "shared_expert_gate". */
const char *moe_adapter_target_name(enum moe_adapter_target target);
/* Where it lies in a layer: "self_attn.q_proj", "mlp.experts", ... */
const char *moe_adapter_target_module(enum moe_adapter_target target);
/* Its weight in a checkpoint; of experts the fused gate and up. */
enum moe_role moe_adapter_target_role(enum moe_adapter_target target);
double moe_lora_scaling(bool rslora, int64_t rank, double alpha);
/* The alpha that gives a scaling at a rank. */
double moe_lora_alpha(bool rslora, int64_t rank, double scaling);
/* Of a single matrix, or of down. */
double moe_adapter_scaling(const struct moe_adapter *adapter,
			   const struct moe_adapter_entry *entry);
double moe_adapter_gate_up_scaling(const struct moe_adapter *adapter,
				   const struct moe_adapter_entry *entry);
/* The entry of a layer and target, NULL if it has none. */
const struct moe_adapter_entry *moe_adapter_find(const struct moe_adapter *adapter, int layer,
						 enum moe_adapter_target target);
/* Trainable values: those of all A and B. */
int64_t moe_adapter_count_params(const struct moe_adapter *adapter);
/* One past the highest layer. */
int moe_adapter_layers(const struct moe_adapter *adapter);
/*
 * Memory for an experts entry whose sizes and ranks are filled in, zeroed; with share_a up_a is
 * gate_a. MOE_ERR_NOMEM.
 */
enum moe_status moe_adapter_alloc_experts(struct moe_adapter_entry *e, bool share_a);
/*
 * MOE_ERR_ARG unless every entry is complete: known target, arrays, sizes, finite alphas. Writers
 * call it first.
 */
enum moe_status moe_adapter_validate(const struct moe_adapter *adapter);

/*
 * MOE_ERR_FORMAT naming module, shapes and the base model that the adapter names, if an entry does
 * not fit the model.
 */
enum moe_status moe_adapter_check(const struct moe_adapter *adapter, const struct moe_arch *arch);

#endif
