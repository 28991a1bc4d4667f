/* SPDX-License-Identifier: Apache-2.0 */
#include "tasks/update_tasks.h"

static enum moe_status check_ranges(const char *kind, const struct moe_update_args *a)
{
	if (a->n < 1 || a->n > MOE_UPDATE_RANGES)
		return moe_fail(MOE_ERR_ARG, "%s: %d ranges", kind, a->n);
	return MOE_OK;
}

enum moe_status moe_task_grad_norm(const struct moe_context *c, const struct moe_update_args *a,
				   int group, int part, struct moe_tensor *const *grads, int n,
				   struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_ranges("grad_norm", a));
	moe_access_add_all(&l, grads, n, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_grad_norm, &moe_cl_grad_norm, a, sizeof *a, &l,
			       (struct moe_where){ group, -1, part }, MOE_PRIORITY_UPDATE);
}

enum moe_status moe_task_grad_total(const struct moe_context *c,
				    const struct moe_grad_total_args *a, struct moe_tensor *in,
				    struct moe_tensor *out)
{
	struct moe_access_list l = { .n = 0 };

	if (!a->squares || !a->out || a->n < 1)
		return moe_fail(MOE_ERR_ARG, "grad_total: %lld sums", (long long)a->n);
	moe_access_add(&l, in, MOE_R);
	moe_access_add(&l, out, MOE_W);
	return moe_task_submit(c, MOE_KIND_grad_total, &moe_cl_grad_total, a, sizeof *a, &l,
			       (struct moe_where){ -1, -1, -1 }, MOE_PRIORITY_UPDATE + 1);
}

/*
 * Elements of an update that takes turns: base weights, some ms each. LoRA's come last in a step, where nothing else is
 * left to compute: one at a time took 21 ms instead of 11 (Qwen3-30B's layer, 64 tokens, two workers).
 */
#define STREAMS_FROM (1 << 21)

static int64_t elements(const struct moe_update_args *a)
{
	int64_t n = 0;

	for (int i = 0; i < a->n; i++)
		n += (a->range[i].e1 - a->range[i].e0) * a->range[i].param->piece;
	return n;
}

enum moe_status moe_task_update(const struct moe_context *c, const struct moe_update_args *a,
				int group, int part, struct moe_tensor *const *grads, int n_grads,
				struct moe_tensor *norm, struct moe_tensor *const *params,
				int n_params)
{
	struct moe_access_list l = { .n = 0 };
	struct moe_context own = *c;

	MOE_TRY(check_ranges("update", a));
	own.streams = elements(a) >= STREAMS_FROM;
	moe_access_add_all(&l, grads, n_grads, MOE_R);
	moe_access_add(&l, norm, MOE_R);
	moe_access_add_all(&l, params, n_params, MOE_RW);
	return moe_task_submit(&own, MOE_KIND_update, &moe_cl_update, a, sizeof *a, &l,
			       (struct moe_where){ group, -1, part },
			       MOE_PRIORITY_UPDATE - c->layer);
}

enum moe_status moe_task_exchange(const struct moe_context *c, const struct moe_exchange_args *a,
				  struct moe_tensor *const *grads, int n_grads,
				  struct moe_tensor *const *params, int n_params)
{
	static const enum moe_kind kinds[] = { MOE_KIND_publish, MOE_KIND_give, MOE_KIND_take };
	const struct moe_experts *e = a->layer;
	struct moe_access_list l = { .n = 0 };

	if (!e || a->part < 0 || a->part >= e->P || a->group < 0 || a->group >= e->G ||
	    (unsigned)a->what >= MOE_COUNT(kinds))
		return moe_fail(MOE_ERR_ARG, "exchange %d: part %d, group %d of %d, %d", (int)a->what,
				a->part, a->group, e ? e->P : 0, e ? e->G : 0);
	moe_access_add_all(&l, grads, n_grads, MOE_R);
	moe_access_add_all(&l, params, n_params, a->what == MOE_TAKE ? MOE_RW : MOE_R);
	return moe_task_submit(c, kinds[a->what], &moe_cl_exchange, a, sizeof *a, &l,
			       (struct moe_where){ a->group, -1, a->part },
			       a->what == MOE_PUBLISH ? MOE_PRIORITY_FILL : MOE_PRIORITY_UPDATE);
}

enum moe_status moe_task_rescale(const struct moe_context *c, const struct moe_update_args *a,
				 int group, int part, struct moe_tensor *const *grads, int n)
{
	struct moe_access_list l = { .n = 0 };

	MOE_TRY(check_ranges("rescale", a));
	moe_access_add_all(&l, grads, n, MOE_RW);
	return moe_task_submit(c, MOE_KIND_rescale, &moe_cl_rescale, a, sizeof *a, &l,
			       (struct moe_where){ group, -1, part }, c->priority);
}

/* Masters and weights come from the caller's arrays, not from an update. */
static bool has_source(const struct moe_repack_args *a)
{
	return a->coded[MOE_GATE] || (a->source[MOE_GATE] && a->source[MOE_UP] && a->source[MOE_DOWN]);
}

enum moe_status moe_task_requantise(const struct moe_context *c, const struct moe_repack_args *a,
				    struct moe_tensor *const *masters, struct moe_tensor *const *weights, int n)
{
	const struct moe_experts *e = a->layer;
	struct moe_access_list l = { .n = 0 };
	bool source = has_source(a);

	if (!e || !e->requantise || a->part >= 0 || a->group < 0 || a->group >= e->G || n < 1 ||
	    2 * n > MOE_MAX_TASK_HANDLES)
		return moe_fail(MOE_ERR_ARG, "requantise: part %d, group %d, %d parts", a->part, a->group,
				e ? e->P : 0);
	moe_access_add_all(&l, masters, n, source ? MOE_W : MOE_R);
	moe_access_add_all(&l, weights, n, MOE_W);
	return moe_task_submit(c, MOE_KIND_repack, &moe_cl_repack, a, sizeof *a, &l,
			       (struct moe_where){ a->group, -1, a->group % e->P },
			       MOE_PRIORITY_UPDATE - c->layer);
}

enum moe_status moe_task_repack(const struct moe_context *c, const struct moe_repack_args *a,
				struct moe_tensor *masters, struct moe_tensor *weights)
{
	struct moe_access_list l = { .n = 0 };
	const struct moe_experts *e = a->layer;
	bool source = has_source(a);

	if (!e || a->part < 0 || a->part >= e->P || a->group < 0 || a->group >= e->G)
		return moe_fail(MOE_ERR_ARG, "repack: part %d, group %d of %d, %d", a->part, a->group,
				e ? e->P : 0, e ? e->G : 0);
	if (!source && !e->part[a->part].base[MOE_GATE].m)
		return moe_fail(MOE_ERR_ARG, "repack: part %d, group %d has neither masters nor a source",
				a->part, a->group);
	if (!source && !moe_kernels()->tiles && e->part[a->part].base[MOE_GATE].value && e->part[a->part].gate->dtype != MOE_F32)
		return moe_fail(MOE_ERR_ARG,
				"repack: the %s kernels keep weights as %s; masters need F32",
				moe_kernels()->name, moe_dtype_name(e->part[a->part].gate->dtype));
	moe_access_add(&l, masters, source ? MOE_W : MOE_R);
	moe_access_add(&l, weights, MOE_W);
	return moe_task_submit(c, MOE_KIND_repack, &moe_cl_repack, a, sizeof *a, &l,
			       (struct moe_where){ a->group, -1, a->part },
			       MOE_PRIORITY_UPDATE - c->layer);
}
