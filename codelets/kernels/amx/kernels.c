/* SPDX-License-Identifier: Apache-2.0 */
/* The table for AMX: Sapphire Rapids and later. Compiled everywhere, run nowhere so far. */
#include "codelets/kernels/amx/amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOE_TILES moe_tiles_amx
#include "codelets/kernels/packed/table.h"

/* asm/prctl.h; Debian 11's headers lack it */
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_CONFIG 17		  /* state components of XSAVE */
#define TILE_DATA 18

/* What XGETBV says the operating system saves; 0 without XSAVE. */
static uint64_t saved_state(void)
{
	uint32_t a, b, c, d;

	if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
		return 0;
	__asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
	return a | (uint64_t)d << 32;
}

/* Leaf 7, register edx */
#define AMX_BF16 (1u << 22)
#define AMX_TILE (1u << 24)
#define AMX_INT8 (1u << 25)

static bool supported(void)
{
	const uint32_t amx = AMX_BF16 | AMX_TILE | AMX_INT8;
	const uint64_t state = 1u << TILE_CONFIG | 1u << TILE_DATA;
	uint32_t a, b, c, d;

	__builtin_cpu_init();
	if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
	    !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
	    !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("fma"))
		return false;
	if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & amx) != amx)
		return false;
	return (saved_state() & state) == state;
}

/* Linux hands out the 8 KB of tiles a thread needs only to processes that asked; threads that are
 * made later inherit the permission. */
static bool enable(void)
{
	return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

extern const struct moe_kernels moe_kernels_amx;
const struct moe_kernels moe_kernels_amx = {
	.name = "amx",
	.rank = 40,
	.supported = supported,
	.enable = enable,
	.rank_pad = 32,
	.panel_bytes = sizeof(uint16_t),
	MOE_PACKED_KERNELS,
};
