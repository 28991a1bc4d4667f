/* SPDX-License-Identifier: Apache-2.0 */
/* loss_bwd: rows' gradient summed over chunks, through the final norm, into the cleared tokens
 * t0..t1. */
#ifndef MOE_CODELETS_LOSS_BWD_H
#define MOE_CODELETS_LOSS_BWD_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_loss_bwd;

#endif
