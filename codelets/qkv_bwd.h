/* SPDX-License-Identifier: Apache-2.0 */
/* qkv_bwd: from gradients of q, k, v to those at the projections and, if wanted, at x. */
#ifndef MOE_CODELETS_QKV_BWD_H
#define MOE_CODELETS_QKV_BWD_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_qkv_bwd;

#endif
