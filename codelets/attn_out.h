/* SPDX-License-Identifier: Apache-2.0 */
/* attn_out: x_mid = x + o projection, and its norm, of tokens t0..t1. */
#ifndef MOE_CODELETS_ATTN_OUT_H
#define MOE_CODELETS_ATTN_OUT_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_attn_out;

#endif
