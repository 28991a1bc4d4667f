/* SPDX-License-Identifier: Apache-2.0 */
/* down: y = h W_down^T with LoRA, for a run of chunks of H. */
#ifndef MOE_CODELETS_DOWN_H
#define MOE_CODELETS_DOWN_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_down;

#endif
