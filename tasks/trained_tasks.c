/* SPDX-License-Identifier: Apache-2.0 */
#include "tasks/trained_tasks.h"

/* Of a slice: what is read, then the gradient. */
static void name_grad(struct moe_access_list *l, const struct moe_tensor_list *in, bool first,
		      struct moe_tensor *slice)
{
	moe_access_add_all(l, in->item, in->n, MOE_R);
	moe_access_add(l, slice, first ? MOE_W : MOE_RW);
}

static enum moe_status check(const char *kind, const struct moe_trained *a, int slice)
{
	if (!a || !a->param.grad || slice < 0 || slice >= a->slices)
		return moe_fail(MOE_ERR_ARG, "%s: slice %d of %d, or no gradient", kind, slice,
				a ? a->slices : 0);
	return MOE_OK;
}

enum moe_status moe_task_dense_grad(const struct moe_context *c,
				    const struct moe_dense_grad_args *a,
				    const struct moe_tensor_list *in, int priority,
				    struct moe_tensor *slice)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check("dense_grad", a->array, a->slice));
	name_grad(&l, in, a->first, slice);
	return moe_task_submit(c, MOE_KIND_dense_grad, &moe_cl_dense_grad, a, sizeof *a, &l,
			       (struct moe_where){ -1, a->slice, -1 }, priority);
}

enum moe_status moe_task_vector_grad(const struct moe_context *c,
				     const struct moe_vector_grad_args *a,
				     const struct moe_tensor_list *in, int priority,
				     struct moe_tensor *slice)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check("vector_grad", a->array, 0));
	name_grad(&l, in, a->first, slice);
	return moe_task_submit(c, MOE_KIND_vector_grad, &moe_cl_vector_grad, a, sizeof *a, &l,
			       (struct moe_where){ -1, -1, -1 }, priority);
}

enum moe_status moe_task_embed_grad(const struct moe_context *c,
				    const struct moe_embed_grad_args *a,
				    const struct moe_tensor_list *in, struct moe_tensor *slice)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check("embed_grad", a->array, a->slice));
	name_grad(&l, in, a->first, slice);
	return moe_task_submit(c, MOE_KIND_embed_grad, &moe_cl_embed_grad, a, sizeof *a, &l,
			       (struct moe_where){ -1, a->slice, -1 }, MOE_PRIORITY_FILL);
}

enum moe_status moe_task_renew(const struct moe_context *c, const struct moe_renew_args *a,
			       struct moe_tensor_list slices, struct moe_tensor *ready)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check("repack", a->array, 0));
	moe_access_add_all(&l, slices.item, slices.n, MOE_R);
	moe_access_add(&l, ready, MOE_RW);
	return moe_task_submit(c, MOE_KIND_repack, &moe_cl_renew, a, sizeof *a, &l,
			       (struct moe_where){ -1, -1, -1 }, MOE_PRIORITY_UPDATE - c->layer);
}
