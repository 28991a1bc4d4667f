/* SPDX-License-Identifier: Apache-2.0 */
/*
 * combine_bwd: the gradient with respect to the block's input of tokens t0..t1: parts in order, the shared
 * experts' and the router's paths, then through the norm before the block where there is one.
 */
#ifndef MOE_CODELETS_COMBINE_BWD_H
#define MOE_CODELETS_COMBINE_BWD_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_combine_bwd;
/* Bytes of scratch. */
size_t moe_combine_bwd_scratch(const struct moe_experts *l);

#endif
