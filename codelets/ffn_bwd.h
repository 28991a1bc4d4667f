/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ffn_bwd: backward of a dense SwiGLU for tokens t0..t1. residual is grad_out [T, H]. Leaves dgate, dup (in the
 * state, for weight gradients) and out = grad_x, through norm.
 */
#ifndef MOE_CODELETS_FFN_BWD_H
#define MOE_CODELETS_FFN_BWD_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_ffn_bwd;
/* Bytes of scratch of ffn_up, ffn_down and ffn_bwd. */
size_t moe_ffn_scratch(const struct moe_ffn *f);

#endif
