/* SPDX-License-Identifier: Apache-2.0 */
/* attention_bwd_kv: gradients of k and v, rows t0..t1 of kv heads h0..h1. */
#ifndef MOE_CODELETS_ATTENTION_BWD_KV_H
#define MOE_CODELETS_ATTENTION_BWD_KV_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_attention_bwd_kv;

#endif
