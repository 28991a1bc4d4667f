/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order of codes in a part [n, k] of a matrix of kt-kernel's: blocks of rows, of 3584 columns,
 * of 32 rows, of a step of columns. Backward weights are the transposed part in the same order,
 * with a scale for each of its rows.
 */
#ifndef MOE_MODEL_READERS_KT_LAYOUT_H
#define MOE_MODEL_READERS_KT_LAYOUT_H

#include "engine/base.h"

#define MOE_KT_ROWS 32 /* n is a multiple of it */
#define MOE_KT_MOST_PARTS 64
#define MOE_KT_INT4_VALUE                                                                          \
	16 /* kt's INT4 stands for so many times the code; its scales are as much smaller */

/* k is a multiple of it. bits: 8 or 4. */
static inline int64_t moe_kt_columns(int bits)
{
	return bits == 8 ? 64 : 128;
}
static inline size_t moe_kt_code_bytes(int bits, int64_t n, int64_t k)
{
	return (size_t)(n * k * bits / 8);
}

/* 0 gate, 1 up, 2 down: [I / parts, H] of a part, twice, and [H, I / parts]; then the backward
 * weights of the three. */
#define MOE_KT_FORWARD 3
extern const char *const moe_kt_names[2 * MOE_KT_FORWARD];
static inline bool moe_kt_cuts_columns(int which)
{
	return which >= 2 && which < 2 * MOE_KT_FORWARD - 1;
}
/* _layer_N/_numa_P/INT8_gate_E_<bytes>Byte_quant_.kt */
void moe_kt_file_name(char *buf, size_t size, int layer, int part, int bits, int which, int expert,
		      size_t bytes, bool scale);

/* Codes as the formats int8 (the byte) and int4 (value + 8) have them: columns k0..k0+count of a
 * row. */
void moe_kt_read_codes(int bits, int64_t n, int64_t k, const uint8_t *data, int64_t row, int64_t k0,
		       int64_t count, uint8_t *out);
/* A whole row into data. */
void moe_kt_write_codes(int bits, int64_t n, int64_t k, const uint8_t *codes, int64_t row,
			uint8_t *data);

#endif
