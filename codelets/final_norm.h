/* SPDX-License-Identifier: Apache-2.0 */
/* final_norm: gathers rows r0..r1 of the last layer's output and normalises them. */
#ifndef MOE_CODELETS_FINAL_NORM_H
#define MOE_CODELETS_FINAL_NORM_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_final_norm;

#endif
