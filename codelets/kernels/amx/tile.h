/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AMX's tile instructions under names of our own, so that MOE_AMX_EMULATED can put plain C behind
 * them (tile_emulated.h). Tile numbers are literals 0..7: gcc pastes them into the assembly text.
 *
 * A kernel loads its configuration and releases it before it returns. gcc's intrinsics don't tell
 * the compiler that memory is read: the barriers here keep its stores before them.
 */
#ifndef MOE_CODELETS_KERNELS_AMX_TILE_H
#define MOE_CODELETS_KERNELS_AMX_TILE_H

#include "engine/base.h"

#define AMX_ROWS 16
#define AMX_ROW_BYTES 64

/* The 64 bytes that ldtilecfg reads. A tile with 0 rows is not configured. */
struct amx_config {
	uint8_t palette; /* 1 */
	uint8_t start_row;
	uint8_t reserved[14];
	uint16_t row_bytes[16];
	uint8_t rows[16];
} __attribute__((aligned(64)));

static inline void amx_shape(struct amx_config *c, int tile, int rows, int row_bytes)
{
	c->rows[tile] = (uint8_t)rows;
	c->row_bytes[tile] = (uint16_t)row_bytes;
}

#ifdef MOE_AMX_EMULATED
#include "codelets/kernels/amx/tile_emulated.h"
#else
#include <immintrin.h>

#define AMX_BARRIER() __asm__ volatile("" ::: "memory")
#define amx_load_config(config)                                                                    \
	do {                                                                                       \
		AMX_BARRIER();                                                                     \
		_tile_loadconfig(config);                                                          \
	} while (0)
#define amx_release() _tile_release()
#define amx_zero(tile) _tile_zero(tile)
#define amx_load(tile, from, stride)                                                               \
	do {                                                                                       \
		AMX_BARRIER();                                                                     \
		_tile_loadd(tile, from, stride);                                                   \
	} while (0)
#define amx_store(tile, to, stride) _tile_stored(tile, to, stride)
/* c [m][n] f32 += a [m][k pairs of bf16] b [k][n pairs of bf16] */
#define amx_dp_bf16(c, a, b) _tile_dpbf16ps(c, a, b)
/* c [m][n] i32 += a [m][k quads of s8] b [k][n quads of s8] */
#define amx_dp_s8(c, a, b) _tile_dpbssd(c, a, b)
#endif

#endif
