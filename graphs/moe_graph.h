/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The graph of a MoE layer (design: docs/graph.md). Two kinds of tensors:
 *  - of the layer: LoRA and gradients, one per (part, group); live as long as the layer;
 *  - of the slot (one micro-batch in flight): they order rows of buffers that all layers of the
 *    micro-batch share. `scratch` is held read-write where a phase begins and by the join that ends
 *    the expert work, and read by everything else that touches shared buffers, so that no task of
 *    another layer or step can reuse them too early.
 */
#ifndef MOE_GRAPHS_MOE_GRAPH_H
#define MOE_GRAPHS_MOE_GRAPH_H

#include "graphs/backward_copies.h"
#include "graphs/cut.h"
#include "graphs/stream.h"
#include "graphs/trained.h"

struct moe_layer_tensors {
	int P, G, slices_i;
	struct moe_tensor **lora_i, **grad_i;	      /* [P G], [P G slices_i] */
	struct moe_tensor **lora_h, **grad_h;	      /* [G] */
	struct moe_tensor **grad_base;		      /* [P G MOE_EXPERT_MATRICES] or NULL */
	struct moe_tensor *grad_router; /* or NULL */
	/* of weights that are trained: [P G] packed ones and f32 masters, and the router's; else NULL */
	struct moe_tensor **weights, **masters, *router;
	struct moe_tensor *grad_router_lora; /* or NULL */
};

struct moe_slot_tensors {
	int P, G, T_max;
	struct moe_cut cut;
	struct moe_tensor *scratch;
	struct moe_tensor **route, **route_bwd; /* [blocks] */
	struct moe_tensor **ffn;		/* [blocks] dense or shared FFN, hidden */
	struct moe_tensor **panel;		/* [P G] */
	struct moe_tensor **up;			/* [P G slices_i] gate_up */
	struct moe_tensor **rows;		/* [P G slices_h] y, or the rows' grad_x */
	struct moe_tensor **down_bwd[2];	/* ring by layer: [P G slices_i] */
	struct moe_tensor **part;		/* [P combine_blocks] */
	struct moe_join x, y, parts, grad_out[2], grad_rows, grad_parts, route_all, shared_all;
	struct moe_stream shared; /* [T, H] shared experts' output, later their grad_x */
};

/* One layer of one micro-batch. */
struct moe_moe_pass {
	const struct moe_experts *layer;
	struct moe_experts_state *state;
	const struct moe_ffn *ffn; /* shared experts or NULL */
	struct moe_ffn_state *ffn_state;
	struct moe_tensor *const *ffn_lora; /* [MOE_FFN_MATRICES] or NULL */
	const struct moe_trained_tensors *ffn_trained; /* [MOE_FFN_MATRICES] gradients to add to, or NULL */
	struct moe_layer_tensors *lt;
	struct moe_slot_tensors *st;
	struct moe_tensor *plan; /* of (slot, layer) */
	int ring;		 /* 0 or 1: which of the ring-of-two buffers */
	bool has_grads;		 /* LoRA is trained here */
	struct moe_drop_pass drop;
	struct moe_tensor *again; /* the backward's x is computed again: held by what did; NULL: kept */
	/* what the backward multiplies by; NULL: the weights themselves */
	const struct moe_transposed *copy;
	struct moe_tensor **copies; /* [P G] an entry of a ring, which is filled first; NULL: resident */
	int copy_layers;	    /* entries of the ring */
	struct moe_router_result *result; /* or NULL */
	double share;		    /* of the step's tokens: weighs the router's losses; 0: all */
	bool copies_ready;	    /* the entry holds this layer's copies already */
};
/* The backward's copies: entry index mod n of the ring, or the layer's own; else none. */
void moe_pass_set_copies(struct moe_moe_pass *p, const struct moe_backward_ring *ring, int index);

/* Fills the ring's entry with the copies of all experts of l, ahead of its backward. */
enum moe_status moe_graph_moe_repack_bwd(const struct moe_context *c, const struct moe_experts *l,
					 struct moe_layer_tensors *lt,
					 const struct moe_backward_ring *ring, int index);

enum moe_status moe_layer_tensors_create(struct moe_engine *e, const struct moe_experts *l,
					 int slices_i, bool base_grads,
					 struct moe_layer_tensors *out);
void moe_layer_tensors_destroy(struct moe_layer_tensors *t);
enum moe_status moe_slot_tensors_create(struct moe_engine *e, int P, int G, int T_max, int H,
					const struct moe_cut *cut, bool shared,
					struct moe_slot_tensors *out);
void moe_slot_tensors_destroy(struct moe_engine *e, struct moe_slot_tensors *t);
/* Handles that the two would register: for the memory plan. */
int64_t moe_layer_tensors_count(int P, int G, int slices_i, bool base_grads);
int64_t moe_slot_tensors_count(int P, int G, int T_max, const struct moe_cut *cut);

/* x: normalised input; residual (or NULL) is added to out. */
enum moe_status moe_graph_moe_forward(const struct moe_context *c, struct moe_moe_pass *p,
				      struct moe_stream *x, struct moe_stream *residual,
				      struct moe_stream *out);
/* grad_x = through norm (see struct moe_norm_bwd) of the gradient at x. first: clear gradients. */
enum moe_status moe_graph_moe_backward(const struct moe_context *c, struct moe_moe_pass *p,
				       struct moe_stream *x, struct moe_stream *grad_out,
				       const struct moe_norm_bwd *norm, struct moe_stream *residual,
				       bool first, struct moe_stream *grad_x);

struct moe_optimizer_step {
	struct moe_adamw adamw;
	struct moe_grad_norm *norm;    /* NULL: no clipping and no finiteness check */
	struct moe_tensor *norm_ready; /* written by grad_total */
};
/* AdamW on the router's weight, where that is trained. */
enum moe_status moe_graph_moe_update_router(const struct moe_context *c, const struct moe_experts *l,
					    struct moe_layer_tensors *lt,
					    const struct moe_optimizer_step *o);
/*
 * The same on base and router weights. The update packs a (part, group)'s weights as it goes; where there are
 * resident copies a repack follows.
 */
enum moe_status moe_graph_moe_update_base(const struct moe_context *c, const struct moe_experts *l,
					  struct moe_layer_tensors *lt,
					  const struct moe_optimizer_step *o);
/* Gradients or values of a layer to or from the caller's arrays: args as in moe_task_exchange, per (part, group).
 * lora: LoRA arrays take part; base: base arrays do. */
enum moe_status moe_graph_moe_exchange(const struct moe_context *c, const struct moe_experts *l,
				       struct moe_layer_tensors *lt,
				       const struct moe_exchange_args *args, bool lora, bool base);
/* All gradients of the layer times factor. */
enum moe_status moe_graph_moe_rescale(const struct moe_context *c, const struct moe_experts *l,
				      struct moe_layer_tensors *lt, float factor);
/* Masters and packed weights from arrays of the caller; of args: source, dtype. */
enum moe_status moe_graph_moe_take_base(const struct moe_context *c, const struct moe_experts *l,
					struct moe_layer_tensors *lt,
					const struct moe_repack_args *args);
/*
 * Sums of squares of the layer's LoRA gradients: squares is [3 P + 2][E]; done [P G] are written. scale: of the
 * gradients, as in struct moe_adamw.
 */
enum moe_status moe_graph_moe_grad_norm(const struct moe_context *c, const struct moe_experts *l,
					struct moe_layer_tensors *lt, float scale, double *squares,
					struct moe_tensor **done);
/* The same of base weights: squares is [3 P][E]. */
enum moe_status moe_graph_moe_base_norm(const struct moe_context *c, const struct moe_experts *l,
					struct moe_layer_tensors *lt, float scale, double *squares,
					struct moe_tensor **done);
enum moe_status moe_graph_moe_update(const struct moe_context *c, const struct moe_experts *l,
				     struct moe_layer_tensors *lt,
				     const struct moe_optimizer_step *o);
#define MOE_SQUARES_PER_EXPERT(P) (3 * (P) + 2)

#endif
