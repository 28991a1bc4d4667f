/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything trainable of a decoder as a list of named arrays, in kt layout: the same for every
 * number of parts. For saving and restoring training state and for finding the first bad gradient.
 */
#ifndef MOE_TRAIN_PARAMS_H
#define MOE_TRAIN_PARAMS_H

#include "codelets/decoder.h"
#include "graphs/moe_state.h"

struct moe_train_array {
	char name[96];			 /* layers.3.experts.gate_lora_a, layers.3.q_proj.lora_b */
	const struct moe_trained *whole; /* a dense weight that is trained itself, or NULL */
	struct moe_experts *experts;	 /* or NULL */
	bool base; /* of experts: matrix of their weights, not array of their LoRA */
	enum moe_expert_matrix matrix;
	enum moe_lora_array array;
	struct moe_param *param; /* of a dense layer, or NULL */
	int pieces;		 /* E or 1 */
	int64_t piece;		 /* elements of one */
};

/* Of params_whole.c: out NULL only counts. */
size_t moe_train_whole_layer(const struct moe_decoder_layer *layer, int l,
			     struct moe_train_array *out);
size_t moe_train_whole_ends(const struct moe_decoder *d, struct moe_train_array *out);
void moe_train_whole_get(const struct moe_train_array *a, enum moe_param_field f, int piece,
			 float *dst);
void moe_train_whole_set(const struct moe_train_array *a, enum moe_param_field f, int piece,
			 const float *src);
/* *out [*n] is the caller's (moe_free). */
enum moe_status moe_train_arrays(const struct moe_decoder *d, struct moe_train_array **out,
				 size_t *n);

struct moe_train_progress {
	int64_t step, tokens, trained_tokens, skipped;	  /* skipped: steps without an update */
	double seconds, first_loss, last_loss, eval_loss; /* NaN: none */
	/* the least evaluation loss so far and its step; 0: none */
	double best_loss;
	int64_t best_step;
	int64_t *expert_rows; /* [n_layers][E] slots so far, of the caller; NULL: not loaded */
	int64_t n_expert_rows;
	/* what the order of the data depends on */
	const char *data_hash; /* NULL: "" */
	uint64_t seed;
	int64_t order_seed, batch_size, batch_tokens, accumulation, keep_order, drop_last, packs;
};
/* Values, moments and progress into dir (state.safetensors, state.json). */
enum moe_status moe_train_state_save(const struct moe_decoder *d, const char *dir,
				     const struct moe_train_progress *p);
/* The reverse. p comes in with the run's own settings and is checked: MOE_ERR_ARG names a
 * difference. */
enum moe_status moe_train_state_load(const struct moe_decoder *d, const char *dir,
				     struct moe_train_progress *p);
/* Name of the first array with a non-finite gradient (or value) into buf; false: none. */
bool moe_train_first_bad(const struct moe_decoder *d, char *buf, size_t size);
/* The same for what a checkpoint holds: values and moments. */
bool moe_train_bad_value(const struct moe_decoder *d, char *buf, size_t size);

#endif
