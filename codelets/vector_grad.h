/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vector_grad: gradient of a vector, the sum of rows in their order: a bias from the gradients at
 * the layer's output, a norm from the parts that the tasks through it left, one per token block.
 */
#ifndef MOE_CODELETS_VECTOR_GRAD_H
#define MOE_CODELETS_VECTOR_GRAD_H

#include "codelets/trained.h"

struct moe_vector_grad_args {
	const struct moe_trained *array;
	bool first;	  /* overwrite */
	const float *row; /* [rows, n], n the array's elements */
	int rows;	  /* 0 only clears */
};

/* part [n] = sum over m rows of dy x / rms(x): what these rows give to the gradient of a norm's
 * weight. add: part holds something already */
void moe_norm_part(int m, int n, const float *x, int64_t ldx, float eps, const float *dy,
		   int64_t lddy, bool add, float *part);
extern struct moe_codelet moe_cl_vector_grad;

#endif
