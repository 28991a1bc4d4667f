/* SPDX-License-Identifier: Apache-2.0 */
/* gate_up: gate and up GEMMs with LoRA, SwiGLU, and partial h A_down^T, for a run of chunks of I. */
#ifndef MOE_CODELETS_GATE_UP_H
#define MOE_CODELETS_GATE_UP_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_gate_up;

#endif
