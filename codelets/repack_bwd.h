/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repack_bwd: the transposed copies of one group and part that the backward is about to multiply
 * by. Only of experts that have rows in this micro-batch: the others' are not read.
 */
#ifndef MOE_CODELETS_REPACK_BWD_H
#define MOE_CODELETS_REPACK_BWD_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_repack_bwd;

#endif
