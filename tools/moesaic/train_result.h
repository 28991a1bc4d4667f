/* SPDX-License-Identifier: Apache-2.0 */
/* What moesaic train prints when training has ended. */
#ifndef MOESAIC_TOOL_TRAIN_RESULT_H
#define MOESAIC_TOOL_TRAIN_RESULT_H

#include "tools/moesaic/model.h"

/* A line of JSON on stdout. */
void train_result_json(const struct tool_model *m, const struct moe_train_result *r);
/* A few lines of text. best: the result is the best evaluation's. */
void train_result_print(const struct tool_model *m, const struct moe_train_result *r, bool best, const char *output,
			FILE *to);

#endif
