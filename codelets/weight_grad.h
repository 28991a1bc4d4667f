/* SPDX-License-Identifier: Apache-2.0 */
/* weight_grad: gradients of one base matrix (args->matrix) of one group and part. */
#ifndef MOE_CODELETS_WEIGHT_GRAD_H
#define MOE_CODELETS_WEIGHT_GRAD_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_weight_grad;

#endif
