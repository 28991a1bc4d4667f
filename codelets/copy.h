/* SPDX-License-Identifier: Apache-2.0 */
/* load, store: rows t0..t1 of a caller's matrix (any float dtype and strides) to and from f32. */
#ifndef MOE_CODELETS_COPY_H
#define MOE_CODELETS_COPY_H

#include "engine/base.h"

struct moe_codelet;

struct moe_copy_args {
	struct moe_array array; /* [T, n]; copied by value, data stays the caller's */
	float *rows;		/* [T, n]; load: NULL where only rows16 is wanted (worker scratch: n floats) */
	int n, t0, t1;
	uint16_t *rows16; /* load: the same in bf16, rows ld16 apart and zero from n on; NULL: not wanted */
	int64_t ld16;
};

extern struct moe_codelet moe_cl_load, moe_cl_store;
void moe_copy_load(const struct moe_copy_args *a);
void moe_copy_store(const struct moe_copy_args *a);

#endif
