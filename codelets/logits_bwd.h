/* SPDX-License-Identifier: Apache-2.0 */
/* logits_bwd: gradient of one chunk of logits, in place, and its share of the rows' gradient. */
#ifndef MOE_CODELETS_LOGITS_BWD_H
#define MOE_CODELETS_LOGITS_BWD_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_logits_bwd;

#endif
