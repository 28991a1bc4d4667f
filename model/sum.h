/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checksum of 64 bits against damaged files: as fast as memory is read, not against forgery
 * (model/sha256.c). Bytes that differ within one group of 8 always give another sum; others do but
 * for one in 2^64. No state; thread-safe.
 */
#ifndef MOE_MODEL_SUM_H
#define MOE_MODEL_SUM_H

#include "engine/base.h"

#define MOE_SUM_LANES 4

struct moe_sum {
	uint64_t lane[MOE_SUM_LANES], bytes;
	unsigned char rest[8 * MOE_SUM_LANES]; /* bytes % sizeof rest of them */
};

void moe_sum_begin(struct moe_sum *s);
/* Pieces of any size give the sum of the whole. */
void moe_sum_add(struct moe_sum *s, const void *data, size_t bytes);
uint64_t moe_sum_end(struct moe_sum *s);

#endif
