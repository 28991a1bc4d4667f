/* SPDX-License-Identifier: Apache-2.0 */
/* AMX's kernels over emulated tiles, for tests: never the default, built only with them. */
#include "codelets/kernels/amx/amx.h"

#define MOE_TILES moe_tiles_amx_emulated
#include "codelets/kernels/packed/table.h"

static bool always(void)
{
	return true;
}

extern const struct moe_kernels moe_kernels_amx_emulated;
const struct moe_kernels moe_kernels_amx_emulated = {
	.name = "amx_emulated",
	.rank = -1,
	.supported = always,
	.rank_pad = 32,
	.panel_bytes = sizeof(uint16_t),
	MOE_PACKED_KERNELS,
};
