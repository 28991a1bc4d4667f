/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model object: architecture, decoder with its LoRA, tensors, slots. Private to api/; whoever
 * submits passes (trainer, evaluation, generation) holds the model with moe_model_enter.
 */
#ifndef MOE_API_MODEL_H
#define MOE_API_MODEL_H

#include "graphs/decoder.h"
#include "model/adapters/adapter.h"
#include "model/arch.h"
#include "model/quantised.h"
#include "model/readers/safetensors.h"

#include <stdatomic.h>

#define MOE_MODEL_SLOTS 16

/*
 * LoRA as asked for. rank 0: the target is adapted nowhere. The experts' rank and alpha are what
 * the engine computes with; gate_up_rank and down_rank (0: not adapted) are at most that, and A and
 * B are 0 beyond them, which no gradient changes.
 */
struct moe_lora_plan {
	int rank[MOE_ADAPTER_TARGETS];
	double alpha[MOE_ADAPTER_TARGETS];
	bool on[MOE_ADAPTER_TARGETS][MOE_ARCH_MAX_LAYERS];
	bool partial[MOE_ADAPTER_TARGETS]; /* not in every layer that could have it */
	int gate_up_rank, down_rank;
	bool share_a, rslora;
	bool router_weights; /* the adapter has the routers' weights themselves */
};

/* LoRA of a router, folded into its weight: W = base + scale B A in f32, which is small. */
struct moe_folded_lora {
	int64_t n, k;
	int r; /* 0: not adapted */
	float scale;
	float *a, *b, *base; /* [r, k], [n, r], [n, k] */
	struct moe_router_lora *trained; /* its values are a and b; NULL: frozen */
};

/* Bytes. What is not of the slots is counted before they are chosen. */
struct moe_memory_plan {
	int64_t weights, trained; /* allocations for good: weights with copies; adapter, gradients, moments, masters */
	int64_t scratch, runtime; /* of workers; handles and live tasks */
	int64_t process, loading, saving;
	int64_t slot; /* with its handles */
	int64_t total, wanted, allowed;
	int slots, lowest, recomputed; /* from the lowest trained layer on */
	bool limited; /* allowed was asked for, else it is what the machine has */
};

struct moe_model {
	struct moe_engine *engine;
	struct moe_model_params params; /* dir and adapter owned; defaults filled in */
	struct moe_arch arch;
	struct moe_lora_plan lora;
	struct moe_folded_lora *folded; /* [layers], of routers; NULL: none are adapted */
	struct moe_decoder decoder;
	struct moe_decoder_tensors tensors;
	struct moe_decoder_slot slot[MOE_MODEL_SLOTS];
	int n_slots;
	struct moe_memory_plan plan;
	int group_size; /* experts per task */
	const struct moe_format *convert; /* params.weights, or NULL */
	bool expand;			  /* quantised experts become bf16 */
	const struct moe_format *format;  /* of the experts, NULL: plain */
	struct moe_backward_choice backward;
	char backward_text[32];
	struct moe_ticket *ticket; /* of evaluation and logits */
	atomic_flag busy;
	const char *output_dir; /* of the training that is running: not owned */
	char *written;		/* where moe_model_write_checkpoint left the weights last; NULL: nowhere */
	int64_t slice_elements; /* of arrays that are trained whole */
	int64_t text; /* tokens whose keys and values slot 0 has */
	int64_t non_finite;
	double load_seconds, touch_seconds;
	int64_t touched_bytes;
};

/* ---- whole training: api/model_full.c ---- */

/* Whether a role's weights are trained themselves. */
bool moe_model_trains(const struct moe_model *m, enum moe_role role);
/* The dtype that weights of a role are packed from; loaded: the checkpoint's. */
enum moe_dtype moe_model_packed_dtype(const struct moe_model *m, enum moe_role role,
				      enum moe_dtype loaded);
/* What cannot be had with params.method, before anything is loaded. */
enum moe_status moe_model_check_method(const struct moe_model *m);
/* The lists of what is trained; they stay empty until memory is taken. */
enum moe_status moe_model_shape_trained(struct moe_model *m);
/* A role's array, or chunk of the vocabulary; NULL: it is not trained, or belongs to the experts. */
struct moe_trained *moe_model_trained(const struct moe_model *m, enum moe_role role, int layer, int chunk);
/* Its memory; weight (NULL: a vector) is [rows, cols], coded: quantised. */
enum moe_status moe_model_alloc_trained(struct moe_model *m, enum moe_role role, int layer, int chunk,
					struct moe_weight *weight, float *vector, int64_t rows,
					int64_t cols, int part, bool coded);
void moe_model_free_trained(struct moe_model *m);
/* Of experts: key of the layer for stochastic rounding. */
uint64_t moe_model_rounding_key(const struct moe_model *m, enum moe_role role, int layer);
int64_t moe_model_whole_params(const struct moe_model *m);
/* moe_model_save for whoever is inside. */
enum moe_status moe_model_write_checkpoint(struct moe_model *m, const char *dir);

enum moe_status moe_model_enter(struct moe_model *m);
void moe_model_leave(struct moe_model *m);
struct moe_decoder_pass moe_model_pass(struct moe_model *m, int slot, const struct moe_batch *batch);

/*
 * At least `slots` slots for at least T tokens; replaces them (and waits) only where they are
 * smaller. Documents may then have up to min(T, max_positions) tokens. Called by whoever is inside.
 */
enum moe_status moe_model_reserve(struct moe_model *m, int T, int slots);
/* moe_model_save_adapter for whoever is inside, in the model's form. Waits. */
enum moe_status moe_model_write_adapter(struct moe_model *m, const char *dir);

/* ---- between api/model*.c ---- */

/* Targets, ranks and alphas from the parameters or the adapter (may be NULL). */
enum moe_status moe_model_plan_lora(struct moe_model *m, const struct moe_adapter *adapter);
/* Trainable values of the plan, and whether layer has target (plan and architecture). */
struct moe_lora_count {
	int64_t attention, router, shared, dense, experts;
};
struct moe_lora_count moe_model_count_lora(const struct moe_model *m);
static inline int moe_lora_rank(const struct moe_lora_plan *p, enum moe_adapter_target t, int layer)
{
	return p->on[t][layer] ? p->rank[t] : 0;
}
/* The decoder's shape without memory for weights. */
enum moe_status moe_model_shape(struct moe_model *m);
/* What the backward multiplies by. memory: bytes that are left for copies, < 0: any. */
enum moe_status moe_model_choose_backward(struct moe_model *m, int64_t memory);
/*
 * Counts what opening will take by doing it on a dry engine, and chooses what fits: copies for the backward, slots,
 * layers that recompute. MOE_ERR_NOFIT: nothing does (on a dry engine: the least is chosen). st NULL: weights as BF16.
 */
enum moe_status moe_model_plan_memory(struct moe_model *m, const struct moe_safetensors *st);
/* The same for slots of T tokens, at least `slots`, once weights are there; chooses again. */
enum moe_status moe_model_plan_slots(struct moe_model *m, int T, int slots);
/* Marks the layers that recompute; no slot may exist. */
void moe_model_apply_plan(struct moe_model *m);
/* Tensors of the decoder, the ring of the backward's weights; what workers need for max_tokens. */
enum moe_status moe_model_make_tensors(struct moe_model *m);
enum moe_status moe_model_reserve_scratch(struct moe_model *m);
/* Submits one step of documents of n tokens in micro-batches of T, on a dry engine with a slot. */
enum moe_status moe_model_count_step(struct moe_model *m, int T, int n, int micro_batches);
void moe_model_free_decoder(struct moe_model *m);
/* Weights from the checkpoint (st NULL, on a dry engine: their memory only), LoRA initialised. */
enum moe_status moe_model_make_rope(struct moe_model *m);
enum moe_status moe_model_load_weights(struct moe_model *m, const struct moe_safetensors *st);
enum moe_status moe_model_init_lora(struct moe_model *m);
/* api/model_folded.c: memory and base, once the weights are there (st NULL: memory only). */
enum moe_status moe_model_make_folded(struct moe_model *m, const struct moe_safetensors *st);
/* Values of A and B, then all W. */
enum moe_status moe_model_fold(struct moe_model *m);
void moe_model_free_folded(struct moe_model *m);
/* Of the MLP in a layer, for the targets of shared experts, their gate and dense MLPs. */
static inline enum moe_ffn_matrix moe_ffn_matrix_of(enum moe_adapter_target t)
{
	return t == MOE_ADAPTER_SHARED_GATE ? MOE_FFN_SIGMOID
					    : (enum moe_ffn_matrix)((t - MOE_ADAPTER_SHARED_FFN) % 3);
}
enum moe_status moe_model_set_adapter(struct moe_model *m, const struct moe_adapter *adapter);
/* The tensor of a role, whichever name it has. Absent: MOE_ERR_FORMAT naming it. */
enum moe_status moe_model_find(const struct moe_model *m, const struct moe_safetensors *st,
			       enum moe_role role, int layer, int expert,
			       const struct moe_st_tensor **out);
/* The same of quantised tensors. *found: there are some. A plain float tensor of the name goes first. */
enum moe_status moe_model_find_quantised(const struct moe_model *m, const struct moe_safetensors *st,
					 enum moe_role role, int layer, int expert,
					 struct moe_st_quantised *out, bool *found);
/* Looks up what params.weights names, and what the first layer with experts has (st NULL: plain). */
enum moe_status moe_model_choose_format(struct moe_model *m, const struct moe_safetensors *st);
bool moe_model_has(const struct moe_model *m, const struct moe_safetensors *st, enum moe_role role,
		   int layer, int expert);

/* Arrays of a micro-batch made from documents; owned. */
struct moe_model_batch {
	struct moe_batch batch;
	int capacity;
	int32_t *ids, *position, *doc_start, *label, *row, *doc_first;
};
enum moe_status moe_model_batch_create(int capacity, struct moe_model_batch *b);
void moe_model_batch_free(struct moe_model_batch *b);
/* Appends a document; labels as in token files, NULL: all. It must fit. */
void moe_model_batch_add(struct moe_model_batch *b, const int32_t *ids, const int32_t *labels,
			 int n);

#endif
