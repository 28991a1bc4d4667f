/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A dense array that is trained whole: a matrix of a linear layer, a run of vocabulary rows, a
 * norm, a bias. It is cut into slices of rows; a slice is the unit of gradient, norm and update.
 */
#ifndef MOE_CODELETS_TRAINED_H
#define MOE_CODELETS_TRAINED_H

#include "codelets/moe.h"

struct moe_codelet;

struct moe_trained {
	/* one piece [rows, cols]; grad NULL: the array is not there. m NULL: a gradient only */
	struct moe_param param;
	struct moe_weight *weight; /* matrices: the packed (or quantised) form, renewed after an update */
	struct moe_weight master;  /* in bf16 of quantised weights: what param.own points to; data owned */
	float *vector;		   /* norms and biases: what is computed with, likewise */
	int slices;
	int64_t slice_rows;	 /* a multiple of MOE_CHUNK */
	struct moe_param *slice; /* [slices] views of param */
	bool decay;		 /* weight decay applies */
};

/* Whether the update leaves the packed form to a renew task. */
static inline bool moe_trained_renews(const struct moe_trained *a)
{
	return !a->param.own || a->param.own != a->weight;
}
static inline bool moe_trained_updates(const struct moe_trained *a)
{
	return a->param.m != NULL;
}
/* The packed form, or the vector, from the master. Nothing where bf16 weights are their own
 * masters. */
void moe_trained_renew(const struct moe_trained *a);
/* All values from src [rows, cols] of a float dtype, contiguous; where bf16 is its own master, from
 * BF16. */
void moe_trained_set(const struct moe_trained *a, const void *src, enum moe_dtype dtype);
/* Values of rows n0..n1 in f32. */
void moe_trained_get(const struct moe_trained *a, int64_t n0, int64_t n1, float *dst);

struct moe_renew_args {
	const struct moe_trained *array;
};
extern struct moe_codelet moe_cl_renew;

#endif
