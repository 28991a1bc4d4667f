/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The graph of a decoder: embedding, attention, dense and MoE layers, LM head, forward, backward
 * and update. Three kinds of tensors:
 *  - of the decoder: LoRA and gradients; live as long as it;
 *  - `kept`, one per (slot, layer): held by every task that reads a layer's buffers without naming
 *    their blocks (the whole backward), taken read-write before the next pass writes the first of
 *    them. Layers below the lowest trained one share two sets of buffers, with a `kept` each, but
 *    for x_mid and xn, of which there is one. Layers whose activations are computed again share two
 *    more sets, but for x, which each keeps: the backward takes a set's `kept` before it computes a
 *    layer again and when that is done, as the gradient has not come through those tasks;
 *  - blocks of a slot, shared by all layers of a parity: they order the blocks of one layer, and
 *    more than needed of a later one.
 * What the backward reads of the forward needs no handle of its own: the gradient that a task
 * starts from has come through all tasks that wrote it.
 */
#ifndef MOE_GRAPHS_DECODER_H
#define MOE_GRAPHS_DECODER_H

#include "graphs/decoder_full.h"
#include "graphs/decoder_span.h"
#include "graphs/moe_graph.h"
#include "graphs/moe_state.h"
#include "tasks/decoder_tasks.h"

#define MOE_HEAD_RING 2
#define MOE_HEAD_RANGES 16 /* most tasks of one block's attention */
#define MOE_HEAD_TASKS 256 /* and of all blocks', where there are many */

struct moe_decoder_tensors {
	int n_layers;
	int lowest;			  /* lowest trained layer, n_layers: none */
	struct moe_cut cut;		  /* of all MoE layers */
	struct moe_layer_tensors *moe;	  /* [n_layers] */
	struct moe_backward_ring ring;	  /* n 0: none. Created by the owner of the decoder */
	struct moe_tensor **lora, **grad; /* [n_layers MOE_ATTN_LINEARS] */
	struct moe_tensor ***ffn_lora, ***ffn_grad; /* [n_layers][MOE_FFN_MATRICES], NULL: nothing
						     * of it is adapted or trained */
	struct moe_full_tensors full;	  /* of what is trained whole */
	/* gradient norm */
	int n_norms;
	struct moe_tensor **norm; /* [n_norms] */
	struct moe_join norm_all;
	struct moe_tensor *norm_ready;
	double *squares;
	int64_t n_squares, n_expert_squares;
};

/* Order of the blocks of one parity of layers. */
struct moe_attn_blocks {
	struct moe_tensor **x, **qkv, **mid; /* [blocks]; mid: x_mid and xn */
	struct moe_tensor **attn;	     /* [blocks MOE_HEAD_RANGES] */
	struct moe_span keys;		     /* over qkv */
};

struct moe_layer_buffers {
	struct moe_attn_state attn;
	struct moe_tensor *kept;
};

/* Gradients around attention: a ring of two. */
struct moe_attn_ring {
	struct moe_attn_grad grad;
	struct moe_tensor *users;
	struct moe_tensor **grad_o, **q, **kv; /* [blocks], [blocks ranges], [blocks ranges] */
	struct moe_span span;		       /* over grad_o */
	struct moe_join all;		       /* every block is at the projections */
};

struct moe_head_ring {
	struct moe_head_state state;
	struct moe_tensor *hn, *loss, **chunk; /* chunk [C] */
	struct moe_join chunks, chunks_bwd;
};

/* One micro-batch in flight. */
struct moe_decoder_slot {
	struct moe_engine *engine;
	const struct moe_decoder *decoder;
	int T_max, blocks, ranges, lowest;
	bool has_moe, has_dense, has_shared, backward;
	struct moe_attn_blocks blocks_of[2][2];	    /* [frozen, retained][parity] */
	/* layer [n_layers + 1]: the last has only x. again: what layers that recompute share, by parity; their
	 * own entries refer to it */
	struct moe_layer_buffers frozen[2], again[2], *layer;
	struct moe_ffn_state again_dense[2], again_shared[2];
	uint16_t *again_x16[2];
	struct moe_join again_all; /* every block of a layer is there again */
	/* [n_layers] the layers' buffers, but each with keys and values of its own, decoder->positions rows, which
	 * passes of a text go on from; NULL: no room for one */
	struct moe_attn_state *text;
	struct moe_experts_state frozen_moe, *moe;  /* moe [n_layers] */
	struct moe_tensor *frozen_plan, **plan;
	struct moe_ffn_state frozen_dense, frozen_shared, *ffn; /* ffn [n_layers] */
	struct moe_experts_scratch moe_scratch;
	struct moe_slot_tensors st;
	struct moe_tensor **hidden; /* [blocks] of dense MLPs */
	struct moe_stream grad_out[2], grad_mid[2];
	struct moe_attn_ring ring[2];
	struct moe_head_ring head[MOE_HEAD_RING];
	double *row_loss; /* [T_max] */
	struct moe_join final_all; /* every token block has the loss's gradient */
	float *final_part; /* [row blocks, H] parts of final_norm's gradient, or NULL */
	struct moe_tensor *
		*at_projections; /* [blocks], not owned: one of each block while submitting */
};

/* lowest is found from what has gradients. */
enum moe_status moe_decoder_tensors_create(struct moe_engine *e, const struct moe_decoder *d,
					   const struct moe_cut *cut,
					   struct moe_decoder_tensors *t);
void moe_decoder_tensors_destroy(struct moe_engine *e, struct moe_decoder_tensors *t);
/* Buffers for T_max tokens. */
enum moe_status moe_decoder_slot_create(struct moe_engine *e, const struct moe_decoder *d,
					const struct moe_decoder_tensors *t, int T_max,
					struct moe_decoder_slot *s);
void moe_decoder_slot_destroy(struct moe_decoder_slot *s);
/* Room for a text. Nothing is trained. */
enum moe_status moe_decoder_slot_keep_text(struct moe_decoder_slot *s);
size_t moe_decoder_text_bytes(const struct moe_decoder *d, int positions);
/* Bytes and handles of one slot, without creating it. The decoder's weights need no data yet. */
size_t moe_decoder_slot_bytes(const struct moe_decoder *d, int lowest, int T_max);
int64_t moe_decoder_slot_handles(const struct moe_decoder *d, int lowest, const struct moe_cut *cut,
				 int T_max);
int moe_decoder_lowest(const struct moe_decoder *d);

/* One micro-batch through a slot. */
struct moe_decoder_pass {
	const struct moe_decoder *decoder;
	struct moe_decoder_tensors *tensors;
	struct moe_decoder_slot *slot;
	struct moe_batch batch; /* 1 <= T <= T_max */
	struct moe_router_result *router; /* [n_layers] of the caller, filled in by tasks, or NULL */
	struct moe_drop_pass drop; /* seed: of the training; on: the decoder's dropout masks what LoRA sees */
	double share;		/* its share of the step's tokens, for the router's losses; 0: all */
};

/* Embedding and all layers. c->priority is that of the pass; layers add 8 each. */
enum moe_status moe_graph_decoder_forward(const struct moe_context *c, struct moe_decoder_pass *p);
/* After forward: logits of batch.row into out [n_rows, V]. */
enum moe_status moe_graph_decoder_logits(const struct moe_context *c, struct moe_decoder_pass *p,
					 float *out);
/*
 * After forward: the loss of batch.row; with backward also its gradient, times scale, at the last
 * layer's output, and the LM head's gradients, which micro-batch 0 (of c) overwrites. out is filled in by a task.
 */
enum moe_status moe_graph_decoder_loss(const struct moe_context *c, struct moe_decoder_pass *p,
				       bool backward, float scale, struct moe_loss_result *out);
/* After loss with backward: down to the lowest trained layer. first: overwrite the gradients. */
enum moe_status moe_graph_decoder_backward(const struct moe_context *c, struct moe_decoder_pass *p,
					   bool first);

struct moe_decoder_step {
	struct moe_adamw adamw;	    /* grad_scale is not used */
	float max_norm;		    /* 0: no clipping */
	struct moe_grad_norm *norm; /* filled in by a task; NULL: neither norm nor clipping */
	/* NULL, or that of the step before: where it is not finite, this step is not applied either */
	const struct moe_grad_norm *after;
};
/* Once per step, after the last backward: layer 0 first, as the next step needs it first. */
enum moe_status moe_graph_decoder_update(const struct moe_context *c, const struct moe_decoder *d,
					 struct moe_decoder_tensors *t,
					 const struct moe_decoder_step *o);

/* ---- shared by the files of graphs/decoder*.c ---- */

static inline struct moe_layer_buffers *moe_decoder_buffers(struct moe_decoder_slot *s, int layer)
{
	return layer < s->lowest ? &s->frozen[layer & 1] : &s->layer[layer];
}
static inline struct moe_attn_blocks *moe_decoder_blocks(struct moe_decoder_slot *s, int layer)
{
	return &s->blocks_of[layer >= s->lowest][layer & 1];
}
/* A layer's activation as the stream that the MoE graph takes. */
struct moe_stream moe_decoder_stream(struct moe_decoder_slot *s, float *data,
				     struct moe_tensor **block, struct moe_tensor *users, int T);
static inline struct moe_drop_pass moe_decoder_drop(const struct moe_decoder_pass *p, int layer)
{
	struct moe_drop_pass d = p->drop;

	d.seed = moe_drop_seed(d.seed, layer);
	return d;
}
struct moe_moe_pass moe_decoder_moe_pass(struct moe_decoder_pass *p, int layer);
struct moe_ffn_state *moe_decoder_ffn_state(struct moe_decoder_slot *s, int layer);
/* Chooses a layer's activations; before slots are created. */
void moe_decoder_set_recompute(struct moe_decoder_layer *l, bool recompute);
/* Whether layer keeps x and the plan only; the slot's frozen layers never do. */
static inline bool moe_decoder_recomputes(const struct moe_decoder_slot *s, int layer)
{
	return layer >= s->lowest && layer < s->decoder->n_layers &&
	       s->decoder->layers[layer].recompute;
}
/* One layer from x to x_mid and xn. */
enum moe_status moe_decoder_submit_attention(const struct moe_context *c, struct moe_decoder_pass *p,
					     int layer);
/* Most blocks of rows that the LM head cuts the rows of so many token blocks into. */
int moe_decoder_row_blocks(int token_blocks);
bool moe_decoder_trains(const struct moe_decoder_layer *l, int linear);
/* Context of a layer's tasks at a depth of the pass (forward 0..L, backward above). */
struct moe_context moe_decoder_context(const struct moe_context *c, int layer, int depth);
/* Orders the coming writers of grad_out[ring] after the late readers of two layers before. */
enum moe_status moe_decoder_begin_grad_out(const struct moe_context *c, struct moe_decoder_slot *s,
					   int ring);
/* Tasks that a block's attention over n keys is cut into; the same every time. */
int moe_decoder_ranges(int heads, int max, double us_per_head);

#endif
