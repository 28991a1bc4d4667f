/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a token file to micro-batches and steps: which packs, in which order, and the arrays that a
 * pass reads. Everything follows from (file, parameters, seed, epoch): resuming needs no more than
 * the number of the step.
 */
#ifndef MOE_TRAIN_BATCHES_H
#define MOE_TRAIN_BATCHES_H

#include "codelets/decoder.h"
#include "model/tokens.h"

struct moe_order_params {
	int batch_size;	  /* packs per micro-batch; 0: as many as fit batch_tokens */
	int batch_tokens; /* > 0 */
	int accumulation; /* micro-batches per step */
	bool keep_order;
	bool drop_last; /* with batch_size: an epoch's last micro-batch only where it is as large */
	uint64_t seed;
};

/* One epoch: micro-batch m holds packs pack[micro[m]] .. pack[micro[m + 1] - 1]. */
struct moe_epoch {
	int64_t *pack;	/* [n_rows] in training order */
	int64_t *micro; /* [n_micro + 1] */
	int64_t n_micro, n_steps;
};

enum moe_status moe_epoch_create(const struct moe_tokens *t, const struct moe_order_params *p,
				 int64_t epoch, struct moe_epoch *out);
void moe_epoch_free(struct moe_epoch *e);
/* Largest micro-batch of the epoch in tokens. */
int64_t moe_epoch_max_tokens(const struct moe_tokens *t, const struct moe_epoch *e);

/* Arrays of one micro-batch, owned. */
struct moe_batch_buffer {
	struct moe_batch batch;
	int32_t *arrays;
};
/* Packs list[0..n) of the file. MOE_ERR_NOMEM, MOE_ERR_ARG (more than INT32_MAX tokens). */
enum moe_status moe_batch_build(const struct moe_tokens *t, const int64_t *list, int64_t n,
				struct moe_batch_buffer *out);
void moe_batch_free(struct moe_batch_buffer *b);

#endif
