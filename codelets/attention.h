/* SPDX-License-Identifier: Apache-2.0 */
/* attention: query rows t0..t1 of heads h0..h1. */
#ifndef MOE_CODELETS_ATTENTION_H
#define MOE_CODELETS_ATTENTION_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_attention;

#endif
