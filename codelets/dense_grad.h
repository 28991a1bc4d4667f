/* SPDX-License-Identifier: Apache-2.0 */
/* dense_grad: gradient of one slice of a matrix y = W x: g (+)= dy^T x over tokens. */
#ifndef MOE_CODELETS_DENSE_GRAD_H
#define MOE_CODELETS_DENSE_GRAD_H

#include "codelets/trained.h"

struct moe_dense_grad_args {
	const struct moe_trained *array;
	int slice;
	bool first;	 /* overwrite */
	int T;		 /* rows of x and dy; 0 only clears */
	const float *x;	 /* [T, cols] */
	const float *dy; /* [T, rows], rows lddy apart */
	int64_t lddy;
	const float *norm; /* x goes through this RMS norm first, or NULL */
	float eps;
	const float *scale; /* [T] factors of dy's rows, or NULL */
};

/* Bytes of worker scratch. */
size_t moe_dense_grad_scratch(const struct moe_trained *a);
extern struct moe_codelet moe_cl_dense_grad;

#endif
