/* SPDX-License-Identifier: Apache-2.0 */
/* The output of a first forward, kept for a caller that recomputes. */
#include "api/experts.h"

#include <stdio.h>

enum moe_checkpoint moe_experts_checkpoint_state(const struct moe_expert_layer *l)
{
	return l ? l->checkpoint : MOE_CHECKPOINT_EMPTY;
}

static void poison(struct moe_expert_layer *l, const char *why)
{
	l->checkpoint = MOE_CHECKPOINT_POISONED;
	l->checkpoint_T = 0;
	snprintf(l->checkpoint_error, sizeof l->checkpoint_error, "%s", why ? why : "");
}

/* Poisons with the text of the failure. */
static enum moe_status fail(struct moe_expert_layer *l, enum moe_status st)
{
	poison(l, moe_last_error());
	return st;
}

static enum moe_status check_sound(const struct moe_expert_layer *l)
{
	return l->checkpoint != MOE_CHECKPOINT_POISONED
		       ? MOE_OK
		       : moe_fail(MOE_ERR_STATE, "the checkpoint cache is poisoned: %s",
				  l->checkpoint_error);
}

enum moe_status moe_experts_checkpoint_poison(struct moe_expert_layer *l, const char *why)
{
	MOE_TRY(moe_experts_enter(l));
	poison(l, why);
	moe_experts_leave(l);
	return MOE_OK;
}

static enum moe_status begin(struct moe_expert_layer *l)
{
	MOE_TRY(check_sound(l));
	if (l->checkpoint == MOE_CHECKPOINT_EMPTY)
		return MOE_OK;
	return fail(l, moe_fail(MOE_ERR_STATE, "a checkpoint's output is cached still, before a new first "
					       "forward: its backward never ran"));
}

enum moe_status moe_experts_checkpoint_begin(struct moe_expert_layer *l)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = begin(l);
	moe_experts_leave(l);
	return st;
}

/* Rows of a caller's matrix to (load) or from the cache. */
static void copy(struct moe_expert_layer *l, const struct moe_array *a, bool load)
{
	struct moe_copy_args args = { .array = *a,
				      .rows = l->checkpoint_out,
				      .n = l->layer.H,
				      .t1 = (int)a->shape[0] };

	(load ? moe_copy_load : moe_copy_store)(&args);
}

static enum moe_status put(struct moe_expert_layer *l, const struct moe_array *out)
{
	enum moe_status st;
	float *grown;

	MOE_TRY(check_sound(l));
	if (l->checkpoint == MOE_CHECKPOINT_READY)
		return fail(l, moe_fail(MOE_ERR_STATE,
					"a checkpoint's output is cached still: no backward has used it"));
	st = moe_check_float_matrix("out", out, -1, l->layer.H);
	if (st == MOE_OK && out->shape[0] > INT32_MAX)
		st = moe_fail(MOE_ERR_ARG, "out has %lld rows; at most %d fit", (long long)out->shape[0], INT32_MAX);
	if (st != MOE_OK)
		return fail(l, st);
	if (out->shape[0] > l->checkpoint_capacity) {
		grown = moe_realloc(l->checkpoint_out, (size_t)out->shape[0] * (size_t)l->layer.H,
				    sizeof *grown);
		if (!grown)
			return fail(l, moe_fail(MOE_ERR_NOMEM, "no memory for a checkpoint of %lld rows",
						(long long)out->shape[0]));
		l->checkpoint_out = grown;
		l->checkpoint_capacity = (int)out->shape[0];
	}
	copy(l, out, true);
	l->checkpoint_T = (int)out->shape[0];
	l->checkpoint = MOE_CHECKPOINT_READY;
	return MOE_OK;
}

enum moe_status moe_experts_checkpoint_put(struct moe_expert_layer *l, const struct moe_array *out)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = put(l, out);
	moe_experts_leave(l);
	return st;
}

static enum moe_status get(struct moe_expert_layer *l, const struct moe_array *out)
{
	enum moe_status st;

	MOE_TRY(check_sound(l));
	if (l->checkpoint != MOE_CHECKPOINT_READY)
		return moe_fail(MOE_ERR_STATE, "no checkpoint's output is cached");
	st = moe_check_written_matrix("out", out, -1, l->layer.H);
	if (st != MOE_OK)
		return fail(l, st);
	if (out->shape[0] != l->checkpoint_T)
		return fail(l, moe_fail(MOE_ERR_ARG, "the checkpoint's output has %d rows, %lld are asked for",
					l->checkpoint_T, (long long)out->shape[0]));
	copy(l, out, false);
	return MOE_OK;
}

enum moe_status moe_experts_checkpoint_get(struct moe_expert_layer *l, const struct moe_array *out)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = get(l, out);
	moe_experts_leave(l);
	return st;
}

void moe_experts_checkpoint_clear(struct moe_expert_layer *l)
{
	if (!l || l->checkpoint == MOE_CHECKPOINT_POISONED)
		return;
	l->checkpoint = MOE_CHECKPOINT_EMPTY;
	l->checkpoint_T = 0;
}
