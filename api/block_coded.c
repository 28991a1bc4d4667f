/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised experts of a block. */
#include "api/block.h"
#include "api/pass.h"
#include "codelets/kernels/packed/coded.h"
#include "model/expert_names.h"

enum moe_status moe_block_check_format(const struct moe_block_params *p)
{
	const char *mode = p->backward_weights;

	if (!p->weight_format)
		return MOE_OK;
	if (!moe_format_find(p->weight_format))
		return moe_fail(MOE_ERR_ARG, "unknown weight_format \"%s\"", p->weight_format);
	if (p->weight_group < 0)
		return moe_fail(MOE_ERR_ARG, "weight_group is %d; 0 (the format's own) or more is possible", p->weight_group);
	if (p->base_gradients || p->train_base)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"weights in format %s are frozen: base_gradients and train_base "
				"need plain ones",
				p->weight_format);
	if (mode && strcmp(mode, "auto") && strcmp(mode, "direct"))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"backward_weights is \"%s\"; \"direct\" is possible with format %s",
				mode, p->weight_format);
	return MOE_OK;
}

struct moe_array moe_array_of_expert(const struct moe_array *a, int64_t e)
{
	struct moe_array x = *a;
	size_t bytes = moe_dtype_size(a->dtype);

	if (!a->data || a->ndim < 2)
		return x;
	for (int i = 1; i < a->ndim; i++) {
		x.shape[i - 1] = a->shape[i];
		bytes *= (size_t)a->shape[i];
	}
	x.ndim--;
	x.data = (char *)a->data + (size_t)e * bytes;
	memset(x.strides, 0, sizeof x.strides);
	return x;
}

static enum moe_status check_experts(const char *name, const struct moe_array *a, int E)
{
	if (!a->data)
		return moe_fail(MOE_ERR_ARG, "%s has no data", name);
	if (a->ndim < 2 || a->ndim > MOE_MAX_NDIM || a->shape[0] != E)
		return moe_fail(MOE_ERR_ARG, "%s must have %d experts as its first dimension", name,
				E);
	return MOE_OK;
}

enum moe_status moe_open_stored(const struct moe_format *f, const struct moe_stored *s, struct moe_quantised *q)
{
	enum moe_status st = MOE_ERR_FORMAT;

	for (int i = 0; i < MOE_FORMAT_LAYOUTS && f->layout[i].codes; i++) {
		if (f->layout[i].codes_dtype != s->codes.dtype) {
			if (!i)
				st = moe_stored_dtype(s->codes_name, &s->codes,
						      f->layout[i].codes_dtype);
			continue;
		}
		*q = (struct moe_quantised){ .coding = { .format = f },
					     .n = s->n,
					     .k = s->k,
					     .codes = s->codes,
					     .scale = s->scale,
					     .zero = s->zero };
		st = f->layout[i].open(s, q);
		if (st == MOE_OK)
			return MOE_OK;
	}
	return st;
}

static enum moe_status check_group(const struct moe_block_params *p, const struct moe_quantised *q, const char *name)
{
	int64_t group = p->weight_group ? p->weight_group : q->coding.format->group;

	if (q->coding.group >= (group ? group : q->k))
		return MOE_OK;
	return moe_fail(MOE_ERR_ARG, "%s has a scale for %lld columns; weight_group is %lld", name,
			(long long)q->coding.group, (long long)(group ? group : q->k));
}

static enum moe_status open_expert(const struct moe_block *b, enum moe_block_array which,
				   const struct moe_quantised_arrays *src, int e, struct moe_quantised *q)
{
	bool down = which == MOE_BLOCK_DOWN_PROJ;
	struct moe_stored s = { .codes_name = "codes", .scale_name = "scale", .zero_name = "zero" };

	s.n = down ? b->layer.H : b->layer.I;
	s.k = down ? b->layer.I : b->layer.H;
	s.codes = moe_array_of_expert(&src->codes, e);
	s.scale = moe_array_of_expert(&src->scale, e);
	s.zero = moe_array_of_expert(&src->zero, e);
	return moe_open_stored(moe_format_find(b->params.weight_format), &s, q);
}

static enum moe_status check_all(const struct moe_block *b, enum moe_block_array which,
				 const struct moe_quantised_arrays *src)
{
	const char *name = moe_expert_names[MOE_NAMES_USUAL][which];
	int E = b->layer.E;
	struct moe_quantised q;

	MOE_TRY(check_experts("codes", &src->codes, E));
	MOE_TRY(check_experts("scale", &src->scale, E));
	if (src->zero.data)
		MOE_TRY(check_experts("zero", &src->zero, E));
	for (int e = 0; e < E; e++) {
		if (open_expert(b, which, src, e, &q) != MOE_OK || moe_check_scales(&q, "scale") != MOE_OK)
			return moe_fail_in(MOE_ERR_FORMAT, "%s, expert %d", name, e);
		MOE_TRY(check_group(&b->params, &q, name));
	}
	return MOE_OK;
}

/* Memory as these scales need it: what weight_format and weight_group leave open, the first expert tells. */
static enum moe_status take_memory(struct moe_block *b, enum moe_expert_matrix which, const struct moe_quantised *q)
{
	const struct moe_experts_part *part = &b->layer.part[0];
	const struct moe_weight *w = which == MOE_GATE ? part->gate : which == MOE_UP ? part->up : part->down;
	if (w->data && moe_coding_alike(&w->coding, &q->coding, false))
		return MOE_OK;
	MOE_TRY(moe_experts_take_matrix(b->engine, &b->layer, which, &q->coding));
	return b->capacity < 0 ? MOE_OK
			       : moe_engine_reserve_scratch(b->engine,
							    moe_experts_worker_scratch(&b->layer, b->capacity));
}

static enum moe_status set_quantised(struct moe_block *b, enum moe_block_array which,
				     const struct moe_quantised_arrays *src)
{
	struct moe_experts *l = &b->layer;
	struct moe_quantised q;

	if (!src || src->struct_size < sizeof *src || (unsigned)which > MOE_BLOCK_DOWN_PROJ)
		return moe_fail(
			MOE_ERR_ARG,
			"quantised arrays: struct_size is not set, or not an expert matrix");
	if (!b->params.weight_format)
		return moe_fail(MOE_ERR_STATE, "the block has no weight_format");
	MOE_TRY(check_all(b, which, src));
	MOE_TRY(moe_ticket_wait(b->ticket));
	b->set &= ~(1u << which);
	for (int e = 0; e < l->E; e++) {
		MOE_TRY(open_expert(b, which, src, e, &q));
		if (!e)
			MOE_TRY(take_memory(b, (enum moe_expert_matrix)which, &q));
		for (int p = 0; p < l->P; p++)
			moe_experts_pack_coded(l, (enum moe_expert_matrix)which, e, p, &q, 0, 1);
	}
	b->set |= 1u << which;
	return MOE_OK;
}

enum moe_status moe_block_set_quantised(struct moe_block *b, enum moe_block_array which,
					const struct moe_quantised_arrays *src)
{
	enum moe_status st;

	MOE_TRY(moe_block_enter(b));
	st = set_quantised(b, which, src);
	moe_block_leave(b);
	return st;
}
