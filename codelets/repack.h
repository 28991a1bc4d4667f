/* SPDX-License-Identifier: Apache-2.0 */
/* repack: packed weights of one group and part from f32 masters that have changed, and their
 * transposed copies. */
#ifndef MOE_CODELETS_REPACK_H
#define MOE_CODELETS_REPACK_H

#include "codelets/moe.h"

struct moe_codelet;

struct moe_repack_args {
	const struct moe_experts *layer;
	int part, group;
	const float *gate, *up,
		*down; /* of all experts, the part's: [E][I, H], [E][I, H], [E][H, I] */
};

extern struct moe_codelet moe_cl_repack;

#endif
