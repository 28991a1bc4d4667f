/* SPDX-License-Identifier: Apache-2.0 */
/* gate_up_bwd: the rows' grad_x through gate and up, for a run of chunks of H. */
#ifndef MOE_CODELETS_GATE_UP_BWD_H
#define MOE_CODELETS_GATE_UP_BWD_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_gate_up_bwd;

#endif
