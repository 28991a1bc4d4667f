/* SPDX-License-Identifier: Apache-2.0 */
/* plan: from ids and weights to each expert's rows. After it, counts are final. */
#ifndef MOE_CODELETS_PLAN_H
#define MOE_CODELETS_PLAN_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_plan;

#endif
