/* SPDX-License-Identifier: Apache-2.0 */
/*
 * combine_part: for one part and a run of chunks of H, each token's rows summed in slot order: y by routing
 * weight in the forward, the rows' grad_x unweighted in the backward.
 */
#ifndef MOE_CODELETS_COMBINE_PART_H
#define MOE_CODELETS_COMBINE_PART_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_combine_part;

#endif
