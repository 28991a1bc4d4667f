/* SPDX-License-Identifier: Apache-2.0 */
/* The portable table: the packed drivers over plain C; for CPUs that no other table knows. */
#include "codelets/kernels/c/c.h"

#define MOE_TILES moe_tiles_c
#include "codelets/kernels/packed/table.h"

static bool always(void)
{
	return true;
}

extern const struct moe_kernels moe_kernels_c;
const struct moe_kernels moe_kernels_c = {
	.name = "c",
	.rank = 1,
	.supported = always,
	.panel_bytes = sizeof(float),
	.rank_pad = 16,
	MOE_PACKED_KERNELS,
};
