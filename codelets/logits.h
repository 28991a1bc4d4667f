/* SPDX-License-Identifier: Apache-2.0 */
/* logits: one chunk of the vocabulary for rows r0..r1, and its share of the softmax. */
#ifndef MOE_CODELETS_LOGITS_H
#define MOE_CODELETS_LOGITS_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_logits;

#endif
