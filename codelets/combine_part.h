/* SPDX-License-Identifier: Apache-2.0 */
/*
 * combine_part: for one part and a run of chunks of H, each token's rows summed in slot order: y by routing
 * weight in the forward, the rows' grad_x unweighted in the backward. With one part `combine` and
 * `combine_bwd` do it themselves, for their tokens.
 */
#ifndef MOE_CODELETS_COMBINE_PART_H
#define MOE_CODELETS_COMBINE_PART_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_combine_part;

/* out[0, h1 - h0) = the sum over token t's slots; scratch for moe_combine_scratch bytes. */
void moe_combine_slots(const struct moe_token_args *a, int part, int t, int h0, int h1, float *out,
		       void *scratch);
size_t moe_combine_scratch(const struct moe_experts *l);

#endif
