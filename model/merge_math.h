/* SPDX-License-Identifier: Apache-2.0 */
/* W + scaling B A of one tensor, a block of rows at a time. Private to model/merge*.c. */
#ifndef MOE_MODEL_MERGE_MATH_H
#define MOE_MODEL_MERGE_MATH_H

#include "model/adapters/adapter.h"
#include "model/readers/safetensors.h"

struct moe_rewrite;

/* What a tensor gets; entry NULL: nothing. */
struct moe_merge_job {
	const struct moe_adapter *adapter;
	const struct moe_adapter_entry *entry;
	enum moe_role role; /* of the tensor: a matrix, an expert's, or all experts' fused */
	int expert;
	/* instead: all values are new (model/rewrite.h) */
	const struct moe_rewrite *rewrite;
	int layer;
	int coded; /* not 0: of a quantised weight, model/rewrite_coded.c */
};
void moe_merge_job_set(struct moe_merge_job *job, const struct moe_adapter *adapter,
		       const struct moe_adapter_entry *entry, enum moe_role role, int expert);

/*
 * The same for rows row0, row0 + 1, ... [n, k] of the job's matrix, or of an expert's in a tensor
 * of all of them, in f32 and in place. delta: k floats.
 */
void moe_merge_add(const struct moe_merge_job *job, int64_t expert, int64_t row0, int64_t n,
		   int64_t k, float *x, float *delta);

/* MOE_ERR_UNSUPPORTED: one of n new values of a tensor would be infinity in its dtype. */
enum moe_status moe_merge_check(const struct moe_st_tensor *t, const float *x, size_t n);

/* Rows of the tensor, one matrix after the other; moe_free it. */
struct moe_merge_block {
	const struct moe_merge_job *job;
	const struct moe_st_tensor *tensor;
	int64_t pieces, rows, cols; /* the tensor is pieces matrices [rows, cols] */
	int64_t piece, row;	    /* of the next block */
	int64_t lines;		    /* most of a block */
	float *wide, *delta; /* wide: merged, before it is rounded */
	const void *from; /* in the base */
	void *out;	  /* merged, as many bytes */
	size_t bytes;
};
/* NULL: no memory. */
struct moe_merge_block *moe_merge_block_new(const struct moe_merge_job *job,
					    const struct moe_st_tensor *tensor);
/* false: all rows were given. */
bool moe_merge_block_next(struct moe_merge_block *b);

#endif
