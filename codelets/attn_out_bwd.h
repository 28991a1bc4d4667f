/* SPDX-License-Identifier: Apache-2.0 */
/* attn_out_bwd: the gradient at the attention's output of tokens t0..t1. */
#ifndef MOE_CODELETS_ATTN_OUT_BWD_H
#define MOE_CODELETS_ATTN_OUT_BWD_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_attn_out_bwd;

#endif
