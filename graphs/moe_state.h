/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of MoE layers: weights and LoRA of a layer, and the activations of a pass through it. All
 * through moe_memory_alloc, on the part's node, grouped by purpose for the memory plan.
 */
#ifndef MOE_GRAPHS_MOE_STATE_H
#define MOE_GRAPHS_MOE_STATE_H

#include "codelets/moe.h"
#include "engine/engine.h"
#include "graphs/backward_copies.h"
#include "graphs/backward_mode.h"

struct moe_experts_shape {
	int E, k, H, I, r, group_size; /* group_size: experts per group */
	float scale;		       /* of LoRA: alpha / r */
	struct moe_glu glu;
	bool share_a;		       /* gate and up share A */
	bool trainable;		       /* gradients and moments for LoRA */
	bool base_grads;	       /* gradients of base and router weights */
	const struct moe_coding *coding; /* [MOE_EXPERT_MATRICES], phase 0, rows: quantised; NULL: plain */
	bool coded_later;	       /* quantised by moe_experts_take_coded, which takes the weights' memory */
	bool frozen_router;	       /* base_grads without the router's */
	bool train_router;	       /* the router's weight is trained, whatever the others are */
	bool train_base;	       /* and masters and moments; needs base_grads and an F32 weight_dtype, or coding */
	bool own_masters; /* train_base with masters in BF16: plain weights are their own (a BF16 weight_dtype) */
	uint64_t key;		       /* then: of the layer, for the rounding */
	bool recompute;		       /* see struct moe_experts */
	enum moe_backward_mode backward; /* not direct: LoRA is packed transposed too; resident: and weights */
};

/* Fills in *l (zeroed by the caller except router fields); weights unpacked, LoRA zero. */
enum moe_status moe_experts_alloc(struct moe_engine *e, const struct moe_experts_shape *s,
				  enum moe_dtype weight_dtype, struct moe_experts *l);
/* Memory of quantised weights (coding as in the shape) where there is none yet, described. */
enum moe_status moe_experts_take_coded(struct moe_engine *e, struct moe_experts *l, const struct moe_coding *coding);
/*
 * The same of one matrix of all experts of a frozen layer, which comes without the others: memory of its own, instead of
 * what it had. moe_experts_drop_matrices frees it, before moe_experts_free.
 */
enum moe_status moe_experts_take_matrix(struct moe_engine *e, struct moe_experts *l, enum moe_expert_matrix which,
					const struct moe_coding *coding);
void moe_experts_drop_matrices(struct moe_engine *e, struct moe_experts *l);
void moe_experts_free(struct moe_engine *e, struct moe_experts *l);
/*
 * moe_touch.c: maps the pages of all gradients, or of all moments, of a layer and of what is trained of its shared expert
 * (or NULL), and adds to *sum. No task may write these meanwhile.
 */
struct moe_touched {
	int64_t bytes;
	double seconds; /* 0 with 0 bytes: what there is lies in the heap */
};
void moe_experts_touch(struct moe_engine *e, const struct moe_experts *l, const struct moe_ffn *ffn, bool moments,
		       struct moe_touched *sum);
/* Of a packed matrix that is not quantised, [n, k] from a source of a dtype; a multiple of 64. */
static inline size_t moe_matrix_bytes(enum moe_dtype dtype, int64_t n, int64_t k)
{
	return (moe_kernels()->weight_bytes(dtype, n, k, MOE_USE_GEMM) + 63) & ~(size_t)63;
}
/* moe_values.c: packs one expert's matrix into all parts, and its resident copies. src [I, H] (gate, up) or [H, I] (down), contiguous, any
 * alignment, or NULL: the description only. Thread-safe for different experts. */
void moe_experts_pack(struct moe_experts *l, enum moe_expert_matrix which, int expert,
		      const void *src, enum moe_dtype dtype);

enum moe_param_field { MOE_VALUE, MOE_GRAD, MOE_MOMENT1, MOE_MOMENT2 };
int64_t moe_lora_elements(const struct moe_experts *l, enum moe_lora_array a); /* of one expert */
/* Copies between a contiguous f32 buffer and the parts. get of an absent field gives zeros. */
void moe_experts_get(const struct moe_experts *l, enum moe_lora_array a, enum moe_param_field f,
		     int expert, float *dst);
void moe_experts_set(struct moe_experts *l, enum moe_lora_array a, enum moe_param_field f,
		     int expert, const float *src);
/* Likewise a field of a base matrix of one expert, whole (all parts). An absent one gives zeros. */
void moe_experts_get_base(const struct moe_experts *l, enum moe_expert_matrix which,
			  enum moe_param_field f, int expert, float *dst);
/* The reverse; a value is packed too. */
void moe_experts_set_base(struct moe_experts *l, enum moe_expert_matrix which,
			  enum moe_param_field f, int expert, const float *src);

/*
 * Activations of up to T tokens. kept: one per (slot, layer); scratch and the ring of two: one per
 * slot, shared by its layers through moe_experts_state_bind.
 */
struct moe_experts_scratch {
	struct moe_experts_part_state part[MOE_MAX_LAYER_PARTS], ring[2][MOE_MAX_LAYER_PARTS];
	float *grad_logits[2]; /* [T, E]; the second where the router has a gradient */
};
enum moe_status moe_experts_scratch_alloc(struct moe_engine *e, const struct moe_experts *l, int T,
					  bool backward, struct moe_experts_scratch *s);
void moe_experts_scratch_free(struct moe_engine *e, struct moe_experts_scratch *s, int P);
/* backward false: nothing is kept for one (gate and up are scratch of the pass). */
enum moe_status moe_experts_state_alloc(struct moe_engine *e, const struct moe_experts *l, int T,
					struct moe_experts_state *st);
void moe_experts_state_free(struct moe_engine *e, struct moe_experts_state *st, int P);
void moe_experts_state_bind(struct moe_experts_state *st, const struct moe_experts *l,
			    const struct moe_experts_scratch *s, int ring, int T);
/* Bytes of one state and of one scratch, all parts. */
size_t moe_experts_state_bytes(const struct moe_experts *l, int T);
size_t moe_experts_scratch_bytes(const struct moe_experts *l, int T, bool backward);
/* Worker scratch that the layer's tasks need for T tokens. */
size_t moe_experts_worker_scratch(const struct moe_experts *l, int T);

/* moe_ffn.c */
enum moe_status moe_ffn_alloc(struct moe_engine *e, int H, int I, enum moe_dtype dtype,
			      bool sigmoid, struct moe_ffn *f);
/* Whole training of an MLP's matrices, or their gradients only (update false); see struct moe_trained_shape. */
struct moe_ffn_training {
	bool update, own;
	uint64_t key;
	int64_t slice_elements;
	int part;
};
/* After its weights have memory. On failure moe_ffn_free frees what was made. */
enum moe_status moe_ffn_train(struct moe_engine *e, struct moe_ffn *f, const struct moe_ffn_training *t);
void moe_ffn_free(struct moe_engine *e, struct moe_ffn *f);
enum moe_status moe_ffn_state_alloc(struct moe_engine *e, const struct moe_ffn *f, int T,
				    struct moe_ffn_state *s);
void moe_ffn_state_free(struct moe_engine *e, struct moe_ffn_state *s);

#endif
