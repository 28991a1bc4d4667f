/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One MoE layer and one micro-batch's pass through it, as plain data that the codelets work on.
 * Who may touch what when is said by the handles of graphs/moe_graph.h, not here.
 *
 * Names: E experts, k per token, H hidden, I intermediate (of a part: I_p), T tokens, R = T k rows
 * (token, slot pairs), P parts, G groups of consecutive experts, r LoRA rank.
 */
#ifndef MOE_CODELETS_MOE_H
#define MOE_CODELETS_MOE_H

#include "codelets/kernels/kernels.h"
#include "codelets/router.h"

#define MOE_MAX_LAYER_PARTS 32

/* A trainable array of E equal pieces (E = 1 for dense layers): f32 master, gradient, moments. */
struct moe_param {
	float *value, *grad, *m, *v; /* grad, m, v NULL: frozen */
	int64_t piece;		     /* elements of one expert */
	/*
	 * The kernels' own copy of a LoRA matrix (struct moe_kernels, lora_pack): a piece is `stack` matrices
	 * [rows, cols] of packed_piece / stack bytes each. NULL: masters are operands.
	 */
	void *packed;
	size_t packed_piece;
	/* The transposed matrices, where the backward multiplies by transposed copies; else NULL. */
	void *packed_t;
	size_t packed_t_piece;
	enum moe_lora_side side;
	int stack;
	int64_t rows, cols;
	float pack_scale;
	/*
	 * [pieces] the packed weights of trained base matrices, which the update renews: packed or quantised again. NULL:
	 * a repack task does
	 */
	struct moe_weight *weight;
	/*
	 * Where masters are packed bf16 weights (value NULL): piece e is rows own_row.. of own[e], own_row a multiple of
	 * 16. Those that are computed with, but for quantised ones. For the rounding (codelets/rounding.h): key of the
	 * whole array, and where the pieces and their rows begin in it.
	 */
	struct moe_weight *own;
	int64_t own_row, own_piece, own_at, own_ld;
	uint64_t own_key;
};

/* Rows first..first+count of piece e (rows of all its matrices, in order) have changed: renew the copy. */
void moe_param_pack(const struct moe_param *p, int e, int64_t first, int64_t count);
/* All of pieces e0..e1. */
void moe_param_pack_all(const struct moe_param *p, int e0, int e1);

static inline float *moe_piece(float *base, const struct moe_param *p, int e)
{
	return base ? base + (int64_t)e * p->piece : NULL;
}

enum moe_expert_matrix { MOE_GATE, MOE_UP, MOE_DOWN, MOE_EXPERT_MATRICES };

/* Who quantises trained weights again: a (part, group) its own, or a group those of all parts, which cut blocks. */
enum moe_requantise { MOE_REQUANTISE_NOT, MOE_REQUANTISE_PARTS, MOE_REQUANTISE_WHOLE };

/* A part's share: columns i0..i0+I of the intermediate dimension. */
struct moe_experts_part {
	int64_t i0, I;
	struct moe_weight *gate, *up, *down; /* [E] of [I, H], [I, H], [H, I] */
	struct moe_param gate_b, up_b;	     /* pieces [I, r] */
	struct moe_param down_a;	     /* pieces [r, I] */
	/* pieces [I, H], [I, H], [H, I]; grad: where it is wanted; value (f32 master), m, v: where they are trained */
	struct moe_param base[MOE_EXPERT_MATRICES];
	struct moe_weight *masters; /* [3 E] in bf16 of quantised weights: what base[].own points to; NULL: none */
};

/*
 * Copies of a layer's weights that the backward multiplies by: W^T, packed. Of one layer for good, or an entry of
 * a ring that layers take turns in (graphs/backward_copies.h).
 */
struct moe_transposed {
	struct {
		char *data;	      /* per expert: gate^T, up^T, down^T */
		size_t gate, down;    /* bytes of gate^T or up^T [H, I], of down^T [I, H] */
	} part[MOE_MAX_LAYER_PARTS];
};

struct moe_experts {
	int E, k, H, I, P, G, r, ra; /* ra = rows of a_gu: r with shared A, else 2r */
	float scale;
	struct moe_glu glu;
	int *group_first; /* [G + 1] first expert of each group */
	struct moe_experts_part part[MOE_MAX_LAYER_PARTS];
	struct moe_transposed *transposed; /* kept in step with part[].gate, ...; NULL: none */
	struct moe_param a_gu;	 /* pieces [ra, H] */
	struct moe_param down_b; /* pieces [H, r] */
	/* router: NULL where the caller gives ids and weights */
	const struct moe_router *router;
	struct moe_router_config router_config;
	struct moe_weight router_weight; /* [E, H] */
	float *grad_router;		 /* [E, H] or NULL */
	enum moe_requantise requantise;	 /* where quantised weights are trained */
	/* one piece [E, H], where it is trained: value is router_weight's data (F32), grad is grad_router */
	struct moe_param router_param;
	struct moe_router_lora *router_lora; /* where it is trained; codelets/router_lora.h. Not owned */
	bool recompute; /* u, gate and up are computed again in the backward instead of kept */
	bool recompute_x; /* with it: x16 too. It is then memory of the state's owner */
	float dropout;	/* of LoRA's inputs, where a pass asks for it */
	uint64_t dropout_seed; /* of this layer */
	int64_t *tokens_seen;		 /* [E] slots of each expert in the last training, or NULL */
	float aux_coef, z_coef; /* of the load-balancing and the z-loss */
};

/* What a pass's plan says about a layer: filled in by its plan task, memory of the caller. */
struct moe_router_result {
	double aux, z;	/* load-balancing and z-loss, without coefficients */
	int64_t *load;	/* [E] slots of each expert, or NULL */
};

/* Where each row goes. Final once the plan task has run. */
struct moe_plan {
	int T;
	int32_t *ids;	   /* [T, k]; -1: skipped */
	float *weights;	   /* [T, k] */
	float *logits;	   /* [T, E] */
	double *prob_sum;  /* [blocks][E] */
	double *z_sum;	   /* [blocks] of moe_z_sum, where the layer has a z-loss */
	double aux_loss, z_loss;
	int32_t *offset;   /* [E + 1] */
	int32_t *token;	   /* [R] */
	int32_t *position; /* [T, k] row of a slot, -1: skipped */
	float *row_weight; /* [R] */
	float *grad_weights; /* [T, k] */
	float *grad_logits;  /* [T, E], scratch of the backward */
};

/* Kept from forward to backward: "kept"; within a phase: "scratch", shared by layers. */
struct moe_experts_part_state {
	/* row widths and element sizes are the kernel table's: struct moe_expert_rows */
	void *u;	 /* kept [R, ra] */
	void *gate, *up; /* kept [R, I_p] */
	float *v;	 /* kept [R, r] */
	float *v_part;	 /* scratch [chunks(I_p)][R][r] */
	void *u_panel;	 /* scratch [R, ra] */
	void *panel;	 /* scratch [R, H] */
	void *h;	 /* scratch [R, I_p] */
	float *y;	 /* scratch [R, H] */
	float *sum;	 /* scratch [T, H]: sum over slots */
	float *z;	 /* scratch [R, r] */
	float *w_part;	 /* ring of two [chunks(I_p)][R][2r] */
	/* scratch [R, I_p]; ring of two where base weights have gradients, which read them late */
	void *dgate, *dup;
	void *h_late; /* h as the backward leaves it then; NULL: h */
	float *dgw_part; /* scratch [chunks(I_p)][R] */
};

struct moe_experts_state {
	struct moe_plan plan;
	size_t part_rows; /* R */
	bool recompute, recompute_x; /* u, gate and up of part[] are scratch; x16 is the owner's */
	struct moe_drop_pass drop; /* of this pass; written with the plan */
	const float *x;	  /* [T, H] input of router and experts */
	uint16_t *x16;	  /* [T, H'] the same in bf16, where the kernels read it; kept */
	const float *grad_out; /* [T, H] */
	struct moe_experts_part_state part[MOE_MAX_LAYER_PARTS];
};

/* LoRA of one dense matrix [n, k], which becomes W + scale B A; A [r, k] and B [n, r], one piece each. r 0: none. */
struct moe_matrix_lora {
	struct moe_param a, b;
	int r;
	float scale;
};

struct moe_trained;
struct moe_ffn_state;

enum moe_ffn_matrix { MOE_FFN_GATE, MOE_FFN_UP, MOE_FFN_DOWN, MOE_FFN_SIGMOID, MOE_FFN_MATRICES };
/* A layer's dense matrices in tags and lists: attention's projections, then those of its MLP. */
#define MOE_FFN_TAG 4
#define MOE_DENSE_TAGS (MOE_FFN_TAG + (int)MOE_FFN_MATRICES)

/* A dense SwiGLU: y = (silu(x Wg^T) * (x Wu^T)) Wd^T, times sigmoid(x . s) where there is s. */
struct moe_ffn {
	int H, I;
	struct moe_weight gate, up, down; /* [I, H], [I, H], [H, I] */
	float *sigmoid_weight;		  /* [H], a matrix [1, H], or NULL */
	struct moe_glu glu;		  /* where it is not plain: what stands for silu(..) * (..) */
	struct moe_matrix_lora lora[MOE_FFN_MATRICES];
	float dropout; /* of LoRA's inputs, where a pass asks for it */
	struct moe_trained *trained; /* [MOE_FFN_MATRICES] (codelets/trained.h), or NULL */
};

static inline bool moe_ffn_trains(const struct moe_ffn *f, int which)
{
	return f->lora[which].a.grad != NULL;
}
/* Any of its matrices has LoRA, or LoRA that is trained. */
bool moe_ffn_adapted(const struct moe_ffn *f);
bool moe_ffn_trained(const struct moe_ffn *f);
/* h of rows t0..t1 from gate and up; and dgate and dup from dh, which lies where dgate will. */
void moe_ffn_hidden(const struct moe_ffn *f, const struct moe_ffn_state *s, int t0, int t1);
void moe_ffn_hidden_bwd(const struct moe_ffn *f, const struct moe_ffn_state *s, int t0, int t1);
/* Rows and columns of a matrix, an enum moe_ffn_matrix. */
void moe_ffn_shape(const struct moe_ffn *f, int which, int64_t *n, int64_t *k);
/* What LoRA adds to the sigmoid gate's weight, into out [H]; false: it has none. */
bool moe_ffn_sigmoid_lora(const struct moe_ffn *f, float *out);

struct moe_ffn_state {
	const float *x;	    /* [T, H] */
	float *gate, *up;   /* kept [T, I] */
	float *sigmoid;	    /* kept [T] */
	float *h;	    /* scratch [T, I] */
	float *dgate, *dup; /* scratch [T, I] */
	float *dsigmoid;    /* [T] gradient of the sigmoid's argument */
};

/* Expert e of part p, ready for a kernel; copy: what its backward multiplies by, NULL: its weights. */
struct moe_expert moe_expert_of(const struct moe_experts *l, const struct moe_transposed *copy, int p,
				int e);
/* Names and kt layout: A [r, in], B [out, r]. With shared A, GATE_A and UP_A are the same array. */
enum moe_lora_array {
	MOE_GATE_A,
	MOE_UP_A,
	MOE_DOWN_A,
	MOE_GATE_B,
	MOE_UP_B,
	MOE_DOWN_B,
	MOE_LORA_ARRAYS
};

/*
 * A part's share of an expert's array: `rows` rows of `width`, contiguous in the param's piece from `at`; in the
 * whole array they begin at `offset` and are `ld` apart.
 */
struct moe_view {
	const struct moe_param *param;
	int64_t at, rows, width, offset, ld;
};
/* A of gate and up and B of down are whole, the same for every part. */
static inline bool moe_lora_replicated(enum moe_lora_array a)
{
	return a == MOE_GATE_A || a == MOE_UP_A || a == MOE_DOWN_B;
}
struct moe_view moe_lora_view(const struct moe_experts *l, enum moe_lora_array a, int part);
struct moe_view moe_base_view(const struct moe_experts *l, enum moe_expert_matrix which, int part);

/*
 * weight_pack of a whole weight for GEMMs, whose description is written only where it changes: tasks of other experts
 * and layers may look at it (cost models) while values are packed anew. src NULL: the description only.
 */
void moe_weight_pack(struct moe_weight *w, const void *src, enum moe_dtype dtype, int64_t n, int64_t k, int64_t ld);
/* The same into the memory of a BF16 weight, whatever src is: rounded to nearest where the table keeps src's dtype. */
void moe_weight_store(struct moe_weight *w, int64_t n, int64_t k, const void *src, enum moe_dtype dtype, int64_t ld);

/* What one part packs of one expert's matrix: [n, k] from src, rows ld apart, into w. */
struct moe_pack_source {
	struct moe_weight *w;
	const char *src;
	int64_t n, k, ld;
};
struct moe_pack_source moe_experts_source(const struct moe_experts *l, enum moe_expert_matrix which,
					  int expert, int part, const void *src,
					  enum moe_dtype dtype);
/* Packs that, and its resident copies; where the matrix is trained, by way of its master. src NULL: the
 * description only, without one. */
void moe_experts_pack_part(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
			   int part, const void *src, enum moe_dtype dtype);
/* The same from the master; where bf16 weights are their own masters, only the copies. */
void moe_experts_pack_master(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
			     int part);
/* Trained quantised weights, in all parts: f32 masters of one expert's matrix from src, whole, contiguous, or from
 * quantised weights, their rows from n0 on; codes from masters. */
void moe_experts_take_master(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
			     const void *src, enum moe_dtype dtype);
void moe_experts_dequantise_master(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
				   const struct moe_quantised *q, int64_t n0);
void moe_experts_requantise(const struct moe_experts *l, enum moe_expert_matrix which, int expert);
/* One expert's matrix in its parts. */
struct moe_coded_matrix;
void moe_experts_coded(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
		       struct moe_coded_matrix *out);
/*
 * A part's share of one expert's matrix from a quantised one: its row i is row n0 + i * step of q. Returns how many
 * codes have no finite value.
 */
int64_t moe_experts_pack_coded(const struct moe_experts *l, enum moe_expert_matrix which, int expert,
			       int part, const struct moe_quantised *q, int64_t n0, int64_t step);
/* Renews the copy of one of expert e's matrices from its packed weights. */
void moe_expert_transpose(const struct moe_experts *l, const struct moe_transposed *copy, int p, int e,
			  enum moe_expert_matrix which);
/* Its rows in this micro-batch (m may be 0). */
struct moe_expert_rows moe_expert_rows_of(const struct moe_experts *l,
					  const struct moe_experts_state *s, int p, int e);
/* Its rows of h in the backward: see h_late. */
void *moe_expert_late_h(const struct moe_experts *l, const struct moe_experts_state *s, int p, int e);
/* first: the window's first micro-batch overwrites. */
struct moe_expert_grad moe_expert_grad_of(const struct moe_experts *l, int p, int e, bool first);

static inline int moe_chunks(int64_t n)
{
	return (int)((n + MOE_CHUNK - 1) / MOE_CHUNK);
}
static inline int moe_token_blocks(int T)
{
	return (T + MOE_TOKEN_BLOCK - 1) / MOE_TOKEN_BLOCK;
}
/* Part that owns the replicated LoRA of a group. */
static inline int moe_group_owner(const struct moe_experts *l, int g)
{
	return g % l->P;
}

#endif
