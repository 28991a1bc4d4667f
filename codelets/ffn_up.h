/* SPDX-License-Identifier: Apache-2.0 */
/* ffn_up: gate, up and h of a dense SwiGLU for tokens t0..t1, and the sigmoid gate of shared experts. */
#ifndef MOE_CODELETS_FFN_UP_H
#define MOE_CODELETS_FFN_UP_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_ffn_up;

#endif
