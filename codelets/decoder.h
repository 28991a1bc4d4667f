/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A decoder around its MoE layers, and one micro-batch's pass through it, as plain data that the
 * codelets work on. Who may touch what when is said by the handles of graphs/decoder.h, not here.
 *
 * Names: T tokens of the micro-batch, H hidden, V vocabulary, C runs of MOE_VOCAB_CHUNK vocabulary
 * rows, n trained rows (tokens whose prediction enters the loss).
 */
#ifndef MOE_CODELETS_DECODER_H
#define MOE_CODELETS_DECODER_H

#include "codelets/trained.h"

struct moe_codelet;

/* y = x W^T + bias + scale (x A^T) B^T; r 0: no LoRA. lora_a is [r, k], lora_b [n, r], E = 1. */
struct moe_linear {
	struct moe_weight weight;
	float *bias; /* [n] or NULL */
	struct moe_param lora_a, lora_b;
	int r;
	float scale;
};

enum moe_attn_linear { MOE_ATTN_Q = 0, MOE_ATTN_K, MOE_ATTN_V, MOE_ATTN_O, MOE_ATTN_LINEARS };
_Static_assert((int)MOE_ATTN_LINEARS == MOE_FFN_TAG, "tags of dense matrices");

/* A layer's dense arrays that may be trained whole; an MLP's are its own (struct moe_ffn). */
enum moe_layer_array {
	MOE_ARRAY_LINEAR = 0,		      /* + enum moe_attn_linear */
	MOE_ARRAY_BIAS = MOE_ATTN_LINEARS,    /* + enum moe_attn_linear */
	MOE_ARRAY_ATTN_NORM = 2 * MOE_ATTN_LINEARS,
	MOE_ARRAY_FFN_NORM,
	MOE_ARRAY_Q_NORM,
	MOE_ARRAY_K_NORM,
	MOE_LAYER_ARRAYS
};

struct moe_decoder_layer {
	bool recompute; /* the backward computes all but x and the plan again */
	float *attn_norm, *ffn_norm; /* [H] */
	struct moe_linear linear[MOE_ATTN_LINEARS];
	float *q_norm, *k_norm;	     /* [q_norm_n], [k_norm_n] or NULL */
	int q_norm_n, k_norm_n;	     /* head dim: each head alone; else the whole projection */
	struct moe_experts *experts; /* NULL: ffn is the layer's dense MLP */
	struct moe_ffn *ffn;	     /* with experts: the shared ones, or NULL */
	struct moe_trained *trained; /* [MOE_LAYER_ARRAYS], or NULL */
};

/* [V, H] in chunks of MOE_VOCAB_CHUNK rows: one packed weight each. */
struct moe_vocab {
	struct moe_weight *chunk;
	int n_chunks;
	struct moe_trained *trained; /* [n_chunks], or NULL */
};

struct moe_decoder {
	int n_layers, H, heads, kv_heads, dim;
	int64_t V;
	float eps;
	float dropout; /* of LoRA's inputs, where a pass asks for it */
	struct moe_vocab embed, head; /* tied: the same memory */
	float *final_norm;	      /* [H] */
	struct moe_trained *final_trained; /* of final_norm, or NULL */
	float *rope;		      /* [positions, dim], codelets/rope_table.h */
	int positions;
	struct moe_decoder_layer *layers;
};

/*
 * What a pass works on. The arrays are the caller's and stay valid until its tasks have run.
 * Documents follow each other; a token sees its own document only.
 */
struct moe_batch {
	int T;
	bool text; /* one document, forward only, that goes on with the slot's text ... */
	int past;  /* ... after so many tokens of it; else 0 */
	const int32_t *ids;	  /* [T] in [0, V) */
	const int32_t *position;  /* [T] within the document */
	const int32_t *doc_start; /* [T] first token of the token's document; with past, of all of them: 0 */
	const int32_t *label; /* [T] the id at t + 1 of the same document where trained, else -1 */
	int n_rows;
	const int32_t *row; /* [n_rows] ascending tokens: the trained ones, or those with logits */
	int n_docs;
	const int32_t *doc_first; /* [n_docs + 1] first tokens; only for losses by document */
};

/* Buffers of one layer. Kept for the backward, or shared by frozen layers. */
struct moe_attn_state {
	float *x, *x_mid, *xn; /* [T, H] input, after attention, the latter normalised */
	float *q, *k, *v;      /* [T, heads dim], [past + T, kv_heads dim] after norm and rope */
	float *q_pre, *k_pre;  /* before norm; NULL without */
	float *o, *lse;	       /* [T, heads dim], [heads, T] */
	/* [token blocks, n] what the gradients of norms get from each block; NULL: not wanted */
	float *attn_norm_part, *ffn_norm_part, *q_norm_part, *k_norm_part;
};

/* Gradients of one layer, a ring of two. grad_q, grad_k: after qkv_bwd at the projections. */
struct moe_attn_grad {
	float *grad_o, *grad_q, *grad_k, *grad_v;
	float *centre; /* [heads, T] */
};

struct moe_attn_args {
	const struct moe_decoder *decoder;
	const struct moe_decoder_layer *layer; /* NULL: embed */
	struct moe_drop_pass drop;	       /* of the layer */
	const struct moe_attn_state *state;
	const struct moe_attn_grad *grad;
	struct moe_batch batch;
	int t0, t1;	       /* token block */
	int h0, h1;	       /* query heads; kv heads for attention_bwd_kv */
	uint16_t *xn16;	       /* attn_out: xn in bf16, rows of moe_width(H); NULL: not wanted */
	const float *grad_mid; /* [T, H] gradient at x_mid */
	float *grad_x;	       /* qkv_bwd: [T, H] gradient at x, NULL: not wanted */
	int linear;	       /* linear_grad: enum moe_attn_linear */
	bool first;	       /* linear_grad: overwrite */
};

/* One buffer of the LM head's ring: a block of at most MOE_TOKEN_BLOCK rows. */
struct moe_head_state {
	float *hn;		/* [64, H] normalised rows */
	float *logits;		/* [64, V] */
	float *max, *sum, *tgt; /* [C][64], [C][64], [64] */
	float *lse;		/* [64] */
	float *dx;		/* [C][64, H] */
};

struct moe_head_args {
	const struct moe_decoder *decoder;
	const struct moe_head_state *state;
	struct moe_batch batch;
	int r0, r1; /* entries of batch.row */
	int chunk;
	const float *x;	  /* [T, H] output of the last layer */
	float scale;	  /* of the loss gradient: 1 / trained tokens of the step */
	double *row_loss; /* [n_rows] */
	float *out;	  /* logits: [n_rows, V] of the caller, NULL: the ring's buffer */
	float *grad;	  /* loss_bwd: [T, H] gradient at x */
	int t0, t1;	  /* loss_bwd: tokens that it clears first */
	float *norm_part; /* loss_bwd: [H] what final_norm's gradient gets from these rows, or NULL */
};

/* Filled in by loss_total. */
struct moe_loss_result {
	double sum; /* of -log p over the trained tokens */
	int64_t n;
	double *doc_sum; /* [n_docs] of the caller, or NULL */
	int64_t *doc_n;	 /* [n_docs] or NULL */
};

struct moe_loss_args {
	struct moe_batch batch;
	const double *row_loss;
	struct moe_loss_result *out;
};

static inline struct moe_lora moe_linear_lora(const struct moe_linear *l)
{
	return (struct moe_lora){ .a = l->lora_a.value, .b = l->lora_b.value, .r = l->r, .scale = l->scale };
}
/* Bytes of worker scratch that the decoder's own tasks need. */
size_t moe_decoder_scratch(const struct moe_decoder *d);
/* Microseconds of attention of m query rows that see n keys each, per head; the backward is 2.5
 * times. */
double moe_attention_us(int m, int64_t n, double dim);
/*
 * y = x W^T + bias + LoRA and the reverse, on m rows of n and k floats. drop (NULL: none) masks what LoRA sees; the
 * first row is the micro-batch's row token.
 */
void moe_linear_apply(const struct moe_linear *l, int m, const float *x, float *y,
		      const struct moe_dropout *drop, int64_t token, void *scratch);
void moe_linear_back(const struct moe_linear *l, int m, const float *dy, float *dx, bool accumulate,
		     const struct moe_dropout *drop, int64_t token, void *scratch);
/* Masks of one of a layer's projections, into *d; NULL where the pass or the decoder has none. projection: enum
 * moe_attn_linear. */
const struct moe_dropout *moe_linear_dropout(const struct moe_decoder *d, const struct moe_drop_pass *pass,
					     int projection, struct moe_dropout *out);
struct moe_attention moe_attention_of(const struct moe_attn_args *a);

#endif
