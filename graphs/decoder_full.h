/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Full fine-tuning of a decoder's dense arrays: embedding, LM head, attention projections and their
 * biases, norms, MLPs. (Routed experts and routers: graphs/moe_graph.h.) Gradients are at the
 * lowest priority; an array's slices are updated, then it is packed anew, each as soon as its own
 * gradient is complete.
 */
#ifndef MOE_GRAPHS_DECODER_FULL_H
#define MOE_GRAPHS_DECODER_FULL_H

#include "graphs/trained.h"

struct moe_decoder;
struct moe_decoder_pass;
struct moe_decoder_step;
struct moe_decoder_tensors;

#define MOE_DENSE_ARRAYS                                                                           \
	(MOE_LAYER_ARRAYS + MOE_FFN_MATRICES) /* of a layer: its own, then its MLP's */
#define MOE_FULL_NORMS 64		      /* handles of grad_norm that slices take in turn */

struct moe_full_tensors {
	int n_layers, n_chunks;
	bool tied;
	struct moe_trained_tensors *layer; /* [n_layers][MOE_DENSE_ARRAYS]; NULL: none */
	struct moe_trained_tensors *embed, *head, final; /* [n_chunks]; tied: the same */
	struct moe_tensor **embed_ready, **head_ready, *final_ready;
	struct moe_join embed_all; /* every chunk of the embedding is up to date */
	int first_norm;		   /* of MOE_FULL_NORMS in the decoder's list */
	int64_t n_squares;
};

/* ready tensors of layers are the decoder's LoRA tensors, which must exist. */
enum moe_status moe_full_tensors_create(struct moe_engine *e, const struct moe_decoder *d,
					struct moe_decoder_tensors *t);
void moe_full_tensors_destroy(struct moe_full_tensors *t);
/* Slices of all arrays: sums of squares that they have. */
int64_t moe_full_slices(const struct moe_decoder *d);
/* Anything of the layer, or of the embedding, is trained so. */
bool moe_full_trains_layer(const struct moe_decoder *d, int layer);
bool moe_full_trains_embed(const struct moe_decoder *d);

/* What the embedding's, a chunk of the head's readers and final_norm wait for; NULL where nothing
 * trains. */
struct moe_tensor *moe_full_embed_ready(const struct moe_full_tensors *t);
struct moe_tensor *moe_full_head_ready(const struct moe_full_tensors *t, int chunk);

/* Gradients of a layer, once its backward is submitted. first: overwrite. */
enum moe_status moe_full_layer_grads(const struct moe_context *c, struct moe_decoder_pass *p,
				     int layer, bool first);
/* Of the LM head from one block of rows: after its logits_bwd, in front of the ring's next users.
 */
enum moe_status moe_full_head_grads(const struct moe_context *c, struct moe_decoder_pass *p,
				    const struct moe_head_args *a, struct moe_tensor *hn,
				    struct moe_tensor *const *chunk, bool first);
/* Of final_norm, from the parts of n row blocks, and of the embedding, after layer 0. */
enum moe_status moe_full_final_grad(const struct moe_context *c, struct moe_decoder_pass *p,
				    struct moe_tensor *in, int n, bool first);
enum moe_status moe_full_embed_grads(const struct moe_context *c, struct moe_decoder_pass *p,
				     bool first);

/* Sums of squares [n_squares] of all slices; norm: the decoder's handles. */
enum moe_status moe_full_grad_norm(const struct moe_context *c, struct moe_full_tensors *t,
				   struct moe_tensor *const *norm, double *squares);
/* Embedding, then layers in order, final norm, head. */
enum moe_status moe_full_update_embed(const struct moe_context *c, struct moe_full_tensors *t,
				      const struct moe_decoder_step *o,
				      struct moe_tensor *norm_ready);
enum moe_status moe_full_update_layer(const struct moe_context *c, struct moe_full_tensors *t,
				      int layer, const struct moe_decoder_step *o,
				      struct moe_tensor *norm_ready);
enum moe_status moe_full_update_head(const struct moe_context *c, struct moe_full_tensors *t,
				     const struct moe_decoder_step *o,
				     struct moe_tensor *norm_ready);

#endif
