/* SPDX-License-Identifier: Apache-2.0 */
/* linear_grad: LoRA gradients of one attention projection over all tokens. Off the critical path.
 */
#ifndef MOE_CODELETS_LINEAR_GRAD_H
#define MOE_CODELETS_LINEAR_GRAD_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_linear_grad;

#endif
