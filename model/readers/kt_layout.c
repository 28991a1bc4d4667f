/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/kt_layout.h"

#include <stdio.h>

#define TILE_ROWS 16
#define COLUMN_BLOCK 3584

const char *const moe_kt_names[2 * MOE_KT_FORWARD] = { "gate",	   "up",     "down",
						       "gate_bwd", "up_bwd", "down_bwd" };

void moe_kt_file_name(char *buf, size_t size, int layer, int part, int bits, int which, int expert,
		      size_t bytes, bool scale)
{
	snprintf(buf, size, "_layer_%d/_numa_%d/INT%d_%s_%d_%zuByte_%s_.kt", layer, part, bits,
		 moe_kt_names[which], expert, bytes, scale ? "scale" : "quant");
}

/* The codes of 32 rows and a step of columns that hold (row, column): where they begin, in codes.
 */
static int64_t step_at(int bits, int64_t part_n, int64_t part_k, int64_t row, int64_t column)
{
	int64_t step = moe_kt_columns(bits),
		rows = step; /* of a block: as many as columns of a step */
	int64_t n0 = row / rows * rows, k0 = column / COLUMN_BLOCK * COLUMN_BLOCK;
	int64_t n = MOE_MIN(rows, part_n - n0), k = MOE_MIN(COLUMN_BLOCK, part_k - k0);

	return n0 * part_k + k0 * n + (row - n0) / MOE_KT_ROWS * MOE_KT_ROWS * k +
	       (column - k0) / step * step * MOE_KT_ROWS;
}

/*
 * 64 bytes of a row lie as 16 words of 4, those of 16 rows in turn. 8 bits: a byte per column. 4
 * bits: column c in the low nibble of byte c, column 64 + c in the high one, two's complement.
 */
static int64_t byte_at(int bits, int64_t n, int64_t k, int64_t row, int64_t column, int *shift)
{
	int64_t in = column % COLUMN_BLOCK % moe_kt_columns(bits), at = in % 64;

	*shift = (int)(in / 64) * 4;
	return step_at(bits, n, k, row, column) * bits / 8 +
	       row % MOE_KT_ROWS / TILE_ROWS * TILE_ROWS * 64 + at / 4 * 64 + row % TILE_ROWS * 4 +
	       at % 4;
}

void moe_kt_read_codes(int bits, int64_t n, int64_t k, const uint8_t *data, int64_t row, int64_t k0,
		       int64_t count, uint8_t *out)
{
	int shift;

	for (int64_t c = k0; c < k0 + count; c++) {
		int64_t at = byte_at(bits, n, k, row, c, &shift);

		if (bits == 8)
			*out++ = data[at];
		else
			*out++ = (uint8_t)((data[at] >> shift & 15) ^ 8);
	}
}

void moe_kt_write_codes(int bits, int64_t n, int64_t k, const uint8_t *codes, int64_t row,
			uint8_t *data)
{
	int shift;

	for (int64_t c = 0; c < k; c++) {
		int64_t at = byte_at(bits, n, k, row, c, &shift);

		if (bits == 8)
			data[at] = codes[c];
		else
			data[at] |= (uint8_t)(((codes[c] ^ 8) & 15) << shift);
	}
}
