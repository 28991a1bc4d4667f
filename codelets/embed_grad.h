/* SPDX-License-Identifier: Apache-2.0 */
/* embed_grad: gradient of one slice of a vocabulary chunk: rows of grad_x added by token, in order.
 */
#ifndef MOE_CODELETS_EMBED_GRAD_H
#define MOE_CODELETS_EMBED_GRAD_H

#include "codelets/trained.h"

struct moe_embed_grad_args {
	const struct moe_trained *array;
	int slice;
	bool first;	     /* overwrite */
	int64_t v0;	     /* vocabulary row of the array's first */
	const int32_t *ids;  /* [T] */
	const float *grad_x; /* [T, cols] */
	int T;
};

extern struct moe_codelet moe_cl_embed_grad;

#endif
