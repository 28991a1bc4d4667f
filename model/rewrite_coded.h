/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised tensors of a checkpoint that is written anew, in the layout they have. Private to
 * model/rewrite*.c. */
#ifndef MOE_MODEL_REWRITE_CODED_H
#define MOE_MODEL_REWRITE_CODED_H

#include "model/merge_shards.h"
#include "model/quantised.h"

struct moe_rewrite;
struct moe_file_writer;

/* Marks codes, scales and zeros of a role's weight, if it is quantised. */
enum moe_status moe_rewrite_mark_coded(struct moe_merge_shards *m, const struct moe_rewrite *r,
				       enum moe_role role, int layer, int expert);
/* Writes one of them. */
enum moe_status moe_rewrite_coded_tensor(struct moe_merge_shards *m, struct moe_file_writer *w,
					 const struct moe_st_tensor *t,
					 const struct moe_merge_job *job);

#endif
