/* SPDX-License-Identifier: Apache-2.0 */
/* Copying weights, LoRA, gradients and routing of a block in and out. */
#include "api/block.h"
#include "api/pass.h"

enum access { SET, GET, GRADIENT };

static const char *const names[MOE_BLOCK_ARRAYS] = {
	[MOE_BLOCK_GATE_PROJ] = "gate_proj",
	[MOE_BLOCK_UP_PROJ] = "up_proj",
	[MOE_BLOCK_DOWN_PROJ] = "down_proj",
	[MOE_BLOCK_ROUTER] = "router",
	[MOE_BLOCK_SHARED_GATE] = "shared_gate",
	[MOE_BLOCK_SHARED_UP] = "shared_up",
	[MOE_BLOCK_SHARED_DOWN] = "shared_down",
	[MOE_BLOCK_SHARED_ROUTER] = "shared_router",
	[MOE_BLOCK_GATE_LORA_A] = "gate_lora_a",
	[MOE_BLOCK_UP_LORA_A] = "up_lora_a",
	[MOE_BLOCK_DOWN_LORA_A] = "down_lora_a",
	[MOE_BLOCK_GATE_LORA_B] = "gate_lora_b",
	[MOE_BLOCK_UP_LORA_B] = "up_lora_b",
	[MOE_BLOCK_DOWN_LORA_B] = "down_lora_b",
	[MOE_BLOCK_TOPK_IDS] = "topk_ids",
	[MOE_BLOCK_TOPK_WEIGHTS] = "topk_weights",
	[MOE_BLOCK_ROUTER_LOGITS] = "router_logits",
	[MOE_BLOCK_AUX_LOSS] = "aux_loss",
	[MOE_BLOCK_GRAD_ROUTER_LOGITS] = "grad_router_logits",
	[MOE_BLOCK_Z_LOSS] = "z_loss",
};

/* Shape of an array of this block; 0 dimensions if the block has none. */
static int shape_of(const struct moe_block *b, enum moe_block_array which, int64_t *s)
{
	const struct moe_block_params *p = &b->params;
	int64_t E = p->experts, H = p->hidden, I = p->intermediate, S = p->shared_intermediate;
	int64_t r = p->lora_rank, T = MOE_MAX(b->tokens, 0);
	int64_t shapes[MOE_BLOCK_ARRAYS][3] = {
		[MOE_BLOCK_GATE_PROJ] = { E, I, H },
		[MOE_BLOCK_UP_PROJ] = { E, I, H },
		[MOE_BLOCK_DOWN_PROJ] = { E, H, I },
		[MOE_BLOCK_ROUTER] = { E, H },
		[MOE_BLOCK_SHARED_GATE] = { S, H },
		[MOE_BLOCK_SHARED_UP] = { S, H },
		[MOE_BLOCK_SHARED_DOWN] = { H, S },
		[MOE_BLOCK_SHARED_ROUTER] = { 1, H },
		[MOE_BLOCK_GATE_LORA_A] = { E, r, H },
		[MOE_BLOCK_UP_LORA_A] = { E, r, H },
		[MOE_BLOCK_DOWN_LORA_A] = { E, r, I },
		[MOE_BLOCK_GATE_LORA_B] = { E, I, r },
		[MOE_BLOCK_UP_LORA_B] = { E, I, r },
		[MOE_BLOCK_DOWN_LORA_B] = { E, H, r },
		[MOE_BLOCK_TOPK_IDS] = { T, p->experts_per_token },
		[MOE_BLOCK_TOPK_WEIGHTS] = { T, p->experts_per_token },
		[MOE_BLOCK_ROUTER_LOGITS] = { T, E },
		[MOE_BLOCK_AUX_LOSS] = { 1 },
		[MOE_BLOCK_GRAD_ROUTER_LOGITS] = { T, E },
		[MOE_BLOCK_Z_LOSS] = { 1 },
	};
	bool expert = which <= MOE_BLOCK_DOWN_PROJ;
	bool lora = which >= MOE_BLOCK_GATE_LORA_A && which <= MOE_BLOCK_DOWN_LORA_B;
	bool shared = which >= MOE_BLOCK_SHARED_GATE && which <= MOE_BLOCK_SHARED_ROUTER;
	bool router = which == MOE_BLOCK_ROUTER || which == MOE_BLOCK_ROUTER_LOGITS ||
		      which >= MOE_BLOCK_AUX_LOSS;
	bool number = which == MOE_BLOCK_AUX_LOSS || which == MOE_BLOCK_Z_LOSS;

	if ((lora && !r) || (shared && !S) || (router && !b->layer.router) ||
	    (which == MOE_BLOCK_SHARED_ROUTER && !p->shared_sigmoid))
		return 0;
	memcpy(s, shapes[which], sizeof shapes[which]);
	return expert || lora ? 3 : number ? 1 : 2;
}

enum moe_status moe_block_check_set(const struct moe_block *b)
{
	int64_t shape[3];

	for (int i = 0; i <= MOE_BLOCK_SHARED_ROUTER; i++)
		if (!(b->set >> i & 1) && shape_of(b, (enum moe_block_array)i, shape))
			return moe_fail(MOE_ERR_STATE, "%s was never set", names[i]);
	return MOE_OK;
}

static enum moe_status check(struct moe_block *b, enum moe_block_array which,
			     const struct moe_array *a, enum access access, int64_t *count)
{
	int64_t shape[3];
	int ndim;

	if (!a || (unsigned)which >= MOE_BLOCK_ARRAYS)
		return moe_fail(MOE_ERR_ARG, "block array %d: an argument is NULL or unknown",
				(int)which);
	ndim = shape_of(b, which, shape);
	if (!ndim)
		return moe_fail(MOE_ERR_ARG, "this block has no %s", names[which]);
	MOE_TRY(moe_check_shape(names[which], a, ndim, shape));
	*count = moe_shape_count(ndim, shape);
	if (access == SET ? a->dtype > MOE_F64 : a->dtype != MOE_F32 && a->dtype != MOE_F64)
		if (which != MOE_BLOCK_TOPK_IDS || access != GET || a->dtype != MOE_I32)
			return moe_fail(MOE_ERR_ARG, "%s: dtype %s is not possible here",
					names[which], moe_dtype_name(a->dtype));
	return moe_ticket_wait(b->ticket);
}

static enum moe_status set_weight(struct moe_block *b, enum moe_block_array which,
				  const struct moe_array *a)
{
	struct moe_weight *w;
	size_t piece = (size_t)a->shape[a->ndim - 1] * (size_t)a->shape[a->ndim - 2] *
		       moe_dtype_size(a->dtype);

	if (which != MOE_BLOCK_ROUTER && which != MOE_BLOCK_SHARED_ROUTER &&
	    moe_packed_wider(a->dtype, b->params.weight_dtype))
		return moe_fail(MOE_ERR_ARG, "%s is %s, wider than the block's weight_dtype %s", names[which],
				moe_dtype_name(a->dtype), moe_dtype_name(b->params.weight_dtype));
	if (which == MOE_BLOCK_ROUTER && b->layer.router_param.value) {
		moe_to_f32(b->layer.router_param.value, a->data, a->dtype, (size_t)(b->layer.E * b->layer.H));
		moe_kernels()->weight_pack(&b->layer.router_weight, NULL, MOE_F32, b->layer.E, b->layer.H,
					   b->layer.H, MOE_USE_EXACT);
		return MOE_OK;
	}
	if (which <= MOE_BLOCK_DOWN_PROJ && b->params.weight_format)
		return moe_fail(MOE_ERR_STATE, "%s: weight_format is %s; moe_block_set_quantised sets it",
				names[which], b->params.weight_format);
	if (which <= MOE_BLOCK_DOWN_PROJ) {
		for (int e = 0; e < b->layer.E; e++)
			moe_experts_pack(&b->layer,
					 (enum moe_expert_matrix)(which - MOE_BLOCK_GATE_PROJ), e,
					 (const char *)a->data + (size_t)e * piece, a->dtype);
		return MOE_OK;
	}
	if (which >= MOE_BLOCK_SHARED_GATE && b->params.train_base) {
		moe_trained_set(&b->ffn.trained[which - MOE_BLOCK_SHARED_GATE], a->data, a->dtype);
		return MOE_OK;
	}
	if (which == MOE_BLOCK_SHARED_ROUTER) {
		moe_to_f32(b->ffn.sigmoid_weight, a->data, a->dtype, (size_t)b->layer.H);
		return MOE_OK;
	}
	w = which == MOE_BLOCK_ROUTER	     ? &b->layer.router_weight
	    : which == MOE_BLOCK_SHARED_GATE ? &b->ffn.gate
	    : which == MOE_BLOCK_SHARED_UP   ? &b->ffn.up
					     : &b->ffn.down;
	moe_kernels()->weight_pack(w, a->data, a->dtype, a->shape[0], a->shape[1], a->shape[1],
				   which == MOE_BLOCK_ROUTER ? MOE_USE_EXACT : MOE_USE_GEMM);
	return MOE_OK;
}

static enum moe_status copy_lora(struct moe_block *b, enum moe_block_array which,
				 const struct moe_array *a, enum access access)
{
	return moe_copy_lora(&b->layer, (enum moe_lora_array)(which - MOE_BLOCK_GATE_LORA_A),
			     access == GRADIENT ? MOE_GRAD : MOE_VALUE, a, access == SET, 1);
}

static enum moe_status set_array(struct moe_block *b, enum moe_block_array which,
				 const struct moe_array *src)
{
	int64_t count;

	MOE_TRY(check(b, which, src, SET, &count));
	if (which >= MOE_BLOCK_TOPK_IDS)
		return moe_fail(MOE_ERR_ARG, "%s can only be read", names[which]);
	if (which >= MOE_BLOCK_GATE_LORA_A)
		return copy_lora(b, which, src, SET);
	MOE_TRY(set_weight(b, which, src));
	b->set |= 1u << which;
	return MOE_OK;
}

enum moe_status moe_block_set(struct moe_block *b, enum moe_block_array which,
			      const struct moe_array *src)
{
	enum moe_status st;

	MOE_TRY(moe_block_enter(b));
	st = set_array(b, which, src);
	moe_block_leave(b);
	return st;
}

static enum moe_status get_array(struct moe_block *b, enum moe_block_array which,
				 const struct moe_array *dst)
{
	const struct moe_plan *plan;
	int64_t count = 0;
	const float *src = NULL;
	float number;
	double loss;

	MOE_TRY(check(b, which, dst, GET, &count));
	if (which >= MOE_BLOCK_GATE_LORA_A && which <= MOE_BLOCK_DOWN_LORA_B)
		return copy_lora(b, which, dst, GET);
	if (which <= MOE_BLOCK_DOWN_PROJ && b->params.train_base)
		return moe_copy_base(&b->layer, (enum moe_expert_matrix)which, MOE_VALUE, NULL, dst,
				     1);
	plan = &b->state.plan;
	loss = which == MOE_BLOCK_Z_LOSS ? plan->z_loss : plan->aux_loss;
	number = (float)loss;
	if (which == MOE_BLOCK_TOPK_IDS) {
		if (dst->dtype != MOE_I32)
			return moe_fail(MOE_ERR_ARG, "topk_ids are I32");
		if (count)
			memcpy(dst->data, plan->ids, (size_t)count * sizeof *plan->ids);
		return MOE_OK;
	}
	if ((which == MOE_BLOCK_AUX_LOSS || which == MOE_BLOCK_Z_LOSS) && dst->dtype == MOE_F64) {
		memcpy(dst->data, &loss, sizeof loss);
		return MOE_OK;
	}
	switch (which) {
	case MOE_BLOCK_SHARED_GATE:
	case MOE_BLOCK_SHARED_UP:
	case MOE_BLOCK_SHARED_DOWN:
	case MOE_BLOCK_SHARED_ROUTER:
		src = b->ffn.trained ? b->ffn.trained[which - MOE_BLOCK_SHARED_GATE].param.value : NULL;
		break;
	case MOE_BLOCK_ROUTER:
		src = b->layer.router_param.value;
		break;
	case MOE_BLOCK_TOPK_WEIGHTS:
		src = plan->weights;
		break;
	case MOE_BLOCK_ROUTER_LOGITS:
		src = plan->logits;
		break;
	case MOE_BLOCK_AUX_LOSS:
	case MOE_BLOCK_Z_LOSS:
		src = &number;
		break;
	case MOE_BLOCK_GRAD_ROUTER_LOGITS:
		src = plan->grad_logits;
		break;
	default:
		return moe_fail(MOE_ERR_UNSUPPORTED, "packed %s cannot be read back", names[which]);
	}
	if (!src && count)
		return moe_fail(MOE_ERR_UNSUPPORTED, "packed %s cannot be read back", names[which]);
	if (count)
		moe_from_f32(dst->data, dst->dtype, src, (size_t)count);
	return MOE_OK;
}

enum moe_status moe_block_get(struct moe_block *b, enum moe_block_array which,
			      const struct moe_array *dst)
{
	enum moe_status st;

	MOE_TRY(moe_block_enter(b));
	st = get_array(b, which, dst);
	moe_block_leave(b);
	return st;
}

static enum moe_status get_gradient(struct moe_block *b, enum moe_block_array which,
				    const struct moe_array *dst)
{
	const float *src;
	int64_t count = 0;

	MOE_TRY(check(b, which, dst, GRADIENT, &count));
	if (!b->grads_open)
		return moe_fail(MOE_ERR_STATE,
				"there are no gradients: no backward since the last update");
	if (which >= MOE_BLOCK_GATE_LORA_A && which <= MOE_BLOCK_DOWN_LORA_B)
		return copy_lora(b, which, dst, GRADIENT);
	if (which > MOE_BLOCK_DOWN_LORA_B || !b->params.base_gradients)
		return moe_fail(MOE_ERR_STATE, "%s has no gradient in this block", names[which]);
	if (which <= MOE_BLOCK_DOWN_PROJ)
		return moe_copy_base(&b->layer, (enum moe_expert_matrix)which, MOE_GRAD, NULL, dst, 1);
	src = which == MOE_BLOCK_ROUTER ? b->layer.grad_router
					: b->ffn.trained[which - MOE_BLOCK_SHARED_GATE].param.grad;
	moe_from_f32(dst->data, dst->dtype, src, (size_t)count);
	return MOE_OK;
}

enum moe_status moe_block_get_gradient(struct moe_block *b, enum moe_block_array which,
				       const struct moe_array *dst)
{
	enum moe_status st;

	MOE_TRY(moe_block_enter(b));
	st = get_gradient(b, which, dst);
	moe_block_leave(b);
	return st;
}
