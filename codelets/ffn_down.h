/* SPDX-License-Identifier: Apache-2.0 */
/* ffn_down: out = residual + h W_down^T (scaled by the sigmoid gate) for tokens t0..t1. */
#ifndef MOE_CODELETS_FFN_DOWN_H
#define MOE_CODELETS_FFN_DOWN_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_ffn_down;

#endif
