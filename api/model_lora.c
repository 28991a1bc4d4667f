/* SPDX-License-Identifier: Apache-2.0 */
/* What a model's adapter is on, and with which ranks: from parameters, or from an adapter. */
#include "api/model.h"

#include "model/adapters/targets.h"

#include <math.h>

#define DEFAULT_TARGETS "experts,q_proj,k_proj,v_proj,o_proj"
#define DEFAULT_RANK 16

/* Whether a layer could have the target. */
static bool possible(const struct moe_arch *arch, int target, int layer)
{
	int64_t shape[MOE_MAX_NDIM];

	return moe_arch_tensor_shape(arch, moe_adapter_target_role((enum moe_adapter_target)target),
				     layer, shape) != 0;
}

static enum moe_status finish(struct moe_model *m)
{
	if (m->lora.router_weights && m->lora.rank[MOE_ADAPTER_ROUTER])
		return moe_fail(MOE_ERR_ARG,
				"train_router trains the routers' weights, and the targets (gate) an adapter of them: "
				"one of both is possible");
	if (m->params.train_router && m->params.inference_only)
		return moe_fail(MOE_ERR_ARG, "train_router and inference_only exclude each other");
	if (m->params.train_router && !m->arch.n_experts)
		return moe_fail(MOE_ERR_ARG, "train_router: this %s model has no routers", m->arch.name);
	for (int t = 0; t < MOE_ADAPTER_TARGETS; t++)
		for (int l = 0; m->lora.rank[t] && l < m->arch.n_layers; l++)
			m->lora.partial[t] |= possible(&m->arch, t, l) && !m->lora.on[t][l];
	return MOE_OK;
}

/* Gate and up get rank R, down r; the engine computes with the larger one. */
static void plan_experts(struct moe_lora_plan *p, int R, int r, double scaling)
{
	int rank = MOE_MAX(R, r);

	p->gate_up_rank = R;
	p->down_rank = r;
	p->rank[MOE_ADAPTER_EXPERTS] = rank;
	p->alpha[MOE_ADAPTER_EXPERTS] = moe_lora_alpha(p->rslora, rank, scaling);
}

/* Targets, unless there is to be no LoRA at all. */
static enum moe_status lora_from_params(struct moe_model *m)
{
	const struct moe_model_params *p = &m->params;
	const char *text = p->lora_targets ? p->lora_targets : DEFAULT_TARGETS;
	int rank = p->lora_rank ? p->lora_rank : DEFAULT_RANK;
	int expert_rank = p->expert_rank ? p->expert_rank : rank;
	struct moe_lora_plan *lora = &m->lora;
	struct moe_targets *t;
	enum moe_status status;

	if ((p->inference_only && !p->lora_rank) || p->method == MOE_METHOD_FULL)
		return MOE_OK;
	if (!p->lora_targets && !m->arch.n_experts)
		text = "q_proj,k_proj,v_proj,o_proj";
	t = moe_alloc(1, sizeof *t);
	if (!t)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a plan");
	status = moe_targets_resolve(text, &m->arch, t);
	lora->rslora = p->rslora;
	for (int i = 0; status == MOE_OK && i < MOE_ADAPTER_TARGETS; i++) {
		memcpy(lora->on[i], t->on[i], sizeof lora->on[i]);
		if (!t->any[i] || i == MOE_ADAPTER_EXPERTS)
			continue;
		lora->rank[i] = rank;
		lora->alpha[i] = p->lora_alpha > 0 ? p->lora_alpha : 2.0 * rank;
	}
	if (status == MOE_OK && t->any[MOE_ADAPTER_EXPERTS]) {
		double alpha = p->lora_alpha > 0 ? p->lora_alpha : 2.0 * expert_rank;

		lora->share_a = p->share_a || t->fused || t->fused_twice;
		plan_experts(lora,
			     t->gate_up ? (t->fused_twice && !p->share_a ? 2 : 1) * expert_rank : 0,
			     t->down ? expert_rank : 0,
			     moe_lora_scaling(lora->rslora, expert_rank, alpha));
	}
	moe_free(t);
	return status;
}

static enum moe_status differs(const struct moe_adapter_entry *e, int64_t rank, int other)
{
	return moe_fail(
		MOE_ERR_UNSUPPORTED,
		"the adapter's %s has rank %lld in layer %d and rank %d, or another alpha, in "
		"layers before: one rank and alpha are expected",
		moe_adapter_target_name(e->target), (long long)rank, e->layer, other);
}

static enum moe_status add_experts(struct moe_lora_plan *p, const struct moe_adapter *adapter,
				   const struct moe_adapter_entry *e)
{
	int was = p->rank[MOE_ADAPTER_EXPERTS];
	double scaling = e->gate_up_rank ? moe_adapter_gate_up_scaling(adapter, e)
					 : moe_adapter_scaling(adapter, e);

	if (was && (p->gate_up_rank != e->gate_up_rank || p->down_rank != e->rank))
		return differs(e, MOE_MAX(e->rank, e->gate_up_rank), was);
	if (was && fabs(moe_lora_alpha(p->rslora, was, scaling) - p->alpha[MOE_ADAPTER_EXPERTS]) >
			   1e-9 * fabs(p->alpha[MOE_ADAPTER_EXPERTS]))
		return differs(e, was, was);
	plan_experts(p, (int)e->gate_up_rank, (int)e->rank, scaling);
	return MOE_OK;
}

static enum moe_status take_router_weights(struct moe_model *m, const struct moe_adapter *adapter)
{
	int n = 0, layers = moe_arch_moe_layers(&m->arch);

	for (size_t i = 0; i < adapter->n_entries; i++)
		n += adapter->entries[i].weight != NULL;
	if (n && n < layers && !m->params.inference_only && !m->params.train_router)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"the adapter has the weights of %d routers, the model %d: with train_router all are "
				"trained", n, layers);
	m->lora.router_weights |= n != 0;
	return MOE_OK;
}

enum moe_status moe_model_plan_lora(struct moe_model *m, const struct moe_adapter *adapter)
{
	memset(&m->lora, 0, sizeof m->lora);
	m->lora.router_weights = m->params.train_router && m->params.method != MOE_METHOD_FULL;
	if (!adapter) {
		MOE_TRY(lora_from_params(m));
		return finish(m);
	}
	MOE_TRY(moe_adapter_check(adapter, &m->arch));
	m->lora.share_a = adapter->share_a;
	m->lora.rslora = adapter->rslora;
	MOE_TRY(take_router_weights(m, adapter));
	for (size_t i = 0; i < adapter->n_entries; i++) {
		const struct moe_adapter_entry *e = &adapter->entries[i];
		int *rank = &m->lora.rank[e->target];

		if (e->weight)
			continue;
		m->lora.on[e->target][e->layer] = true;
		if (e->target == MOE_ADAPTER_EXPERTS) {
			MOE_TRY(add_experts(&m->lora, adapter, e));
			continue;
		}
		if (*rank && (*rank != e->rank || m->lora.alpha[e->target] != e->alpha))
			return differs(e, e->rank, *rank);
		*rank = (int)e->rank;
		m->lora.alpha[e->target] = e->alpha;
	}
	return finish(m);
}

static int64_t *count_of(struct moe_lora_count *c, int target)
{
	return target < MOE_ADAPTER_ATTENTION	  ? &c->attention
	       : target == MOE_ADAPTER_EXPERTS	  ? &c->experts
	       : target == MOE_ADAPTER_ROUTER	  ? &c->router
	       : target < MOE_ADAPTER_DENSE_FFN	  ? &c->shared
						  : &c->dense;
}

struct moe_lora_count moe_model_count_lora(const struct moe_model *m)
{
	const struct moe_lora_plan *p = &m->lora;
	const struct moe_arch *a = &m->arch;
	int64_t shape[MOE_MAX_NDIM], H = a->hidden, I = a->moe_intermediate;
	struct moe_lora_count c = { 0 };

	if (p->router_weights)
		c.router = (int64_t)moe_arch_moe_layers(a) * a->n_experts * H;
	for (int l = 0; l < a->n_layers; l++)
		for (int t = 0; t < MOE_ADAPTER_TARGETS; t++) {
			if (!p->on[t][l] || !p->rank[t])
				continue;
			if (t == MOE_ADAPTER_EXPERTS)
				c.experts += a->n_experts *
					     (p->down_rank * (H + I) +
					      p->gate_up_rank * ((p->share_a ? 1 : 2) * H + 2 * I));
			else if (moe_arch_tensor_shape(
					 a, moe_adapter_target_role((enum moe_adapter_target)t), l,
					 shape) == 2)
				*count_of(&c, t) += p->rank[t] * (shape[0] + shape[1]);
		}
	return c;
}
