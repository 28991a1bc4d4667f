/* SPDX-License-Identifier: Apache-2.0 */
/*
 * down_bwd: through W_down and SwiGLU for a run of chunks of I: dgate, dup, the routing-weight gradient,
 * partial projections on B_gate and B_up, and the LoRA gradients of the I side.
 */
#ifndef MOE_CODELETS_DOWN_BWD_H
#define MOE_CODELETS_DOWN_BWD_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_down_bwd;

#endif
