/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward of quantised weights by integer dot products (enum moe_compute). Codes become unsigned bytes u with
 * value = unit (u - offset); rows of x become integers per block of 32 or 64 columns:
 *
 *	x = scale q, q = round(x / scale), |q| <= 127 (INT8); q = 128 hi + lo in two planes of signed bytes (INT16)
 *	y[n] = sum over blocks of scale w[n, group] (sum of (u - offset) q - zero[n, group] sum of q)
 *
 * Sums of a block are exact integers; blocks are added in f32 in order, each by one fused multiply-add. So every table
 * has the same bits, for any number of rows.
 */
#ifndef MOE_CODELETS_KERNELS_PACKED_INTS_H
#define MOE_CODELETS_KERNELS_PACKED_INTS_H

#include "codelets/kernels/packed/coded.h"

#define MOE_INT_ROWS 10 /* rows times planes of a tile, unless a table says otherwise (int16_tile) */
#define MOE_INT_MOST 16 /* and the most that one may say */
#define MOE_INT_BLOCK 64
#define MOE_INT16_ROWS 16 /* beyond, decoding once is faster than two planes, unless a table says otherwise (int16_rows) */
#define MOE_INT_LEAST 32   /* groups of weights begin at multiples of this */
#define MOE_INT_LARGEST 127 /* |q| of one plane */
#define MOE_INT_LARGEST2 16256 /* of two: hi at most 127 */
#define MOE_INT_TINY 0x1p-100f /* blocks of smaller values are 0 */

enum moe_int_kind {
	MOE_INT_BYTES,	 /* 8 bits: u is the code with its top bit flipped */
	MOE_INT_NIBBLES, /* 4 bits: u is the code */
	MOE_INT_TABLE,	 /* 4 bits: u is looked up */
};

struct moe_int_codes {
	enum moe_int_kind kind;
	int offset;
	float unit;
	uint8_t table[16];
};

/*
 * m rows of x, in tiles of one number of rows or one more (moe_int_tile). With v = rows * planes, first the row's index
 * and then the plane counting, a tile is q [k/4][v][4 bytes]; start [blocks][v] = -offset (sum of a block's q); scale,
 * sum [blocks][rows]: of the block (unit included), and of its q.
 */
struct moe_int_rows {
	int m, planes, block, blocks;
	int limit; /* rows of a tile */
	int64_t k; /* padded */
	struct moe_int_codes codes;
	int8_t *q;
	int32_t *start;
	float *scale, *sum;
};

/* Rows of tile `index`, or 0 past the last; *first: its first row */
static inline int moe_int_tile(const struct moe_int_rows *x, int index, int *first)
{
	int count = (x->m + x->limit - 1) / x->limit;
	int rows = x->m / count, longer = x->m % count;

	*first = index * rows + MOE_MIN(index, longer);
	return index < count ? rows + (index < longer) : 0;
}

/* Columns that share a scale of x; 0: integers do not take the coding. */
int moe_int_block(const struct moe_coding *c, int64_t k);
/* What m rows are multiplied by the weight in. */
enum moe_compute moe_coded_compute(const struct moe_tiles *t, const struct moe_weight *W, int m);

/* Memory that moe_int_operand takes for m rows of k columns of weights with that compute or a narrower one. */
size_t moe_int_bytes(const struct moe_tiles *t, enum moe_compute compute, int m, int64_t k);
/* A forward panel [m, width] as operand of W; NULL where W is multiplied in bf16. */
const struct moe_int_rows *moe_int_operand(const struct moe_tiles *t, int m, const struct moe_weight *W,
					   const void *panel, int64_t width, void *memory);
/* An operand of one weight is one of the other's too. */
bool moe_int_alike(const struct moe_weight *a, const struct moe_weight *b);

/* struct moe_tiles.int_block and fwd_ints in plain C */
void moe_int_block_plain(int rows, int planes, int n, const float *x, int64_t ld, int8_t *q,
			 int32_t *sum, float *scale);
void moe_int_forward_plain(const struct moe_int_rows *x, const struct moe_coded_panel *p,
			   const char *next, float *y, int64_t ldy, enum moe_out out);

#endif
