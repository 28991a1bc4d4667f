/* SPDX-License-Identifier: Apache-2.0 */
/* Memory and tensors of dense arrays that are trained whole (codelets/trained.h), and their tasks per step. */
#ifndef MOE_GRAPHS_TRAINED_H
#define MOE_GRAPHS_TRAINED_H

#include "graphs/stream.h"
#include "tasks/trained_tasks.h"
#include "tasks/update_tasks.h"

/* Usual elements of a slice: a gradient of 1 MB stays in a core's cache over the token blocks. */
#define MOE_SLICE_ELEMENTS ((int64_t)1 << 18)

struct moe_trained_shape {
	int64_t rows, cols;
	struct moe_weight *weight; /* of a matrix, else NULL */
	float *vector;		   /* of a norm or bias, else NULL */
	bool decay;
	bool update;  /* false: a gradient only */
	bool own;     /* a matrix with masters in bf16: its weights themselves where they are plain */
	bool coded;   /* a matrix that is quantised */
	uint64_t key; /* then: of the whole array, in which this one begins at element `at` */
	int64_t at;
	int64_t slice_elements; /* aim of a slice; 0: one slice */
	int part;
};

/* Masters, gradients and moments; values come by moe_trained_set. On failure nothing is left. */
enum moe_status moe_trained_alloc(struct moe_engine *e, const struct moe_trained_shape *s,
				  struct moe_trained *out);
void moe_trained_free(struct moe_engine *e, struct moe_trained *a);

/* Tensors of one array. */
struct moe_trained_tensors {
	struct moe_trained *array; /* NULL: none */
	struct moe_tensor **slice; /* [slices]: gradient, master and moments of each */
	struct moe_tensor *ready;  /* what computes with the array reads it; not owned */
};
/* array NULL, or without a gradient: t stays zero. */
enum moe_status moe_trained_tensors_create(struct moe_engine *e, struct moe_trained *array,
					   struct moe_tensor *ready, struct moe_trained_tensors *t);
void moe_trained_tensors_destroy(struct moe_trained_tensors *t);

/* One gradient task per slice; of *a: all but array and slice. Nothing where there is no array. */
enum moe_status moe_trained_dense_grad(const struct moe_context *c,
				       const struct moe_trained_tensors *t,
				       const struct moe_dense_grad_args *a,
				       const struct moe_tensor_list *in, int priority);
/* Of an MLP's arrays t [MOE_FFN_MATRICES] from a pass over T tokens; in: what its tasks must have
 * done. */
enum moe_status moe_trained_ffn_grads(const struct moe_context *c, const struct moe_ffn *f,
				      const struct moe_ffn_state *s, const float *grad_out, int T,
				      bool first, const struct moe_tensor_list *in,
				      const struct moe_trained_tensors *t);
/* After the gradients are complete: AdamW by slices, then the packed form anew. norm_ready NULL:
 * without norm. */
enum moe_status moe_trained_update(const struct moe_context *c, const struct moe_trained_tensors *t,
				   const struct moe_adamw *adamw, const struct moe_grad_norm *norm,
				   struct moe_tensor *norm_ready);

#endif
