/* SPDX-License-Identifier: Apache-2.0 */
/* gather: copies the group's rows of x into its panel, and u = x A_gu^T. */
#ifndef MOE_CODELETS_GATHER_H
#define MOE_CODELETS_GATHER_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_gather;

#endif
