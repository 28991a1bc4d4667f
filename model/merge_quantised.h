/* SPDX-License-Identifier: Apache-2.0 */
/* Merging by way of a conversion: where weights are or become quantised. Private to model/merge*.c.
 */
#ifndef MOE_MODEL_MERGE_QUANTISED_H
#define MOE_MODEL_MERGE_QUANTISED_H

#include "model/merge_shards.h"

/* A tensor that the adapter changes is quantised. */
enum moe_status moe_merge_is_quantised(const struct moe_merge_shards *m, bool *out);
/*
 * Weights are dequantised, added to and quantised again as they were, or as p->weights says. What
 * an earlier call left in OUT.partial is taken up.
 */
enum moe_status moe_merge_quantised(const struct moe_merge_shards *m,
				    const struct moe_merge_params *p,
				    struct moe_merge_result *result);

#endif
