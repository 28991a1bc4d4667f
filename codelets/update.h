/* SPDX-License-Identifier: Apache-2.0 */
/*
 * update: AdamW on up to MOE_UPDATE_RANGES ranges of f32 masters. grad_norm: sum of squares per range and
 * expert. grad_total: the global norm and the clipping factor.
 */
#ifndef MOE_CODELETS_UPDATE_H
#define MOE_CODELETS_UPDATE_H

#include "codelets/moe.h"

struct moe_codelet;

#define MOE_UPDATE_RANGES 5

struct moe_range {
	const struct moe_param *param;
	int e0, e1; /* pieces */
};

/* Filled in by grad_total. */
struct moe_grad_norm {
	double norm, norm_experts;
	float factor;	/* multiplies every gradient */
	bool finite;	/* false: no update is applied */
};

struct moe_update_args {
	struct moe_range range[MOE_UPDATE_RANGES];
	int n;
	struct moe_adamw adamw;
	const struct moe_grad_norm *norm; /* NULL: no clipping and no check */
	double *squares[MOE_UPDATE_RANGES]; /* grad_norm: [e1 - e0] results of each range, of adamw.grad_scale times it */
};

struct moe_grad_total_args {
	const double *squares; /* [n], expert parameters first */
	int64_t n_experts, n;
	float max_norm; /* 0: no clipping */
	const struct moe_grad_norm *after; /* NULL, or the step before: not finite there, not finite here */
	struct moe_grad_norm *out;
};

/* Bytes of worker scratch for masters in bf16 of that many columns; coded: what the update quantises again, or NULL. */
size_t moe_update_scratch(int64_t cols, const struct moe_weight *coded);
extern struct moe_codelet moe_cl_update, moe_cl_grad_norm, moe_cl_grad_total;

#endif
