/* SPDX-License-Identifier: Apache-2.0 */
/* How long a step takes, predicted from a model's shapes and the machine's rates. Private to api/.
 */
#ifndef MOE_API_ESTIMATE_TIME_H
#define MOE_API_ESTIMATE_TIME_H

#include "api/model.h"

struct moe_step_load {
	int tokens, document_tokens; /* of a micro-batch; of each document in it */
	int micro_batches, workers, lowest_trained_layer;
	int64_t trainable_params, tasks; /* of the whole step */
};

/*
 * Microseconds of work of all workers together: the sum over what the tasks do, by the same
 * functions as the codelets' cost models, with the rows that equally likely experts would get.
 * Attention is counted as causal in each document; the head for every token.
 */
double moe_step_work_us(const struct moe_model *m, const struct moe_step_load *l);

#endif
