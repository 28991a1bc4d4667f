/* SPDX-License-Identifier: Apache-2.0 */
/*
 * route_bwd: gradients of the routing weights of tokens t0..t1 from the parts' and chunks' partial sums, and of
 * the router logits (with the shares of load-balancing and z-loss).
 */
#ifndef MOE_CODELETS_ROUTE_BWD_H
#define MOE_CODELETS_ROUTE_BWD_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_route_bwd;

#endif
