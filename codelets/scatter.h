/* SPDX-License-Identifier: Apache-2.0 */
/* scatter: copies the group's rows of grad_out into its panel, and z = grad_out B_down. */
#ifndef MOE_CODELETS_SCATTER_H
#define MOE_CODELETS_SCATTER_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_scatter;

#endif
