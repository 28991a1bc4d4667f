/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed quantised weights (coded.h) written anew from floats, in place, by the rule of
 * moe_quantise_as; and read as a checkpoint's are. Blocks are those of the whole matrix: parts of
 * it that begin inside one get its scale.
 */
#ifndef MOE_CODELETS_KERNELS_PACKED_REQUANTISE_H
#define MOE_CODELETS_KERNELS_PACKED_REQUANTISE_H

#include "codelets/kernels/packed/coded.h"

#define MOE_REQUANTISE_BLOCK 32768 /* elements of one scale, at most */
#define MOE_REQUANTISE_WINDOWS 64  /* gate and up of 32 parts */

/* A matrix [n, k] that lies in windows, each packed by itself, which together hold every element
 * once. */
struct moe_coded_matrix {
	int64_t n, k;
	int windows;
	struct moe_coded_part {
		const struct moe_weight *weight;
		int64_t n0, k0; /* of its first element */
	} window[MOE_REQUANTISE_WINDOWS];
};

/* MOE_ERR_UNSUPPORTED: weights [n, k] of this coding cannot be made from floats again, and why. */
enum moe_status moe_requantise_check(const struct moe_coding *c, int64_t n, int64_t k);
/* Whether [n, k] at [n0, k0] of a matrix [N, K] begins and ends where blocks do. */
bool moe_requantise_whole_blocks(const struct moe_coding *c, int64_t n0, int64_t n, int64_t N,
				 int64_t k0, int64_t k, int64_t K);
/* Values of rows n0..n0+n and columns k0..k0+k: where they lie, rows *ld apart, or put into buffer.
 */
typedef const float *moe_block_source(const void *user, int64_t n0, int64_t n, int64_t k0,
				      int64_t k, float *buffer, int64_t *ld);
/*
 * Codes, scales and zeros of rows n0..n1 (n0 a multiple of coding.rows, n1 too or the last), in all
 * windows. A block with a value that is not finite gets the scale NaN: whatever computes with it
 * shows it.
 */
void moe_requantise_matrix(const struct moe_coded_matrix *m, int64_t n0, int64_t n1,
			   moe_block_source *source, const void *user);
/* The same of a weight of whole blocks, from src, rows ld apart. */
void moe_requantise_rows(const struct moe_weight *W, int64_t n0, int64_t n1, const float *src,
			 int64_t ld);
/* f32 values of a plain packed weight, rows ld apart. */
void moe_plain_values(const struct moe_weight *W, int64_t n0, int64_t n, int64_t k0, int64_t k,
		      float *dst, int64_t ld);
/* As layouts write it. Reads *m, which must stay. */
struct moe_quantised moe_coded_read(const struct moe_coded_matrix *m);

#endif
