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
 * The 64 bytes of a row in a step of columns: 16 words of 4, which lie 64 bytes apart, as those of 16 rows lie in turn.
 * 8 bits: a byte per column. 4 bits: column c in the low nibble of byte c, column 64 + c in the high one, two's
 * complement.
 */
#define WORDS 16

static size_t bytes_at(int bits, int64_t n, int64_t k, int64_t row, int64_t column)
{
	return (size_t)(step_at(bits, n, k, row, column) * bits / 8 +
			row % MOE_KT_ROWS / TILE_ROWS * TILE_ROWS * 64 + row % TILE_ROWS * 4);
}

static void read_step(int bits, const uint8_t *from, uint8_t *out)
{
	for (int w = 0; w < WORDS; w++) {
		const uint8_t *word = from + 64 * w;

		if (bits == 8) {
			memcpy(out + 4 * w, word, 4);
			continue;
		}
		for (int i = 0; i < 4; i++) {
			out[4 * w + i] = (word[i] & 15) ^ 8;
			out[64 + 4 * w + i] = word[i] >> 4 ^ 8;
		}
	}
}

static void write_step(int bits, const uint8_t *codes, uint8_t *to)
{
	for (int w = 0; w < WORDS; w++) {
		uint8_t *word = to + 64 * w;

		if (bits == 8) {
			memcpy(word, codes + 4 * w, 4);
			continue;
		}
		for (int i = 0; i < 4; i++)
			word[i] = (uint8_t)(((codes[4 * w + i] ^ 8) & 15) | (codes[64 + 4 * w + i] ^ 8) << 4);
	}
}

void moe_kt_read_codes(int bits, int64_t n, int64_t k, const uint8_t *data, int64_t row, int64_t k0,
		       int64_t count, uint8_t *out)
{
	int64_t step = moe_kt_columns(bits);
	uint8_t part[128];

	while (count > 0) {
		int64_t in = k0 % step, take = MOE_MIN(step - in, count);
		const uint8_t *from = data + bytes_at(bits, n, k, row, k0);

		read_step(bits, from, take == step ? out : part);
		if (take < step)
			memcpy(out, part + in, (size_t)take);
		out += take;
		k0 += take;
		count -= take;
	}
}

void moe_kt_write_codes(int bits, int64_t n, int64_t k, const uint8_t *codes, int64_t row,
			uint8_t *data)
{
	for (int64_t c = 0; c < k; c += moe_kt_columns(bits))
		write_step(bits, codes + c, data + bytes_at(bits, n, k, row, c));
}
