/* SPDX-License-Identifier: Apache-2.0 */
/* router_grad: gradient of the router's weight over all tokens of the micro-batch. */
#ifndef MOE_CODELETS_ROUTER_GRAD_H
#define MOE_CODELETS_ROUTER_GRAD_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_router_grad;

#endif
