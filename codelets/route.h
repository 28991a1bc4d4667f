/* SPDX-License-Identifier: Apache-2.0 */
/* route: router logits, the k experts and weights of tokens t0..t1, and their share of mean probabilities. */
#ifndef MOE_CODELETS_ROUTE_H
#define MOE_CODELETS_ROUTE_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_route;
/* Bytes of scratch. */
size_t moe_route_scratch(const struct moe_experts *l);

#endif
