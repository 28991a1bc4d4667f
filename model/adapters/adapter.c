/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapters/adapter.h"

#include <math.h>

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

const char *moe_adapter_target_name(enum moe_adapter_target target)
{
	static const char *const names[MOE_ADAPTER_TARGETS] = { "q_proj", "k_proj", "v_proj",
								"o_proj", "experts" };

	return (unsigned)target < MOE_ADAPTER_TARGETS ? names[target] : "?";
}

double moe_adapter_scaling(const struct moe_adapter *adapter, const struct moe_adapter_entry *entry)
{
	double rank = (double)entry->rank;

	return entry->alpha / (adapter->rslora ? sqrt(rank) : rank);
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

		if (e->target != MOE_ADAPTER_EXPERTS)
			n += e->rank * (e->in + e->out);
		else
			n += e->n_experts * e->rank *
			     ((adapter->share_a ? 2 : 3) * e->hidden + 3 * e->intermediate);
	}
	return n;
}

static bool attention_fits(const struct moe_adapter_entry *e, const struct moe_arch *arch)
{
	static const enum moe_role roles[MOE_ADAPTER_EXPERTS] = { MOE_ROLE_Q, MOE_ROLE_K,
								  MOE_ROLE_V, MOE_ROLE_O };
	int64_t shape[MOE_MAX_NDIM];

	return moe_arch_tensor_shape(arch, roles[e->target], e->layer, shape) == 2 &&
	       e->out == shape[0] && e->in == shape[1];
}

enum moe_status moe_adapter_check(const struct moe_adapter *adapter, const struct moe_arch *arch)
{
	for (size_t i = 0; i < adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &adapter->entries[i];

		if (e->layer < 0 || e->layer >= arch->n_layers)
			return moe_fail(MOE_ERR_FORMAT,
					"the adapter has layer %d, the model %d layers: "
					"made for another model?",
					e->layer, arch->n_layers);
		if (e->target != MOE_ADAPTER_EXPERTS) {
			if (!attention_fits(e, arch))
				return moe_fail(MOE_ERR_FORMAT,
						"the adapter's %s of layer %d is for "
						"%lld -> %lld: made for another model?",
						moe_adapter_target_name(e->target), e->layer,
						(long long)e->in, (long long)e->out);
		} else if (!arch->layer_is_moe[e->layer] || e->n_experts != arch->n_experts ||
			   e->hidden != arch->hidden || e->intermediate != arch->moe_intermediate) {
			return moe_fail(MOE_ERR_FORMAT,
					"the adapter's experts of layer %d are %lld "
					"of %lld x %lld: made for another model?",
					e->layer, (long long)e->n_experts, (long long)e->hidden,
					(long long)e->intermediate);
		}
	}
	return MOE_OK;
}
