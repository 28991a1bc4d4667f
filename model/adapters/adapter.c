/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapters/adapter.h"

#include <math.h>
#include <stdio.h>

void moe_adapter_free(struct moe_adapter *adapter)
{
	if (!adapter)
		return;
	for (size_t i = 0; i < adapter->n_entries; i++)
		moe_free(adapter->entries[i].block);
	moe_free(adapter->entries);
	moe_free(adapter->base_model);
	moe_free(adapter);
}

static const struct {
	const char *name, *module;
	enum moe_role role;
} targets[MOE_ADAPTER_TARGETS] = {
	[MOE_ADAPTER_Q] = { "q_proj", "self_attn.q_proj", MOE_ROLE_Q },
	[MOE_ADAPTER_K] = { "k_proj", "self_attn.k_proj", MOE_ROLE_K },
	[MOE_ADAPTER_V] = { "v_proj", "self_attn.v_proj", MOE_ROLE_V },
	[MOE_ADAPTER_O] = { "o_proj", "self_attn.o_proj", MOE_ROLE_O },
	[MOE_ADAPTER_EXPERTS] = { "experts", "mlp.experts", MOE_ROLE_EXPERTS_GATE_UP },
	[MOE_ADAPTER_ROUTER] = { "gate", "mlp.gate", MOE_ROLE_ROUTER },
	[MOE_ADAPTER_SHARED_GATE] = { "shared_expert_gate", "mlp.shared_expert_gate",
				      MOE_ROLE_SHARED_ROUTER },
	[MOE_ADAPTER_SHARED_FFN] = { "shared_expert.gate_proj", "mlp.shared_expert.gate_proj",
				     MOE_ROLE_SHARED_GATE },
	[MOE_ADAPTER_SHARED_FFN + 1] = { "shared_expert.up_proj", "mlp.shared_expert.up_proj",
					 MOE_ROLE_SHARED_UP },
	[MOE_ADAPTER_SHARED_FFN + 2] = { "shared_expert.down_proj", "mlp.shared_expert.down_proj",
					 MOE_ROLE_SHARED_DOWN },
	[MOE_ADAPTER_DENSE_FFN] = { "mlp.gate_proj", "mlp.gate_proj", MOE_ROLE_DENSE_GATE },
	[MOE_ADAPTER_DENSE_FFN + 1] = { "mlp.up_proj", "mlp.up_proj", MOE_ROLE_DENSE_UP },
	[MOE_ADAPTER_DENSE_FFN + 2] = { "mlp.down_proj", "mlp.down_proj", MOE_ROLE_DENSE_DOWN },
};

const char *moe_adapter_target_name(enum moe_adapter_target target)
{
	return (unsigned)target < MOE_ADAPTER_TARGETS ? targets[target].name : "?";
}

const char *moe_adapter_target_module(enum moe_adapter_target target)
{
	return (unsigned)target < MOE_ADAPTER_TARGETS ? targets[target].module : "?";
}

enum moe_role moe_adapter_target_role(enum moe_adapter_target target)
{
	return targets[target].role;
}

double moe_lora_scaling(bool rslora, int64_t rank, double alpha)
{
	return alpha / (rslora ? sqrt((double)rank) : (double)rank);
}

double moe_lora_alpha(bool rslora, int64_t rank, double scaling)
{
	return scaling * (rslora ? sqrt((double)rank) : (double)rank);
}

double moe_adapter_scaling(const struct moe_adapter *adapter, const struct moe_adapter_entry *entry)
{
	return moe_lora_scaling(adapter->rslora, entry->rank, entry->alpha);
}

double moe_adapter_gate_up_scaling(const struct moe_adapter *adapter,
				   const struct moe_adapter_entry *entry)
{
	return moe_lora_scaling(adapter->rslora, entry->gate_up_rank, entry->gate_up_alpha);
}

const struct moe_adapter_entry *moe_adapter_find(const struct moe_adapter *adapter, int layer,
						 enum moe_adapter_target target)
{
	for (size_t i = 0; i < adapter->n_entries; i++)
		if (adapter->entries[i].layer == layer && adapter->entries[i].target == target)
			return &adapter->entries[i];
	return NULL;
}

int64_t moe_adapter_count_params(const struct moe_adapter *adapter)
{
	int64_t n = 0;

	for (size_t i = 0; i < adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &adapter->entries[i];

		if (e->weight)
			n += e->in * e->out;
		else if (e->target != MOE_ADAPTER_EXPERTS)
			n += e->rank * (e->in + e->out);
		else
			n += e->n_experts *
			     (e->rank * (e->hidden + e->intermediate) +
			      e->gate_up_rank * ((adapter->share_a ? 1 : 2) * e->hidden +
						 2 * e->intermediate));
	}
	return n;
}

int moe_adapter_layers(const struct moe_adapter *adapter)
{
	int n = 0;

	for (size_t i = 0; i < adapter->n_entries; i++)
		n = MOE_MAX(n, adapter->entries[i].layer + 1);
	return n;
}

enum moe_status moe_adapter_alloc_experts(struct moe_adapter_entry *e, bool share_a)
{
	size_t gu = (size_t)(e->n_experts * e->gate_up_rank), d = (size_t)(e->n_experts * e->rank);
	size_t H = (size_t)e->hidden, I = (size_t)e->intermediate;
	size_t n = gu * ((share_a ? 1 : 2) * H + 2 * I) + d * (H + I);
	float *at = moe_calloc(n, sizeof *at);

	if (!at)
		return moe_fail(MOE_ERR_NOMEM, "out of memory for %zu values", n);
	e->block = at;
	if (gu) {
		e->gate_a = at;
		e->up_a = share_a ? at : at + gu * H;
		e->gate_b = e->up_a + gu * H;
		e->up_b = e->gate_b + gu * I;
		at = e->up_b + gu * I;
	}
	if (d) {
		e->down_a = at;
		e->down_b = at + d * I;
	}
	return MOE_OK;
}

/* ---- complete? ---- */

static bool experts_complete(const struct moe_adapter_entry *e, bool share_a)
{
	if (e->n_experts < 1 || e->hidden < 1 || e->intermediate < 1 || e->gate_up_rank < 0 ||
	    e->rank < 0 || !(e->rank || e->gate_up_rank))
		return false;
	if (e->gate_up_rank && (!e->gate_a || !(share_a || e->up_a) || !e->gate_b || !e->up_b))
		return false;
	return !e->rank || (e->down_a && e->down_b);
}

static enum moe_status validate_entry(const struct moe_adapter *adapter,
				      const struct moe_adapter_entry *e)
{
	bool experts = e->target == MOE_ADAPTER_EXPERTS;

	if (e->layer < 0 || (unsigned)e->target >= MOE_ADAPTER_TARGETS)
		return moe_fail(MOE_ERR_ARG, "adapter entry of layer %d has target %d", e->layer,
				(int)e->target);
	if (e->weight && (e->target != MOE_ADAPTER_ROUTER || e->rank || e->in < 1 || e->out < 1))
		return moe_fail(MOE_ERR_ARG, "%s of layer %d has a weight of [%lld, %lld] and rank %lld",
				moe_adapter_target_name(e->target), e->layer, (long long)e->out,
				(long long)e->in, (long long)e->rank);
	if (e->weight)
		return MOE_OK;
	if ((!experts && e->rank < 1) || !isfinite(e->alpha) || !isfinite(e->gate_up_alpha))
		return moe_fail(MOE_ERR_ARG, "%s of layer %d has rank %lld, alpha %g",
				moe_adapter_target_name(e->target), e->layer, (long long)e->rank,
				e->alpha);
	if (experts ? !experts_complete(e, adapter->share_a)
		    : !e->a || !e->b || e->in < 1 || e->out < 1)
		return moe_fail(MOE_ERR_ARG, "%s of layer %d lacks an array or a size",
				moe_adapter_target_name(e->target), e->layer);
	return MOE_OK;
}

enum moe_status moe_adapter_validate(const struct moe_adapter *adapter)
{
	if (adapter->rank < 1 || !isfinite(adapter->alpha) || !adapter->n_entries)
		return moe_fail(MOE_ERR_ARG, "adapter has rank %lld, alpha %g, %zu entries",
				(long long)adapter->rank, adapter->alpha, adapter->n_entries);
	for (size_t i = 0; i < adapter->n_entries; i++)
		MOE_TRY(validate_entry(adapter, &adapter->entries[i]));
	return MOE_OK;
}

/* ---- for this model? ---- */

static enum moe_status misfit(const struct moe_adapter *adapter, const struct moe_adapter_entry *e,
			      const char *has, const char *wants)
{
	return moe_fail(MOE_ERR_FORMAT,
			"model.layers.%d.%s: the adapter has %s, the %s; the adapter was made for "
			"another base model%s%s%s: give it the one that it was trained on",
			e->layer, moe_adapter_target_module(e->target), has, wants,
			adapter->base_model ? " (\"" : "",
			adapter->base_model ? adapter->base_model : "",
			adapter->base_model ? "\")" : "");
}

static enum moe_status check_matrix(const struct moe_adapter *adapter,
				    const struct moe_adapter_entry *e, const struct moe_arch *arch)
{
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(arch, targets[e->target].role, e->layer, shape);
	char has[128], wants[128];

	if (ndim == 2 && e->out == shape[0] && e->in == shape[1])
		return MOE_OK;
	if (e->weight)
		snprintf(has, sizeof has, "a weight [%lld, %lld]", (long long)e->out, (long long)e->in);
	else
		snprintf(has, sizeof has, "lora_A [%lld, %lld] and lora_B [%lld, %lld]", (long long)e->rank,
		 (long long)e->in, (long long)e->out, (long long)e->rank);
	if (ndim)
		snprintf(wants, sizeof wants, "%s model's weight is [%lld, %lld]", arch->name,
			 (long long)shape[0], (long long)shape[1]);
	else
		snprintf(wants, sizeof wants, "%s model's layer has no such matrix", arch->name);
	return misfit(adapter, e, has, wants);
}

static enum moe_status check_experts(const struct moe_adapter *adapter,
				     const struct moe_adapter_entry *e, const struct moe_arch *arch)
{
	char has[128], wants[128];

	if (arch->layer_is_moe[e->layer] && e->n_experts == arch->n_experts &&
	    e->hidden == arch->hidden && e->intermediate == arch->moe_intermediate)
		return MOE_OK;
	snprintf(has, sizeof has, "%lld experts of gate and up [%lld, %lld]",
		 (long long)e->n_experts, (long long)e->intermediate, (long long)e->hidden);
	if (arch->layer_is_moe[e->layer])
		snprintf(wants, sizeof wants, "%s model %d of [%lld, %lld]", arch->name,
			 arch->n_experts, (long long)arch->moe_intermediate,
			 (long long)arch->hidden);
	else
		snprintf(wants, sizeof wants, "%s model's layer has none", arch->name);
	return misfit(adapter, e, has, wants);
}

enum moe_status moe_adapter_check(const struct moe_adapter *adapter, const struct moe_arch *arch)
{
	for (size_t i = 0; i < adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &adapter->entries[i];
		char has[32], wants[64];

		if (e->layer < 0 || e->layer >= arch->n_layers) {
			snprintf(has, sizeof has, "layer %d", e->layer);
			snprintf(wants, sizeof wants, "%.32s model %d layers", arch->name,
				 arch->n_layers);
			return misfit(adapter, e, has, wants);
		}
		MOE_TRY(e->target == MOE_ADAPTER_EXPERTS ? check_experts(adapter, e, arch)
							 : check_matrix(adapter, e, arch));
	}
	return MOE_OK;
}
