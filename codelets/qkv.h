/* SPDX-License-Identifier: Apache-2.0 */
/* qkv: norm, q, k and v projections with LoRA, q and k norms, rope, of tokens t0..t1. */
#ifndef MOE_CODELETS_QKV_H
#define MOE_CODELETS_QKV_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_qkv;

#endif
