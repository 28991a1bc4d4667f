/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AMX tiles in plain C for the tests: each thread has its eight tiles. What the CPU would answer
 * with #UD (no configuration, shapes that don't fit) and what it would let pass though no kernel
 * here means it (overlapping rows, a configuration left behind) is an assertion. Loads and stores
 * touch the rows and bytes of the tile's shape and nothing else, so that AddressSanitizer sees what
 * is outside. Products are summed as Intel's manual says, but subnormals are not flushed to zero.
 */
#ifndef MOE_CODELETS_KERNELS_AMX_TILE_EMULATED_H
#define MOE_CODELETS_KERNELS_AMX_TILE_EMULATED_H

#include "codelets/kernels/elementwise/elementwise.h" /* OWN */

#define amx_load_config OWN(load_config)
#define amx_release OWN(release)
#define amx_zero OWN(zero)
#define amx_load OWN(load)
#define amx_store OWN(store)
#define amx_dp_bf16 OWN(dp_bf16)
#define amx_dp_s8 OWN(dp_s8)

void amx_load_config(const struct amx_config *config);
void amx_release(void);
void amx_zero(int tile);
void amx_load(int tile, const void *from, int64_t stride);
void amx_store(int tile, void *to, int64_t stride);
void amx_dp_bf16(int c, int a, int b);
void amx_dp_s8(int c, int a, int b);

#endif
