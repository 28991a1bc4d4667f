/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/exchange.h"
#include "codelets/cost.h"
#include "codelets/update.h"
#include "engine/codelet.h"

size_t moe_exchange_scratch(const struct moe_experts *l)
{
	return (size_t)MOE_MAX(MOE_MAX(l->H, l->I), l->r) * sizeof(float);
}

/* Expert e's rows of a view; the expert's array begins at element `begin` of the caller's. */
static void copy_view(const struct moe_exchange_args *a, const struct moe_view *v,
		      const struct moe_caller_array *array, int e, int64_t begin, float *scaled)
{
	const struct moe_param *p = v->param;
	float *piece = moe_piece(a->what == MOE_PUBLISH ? p->grad : p->value, p, e);
	bool scale = a->what == MOE_PUBLISH && a->scale != 1;
	size_t each = moe_dtype_size(array->dtype);

	for (int64_t i = 0; i < v->rows; i++) {
		char *at = (char *)array->data + (size_t)(begin + v->offset + i * v->ld) * each;
		float *own = piece + v->at + i * v->width;

		if (a->what == MOE_TAKE) {
			moe_to_f32(own, at, array->dtype, (size_t)v->width);
			continue;
		}
		for (int64_t j = 0; scale && j < v->width; j++)
			scaled[j] = a->scale * own[j];
		moe_from_f32(at, array->dtype, scale ? scaled : own, (size_t)v->width);
	}
}

static void lora(const struct moe_exchange_args *a, int e, float *scratch)
{
	const struct moe_experts *l = a->layer;
	bool owner = moe_group_owner(l, a->group) == a->part;

	for (int i = 0; i < MOE_LORA_ARRAYS; i++) {
		enum moe_lora_array which = (enum moe_lora_array)i;
		struct moe_view v = moe_lora_view(l, which, a->part);
		bool replicated = moe_lora_replicated(which);
		int64_t n = (int64_t)l->r * (replicated ? l->H : l->I);

		if (!a->lora[i].data || (replicated && !owner))
			continue;
		copy_view(a, &v, &a->lora[i], e, e * n, scratch);
		if (a->what == MOE_TAKE && which != MOE_GATE_A) /* which shares its piece with up's */
			moe_param_pack_all(v.param, e, e + 1);
	}
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_exchange_args *a = args;
	const struct moe_experts *l = a->layer;
	int64_t n = (int64_t)l->I * l->H;

	for (int e = l->group_first[a->group]; e < l->group_first[a->group + 1]; e++) {
		lora(a, e, worker->scratch);
		for (int i = 0; i < MOE_EXPERT_MATRICES; i++) {
			struct moe_view v = moe_base_view(l, (enum moe_expert_matrix)i, a->part);

			if (a->base[i].data)
				copy_view(a, &v, &a->base[i], e, (a->map ? a->map[e] : e) * n,
					  worker->scratch);
		}
	}
}

static double cost_us(const void *args)
{
	const struct moe_exchange_args *a = args;
	const struct moe_experts *l = a->layer;
	double n = l->group_first[a->group + 1] - l->group_first[a->group];
	double each = a->lora[0].data ? 3.0 * l->r * ((double)l->part[a->part].I + l->H) : 0;

	if (a->base[0].data)
		each += 3.0 * (double)l->part[a->part].I * l->H;
	n *= each * sizeof(float);
	return moe_task_us() + moe_stream_us(n, n);
}

MOE_CODELET_AT(exchange, run, cost_us, MOE_HOME_PART);

static void run_rescale(const void *args, struct moe_worker *worker)
{
	const struct moe_update_args *a = args;

	(void)worker;
	for (int i = 0; i < a->n; i++) {
		const struct moe_range *r = &a->range[i];
		float *g = moe_piece(r->param->grad, r->param, r->e0);
		int64_t n = (r->e1 - r->e0) * r->param->piece;

		for (int64_t j = 0; j < n; j++)
			g[j] *= a->adamw.grad_scale;
	}
}

static double rescale_us(const void *args)
{
	const struct moe_update_args *a = args;
	double n = 0;

	for (int i = 0; i < a->n; i++)
		n += (double)((a->range[i].e1 - a->range[i].e0) * a->range[i].param->piece);
	return moe_task_us() + moe_stream_us(n * sizeof(float), n * sizeof(float));
}

MOE_CODELET_AT(rescale, run_rescale, rescale_us, MOE_HOME_PART);
