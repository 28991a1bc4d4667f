/* SPDX-License-Identifier: Apache-2.0 */
/* attention_bwd_q: gradient of q, rows t0..t1 of heads h0..h1. */
#ifndef MOE_CODELETS_ATTENTION_BWD_Q_H
#define MOE_CODELETS_ATTENTION_BWD_Q_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_attention_bwd_q;

#endif
