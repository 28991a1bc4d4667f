/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An adapter folded into the weights of its base model: a copy of the checkpoint folder in which
 * the adapted tensors are W + scaling B A, rounded to their dtype; every other byte is the base's.
 */
#ifndef MOE_MODEL_MERGE_H
#define MOE_MODEL_MERGE_H

#include "engine/base.h"

/*
 * Streams shard by shard; memory: the adapter, and a few MiB. output_dir is as for
 * moe_staging_begin. MOE_ERR_FORMAT: the adapter is of another model; MOE_ERR_UNSUPPORTED: an
 * adapted tensor is quantised; MOE_ERR_NOFIT: the disk has too little room; MOE_ERR_INTERRUPTED:
 * progress said so.
 */
enum moe_status moe_merge_run(const struct moe_merge_params *p, struct moe_merge_result *result);

#endif
