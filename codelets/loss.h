/* SPDX-License-Identifier: Apache-2.0 */
/* loss: from the chunks' maxima and sums to each row's log-sum-exp and loss. loss_total: their
 * sums. */
#ifndef MOE_CODELETS_LOSS_H
#define MOE_CODELETS_LOSS_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_loss, moe_cl_loss_total;

#endif
