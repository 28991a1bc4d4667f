/* SPDX-License-Identifier: Apache-2.0 */
/* Tasks of dense arrays that are trained whole (codelets/trained.h). */
#ifndef MOE_TASKS_TRAINED_TASKS_H
#define MOE_TASKS_TRAINED_TASKS_H

#include "codelets/dense_grad.h"
#include "codelets/embed_grad.h"
#include "codelets/trained.h"
#include "codelets/vector_grad.h"
#include "tasks/decoder_tasks.h"

/* in: what orders x and dy; slice: the gradient's */
enum moe_status moe_task_dense_grad(const struct moe_context *c,
				    const struct moe_dense_grad_args *a,
				    const struct moe_tensor_list *in, int priority,
				    struct moe_tensor *slice);
enum moe_status moe_task_vector_grad(const struct moe_context *c,
				     const struct moe_vector_grad_args *a,
				     const struct moe_tensor_list *in, int priority,
				     struct moe_tensor *slice);
enum moe_status moe_task_embed_grad(const struct moe_context *c,
				    const struct moe_embed_grad_args *a,
				    const struct moe_tensor_list *in, struct moe_tensor *slice);
/* The packed form from the masters, in place. slices: of the array, updated. */
enum moe_status moe_task_renew(const struct moe_context *c, const struct moe_renew_args *a,
			       struct moe_tensor_list slices, struct moe_tensor *ready);

#endif
