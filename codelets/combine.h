/* SPDX-License-Identifier: Apache-2.0 */
/* combine: the block's output of tokens t0..t1: parts in order, shared experts, residual. */
#ifndef MOE_CODELETS_COMBINE_H
#define MOE_CODELETS_COMBINE_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_combine;

#endif
