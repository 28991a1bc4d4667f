/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The training loop. A step (all its micro-batches, gradient norm, update) is submitted whole; up
 * to two steps are in flight, so the next step's forward starts on layers that are updated already.
 * The loop waits only between steps.
 */
#ifndef MOE_TRAIN_TRAIN_H
#define MOE_TRAIN_TRAIN_H

#include "graphs/decoder.h"
#include "train/batches.h"

/* What is trained: a view of the model object, which owns it all. */
struct moe_trainee {
	struct moe_engine *engine;
	const struct moe_decoder *decoder;
	struct moe_decoder_tensors *tensors;
	struct moe_decoder_slot *slot; /* [n_slots]; set by reserve */
	int n_slots, T_max;
	int64_t max_positions; /* of a document */
	const char *base;      /* directory of the base model */
	bool whole, adapter;   /* what save_adapter leaves in the output directory: a model, an adapter */
	int64_t adapter_bytes; /* of its files; 0: none */
	void *user;
	/* adds the bytes of the model that save_adapter leaves; only where `whole` */
	enum moe_status (*model_bytes)(void *user, int64_t *bytes);
	/* slots for T tokens; may replace slot, n_slots, T_max. Nothing is outstanding. */
	enum moe_status (*reserve)(struct moe_trainee *t, int T, int slots);
	/* adapter files into an existing directory; into the output directory also weights that are
	 * trained themselves */
	enum moe_status (*save_adapter)(void *user, const char *dir);
};

/* What is wrong with the parameters themselves. */
enum moe_status moe_train_check_params(const struct moe_trainer_params *p);
enum moe_status moe_train_run(struct moe_trainee *t, const struct moe_trainer_params *p,
			      moe_train_fn fn, void *user, struct moe_train_result *result);

/* Loss by document over all packs; doc_sum and doc_n are [n_docs] of the caller. Waits. */
enum moe_status moe_train_evaluate(struct moe_trainee *t, const struct moe_tokens *tokens,
				   int batch_tokens, double *doc_sum, int64_t *doc_n);

double moe_rss_gib(void);
double moe_peak_rss_gib(void);

#endif
