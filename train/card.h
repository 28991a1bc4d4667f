/* SPDX-License-Identifier: Apache-2.0 */
/* README.md of an output directory: the model card of the adapter or model beside it. */
#ifndef MOE_TRAIN_CARD_H
#define MOE_TRAIN_CARD_H

#include "model/tokens.h"

struct moe_train_card {
	const char *base;    /* directory of the model that was trained */
	const char *output;  /* of what is beside it */
	bool whole, adapter; /* what is beside it: a model, an adapter */
	const struct moe_tokens *tokens;
	int64_t steps, trained_tokens;
	double first_loss, last_loss, eval_loss; /* NaN: none */
	double learning_rate;
	int64_t best_step; /* what was trained is of this step; 0: the last */
};
/* Replaces dir/README.md. */
enum moe_status moe_train_card_write(const char *dir, const struct moe_train_card *c);

#endif
