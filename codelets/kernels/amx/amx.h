/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiles (packed/tiles.h) over AMX. Weights lie in BLOCKS32, whose 1 KB block is a tile:
 *
 * forward	y^T = W x^T. A block of W is the left operand as it is; panels of x hold pairs of
 *		columns by rows, the right operand; results are transposed when they are stored.
 * backward	dx = dy W. Panels of dy are rows, the left operand; two rows of W are interleaved
 *into the right one, once per call. gradients	c = a^T b. Pair arrays are the right operand; for
 *the left one they are transposed.
 *
 * Rows are taken in tiles of 16, the last one with the rows that are left.
 *
 * Forward panel, tile of r rows: [width/2][r][2]. Backward panel: [width/32][r][32], then
 * [r][16] where width is an odd multiple of 16.
 */
#ifndef MOE_CODELETS_KERNELS_AMX_AMX_H
#define MOE_CODELETS_KERNELS_AMX_AMX_H

#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/packed/coded.h"

/* tiles.c: moe_tiles_amx or moe_tiles_amx_emulated */
#define AMX_TILES MOE_OWN_EXPAND(moe_tiles, MOE_ISA)
extern const struct moe_tiles AMX_TILES;

/* 16 x 16 words of 32 bits in place; 64-byte aligned */
void OWN(transpose)(uint32_t word[16][16]);

/* panels.c */
void OWN(pack_fwd_bf16)(int m, const uint16_t *src, int64_t ld, const int32_t *token, int64_t k,
			int64_t kp, void *panel, int64_t width, int64_t col);
void OWN(pack_fwd)(int m, const float *src, int64_t ld, const int32_t *token, int64_t k, int64_t kp,
		   void *panel, int64_t width, int64_t col);
void OWN(pack_bwd)(int m, const float *src, int64_t ld, const int32_t *token, int64_t k, int64_t kp,
		   void *panel, int64_t width, int64_t col);
void OWN(unpack_fwd)(int m, const void *panel, int64_t width, int64_t col, int64_t k, float *dst,
		     int64_t ld);
void OWN(unpack_bwd)(int m, const void *panel, int64_t width, int64_t col, int64_t k, float *dst,
		     int64_t ld);
/* Element (0, col) of the tile that begins at row `row` of a backward panel; col in its block. */
static inline int64_t amx_bwd_at(int row, int rows, int64_t width, int64_t col)
{
	return row * width + col / 32 * 32 * rows + col % 32;
}
/* Elements between rows there. */
static inline int64_t amx_bwd_ld(int64_t width, int64_t col)
{
	return col / 32 * 32 + 32 > width ? 16 : 32;
}

/* gemm.c */
void OWN(tile_fwd)(int m, const struct moe_fwd_seg *seg, int nseg, const uint16_t *next, float *y,
		   int64_t ldy, enum moe_out out);
size_t OWN(bwd_scratch)(int m, int64_t n, int columns);
void OWN(tile_bwd)(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
		   int64_t ldy, enum moe_out out, void *scratch);

/*
 * For weights of 8 bits: y[m, 16] = x W^T in exact integers. w: 16 rows in blocks of 16 n x 64 k
 * ([k/64][16][64]), k a multiple of 64. Panel: pack_s8 of rows src [m, k], ld bytes apart; m * k
 * bytes.
 */
void OWN(pack_s8)(int m, const int8_t *src, int64_t ld, int64_t k, int8_t *panel);
void OWN(tile_fwd_s8)(int m, int64_t k, const int8_t *panel, const int8_t *w, int32_t *y,
		      int64_t ldy);

/* ints.c: struct moe_tiles.fwd_ints */
struct moe_int_rows;
void OWN(fwd_ints)(const struct moe_int_rows *x, const struct moe_coded_panel *p, const char *next, float *y,
		   int64_t ldy, enum moe_out out);

/* grad.c */
void OWN(pairs)(int m, const float *src, int64_t ld, const int32_t *token, const float *scale,
		int cols, void *dst);
void OWN(pairs_bf16)(int m, const uint16_t *src, int64_t ld, const int32_t *token, int cols,
		     void *dst);
void OWN(tile_grad)(int m, const void *a, int64_t lda, int na, const void *b, int64_t ldb, int nb,
		    float scale, float *c, int64_t ldc, enum moe_out out);

#endif
