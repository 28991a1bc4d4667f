/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routed experts as modules of their own, model.layers.N.mlp.experts.E.gate_proj (Mixtral:
 * block_sparse_moe.experts.E.w1): what PEFT made with transformers 4, and what vLLM and SGLang
 * read. Readers of it know one scaling for all modules, some no rsLoRA, so files are written with
 * alpha / rank alone and B takes up what differs. PEFT 0.21 takes the rank of gate and up for the
 * default of the configuration, so that is what is written there.
 */
#include "model/adapters/adapter_form.h"
#include "model/adapters/adapter_output.h"
#include "model/expert_names.h"

#include <stdio.h>

static const char *const names[2][MOE_ADAPTER_PROJECTIONS] = {
	{ "mlp.experts.%d.gate_proj", "mlp.experts.%d.up_proj", "mlp.experts.%d.down_proj" },
	{ "block_sparse_moe.experts.%d.w1", "block_sparse_moe.experts.%d.w3",
	  "block_sparse_moe.experts.%d.w2" },
};

static const char *short_name(bool mixtral, int projection)
{
	return moe_expert_names[mixtral ? MOE_NAMES_MIXTRAL : MOE_NAMES_USUAL][projection];
}

/* ---- reading ---- */

static bool has(const struct moe_adapter_input *in, int layer)
{
	return in->layer[layer].n_experts > 0;
}

/* One pair of each projection that the layer has; experts that the file lacks are trailing ones. */
static enum moe_status survey(const struct moe_adapter_input *in, struct moe_adapter_entry *e,
			      const struct moe_adapter_pair *first[MOE_ADAPTER_PROJECTIONS])
{
	const struct moe_adapter_layer *l = &in->layer[e->layer];

	for (int x = 0; x < l->n_experts; x++)
		for (int p = 0; p < MOE_ADAPTER_PROJECTIONS; p++) {
			if (!moe_adapter_has(&l->expert[x][p]))
				continue;
			MOE_TRY(moe_adapter_check_pair(&l->expert[x][p]));
			e->n_experts = x + 1;
			first[p] = first[p] ? first[p] : &l->expert[x][p];
		}
	if (!!first[MOE_ADAPTER_GATE] != !!first[MOE_ADAPTER_UP])
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"layer %d adapts gate_proj or up_proj without the other: not "
				"implemented",
				e->layer);
	return MOE_OK;
}

static enum moe_status setting(const struct moe_adapter_input *in, int layer, int projection,
			       int64_t *rank, double *alpha)
{
	char module[64], name[96];

	snprintf(module, sizeof module, names[in->adapter->mixtral][projection], 0);
	snprintf(name, sizeof name, "model.layers.%d.%s", layer, module);
	return moe_adapter_config_setting(&in->config, name, rank, alpha);
}

static enum moe_status size_experts(const struct moe_adapter_input *in, struct moe_adapter_entry *e,
				    const struct moe_adapter_pair *const first[])
{
	const struct moe_adapter_pair *g = first[MOE_ADAPTER_GATE], *d = first[MOE_ADAPTER_DOWN];
	int64_t up_rank;
	double up_alpha;

	if (g) {
		MOE_TRY(setting(in, e->layer, MOE_ADAPTER_GATE, &e->gate_up_rank,
				&e->gate_up_alpha));
		MOE_TRY(setting(in, e->layer, MOE_ADAPTER_UP, &up_rank, &up_alpha));
		if (up_rank != e->gate_up_rank || up_alpha != e->gate_up_alpha)
			return moe_fail(MOE_ERR_UNSUPPORTED,
					"layer %d: gate_proj has rank %lld alpha %g, up_proj rank "
					"%lld alpha %g: not implemented",
					e->layer, (long long)e->gate_up_rank, e->gate_up_alpha,
					(long long)up_rank, up_alpha);
		e->hidden = g->a->shape[1];
		e->intermediate = g->b->shape[0];
	}
	if (d) {
		MOE_TRY(setting(in, e->layer, MOE_ADAPTER_DOWN, &e->rank, &e->alpha));
		e->hidden = d->b->shape[0];
		e->intermediate = d->a->shape[1];
	}
	return MOE_OK;
}

/* One expert's A [rank, in] and B [out, rank]. */
static enum moe_status copy_pair(const struct moe_adapter_input *in,
				 const struct moe_adapter_entry *e, int expert, int projection,
				 int64_t rank, float *a, float *b)
{
	bool down = projection == MOE_ADAPTER_DOWN;
	const struct moe_adapter_pair *p = &in->layer[e->layer].expert[expert][projection];
	int64_t cols = down ? e->intermediate : e->hidden,
		rows = down ? e->hidden : e->intermediate;

	if (!p->a)
		return moe_fail(MOE_ERR_FORMAT,
				"layer %d: %s of expert %d is missing, others of its %lld experts "
				"have it",
				e->layer, short_name(in->adapter->mixtral, projection), expert,
				(long long)e->n_experts);
	if (p->a->shape[0] != rank || p->a->shape[1] != cols || p->b->shape[0] != rows)
		return moe_fail(MOE_ERR_FORMAT,
				"tensor '%.200s' is [%lld, %lld] and its lora_B [%lld, %lld]; rank "
				"%lld of the configuration and the other experts make [%lld, %lld] "
				"and [%lld, %lld]",
				p->a->name, (long long)p->a->shape[0], (long long)p->a->shape[1],
				(long long)p->b->shape[0], (long long)p->b->shape[1],
				(long long)rank, (long long)rank, (long long)cols, (long long)rows,
				(long long)rank);
	MOE_TRY(moe_adapter_to_f32(p->a, a + expert * rank * cols));
	return moe_adapter_to_f32(p->b, b + expert * rank * rows);
}

static enum moe_status read_experts(struct moe_adapter_input *in, struct moe_adapter_entry *e)
{
	const struct moe_adapter_pair *first[MOE_ADAPTER_PROJECTIONS] = { NULL };

	MOE_TRY(survey(in, e, first));
	MOE_TRY(size_experts(in, e, first));
	MOE_TRY(moe_adapter_alloc_experts(e, false));
	for (int x = 0; x < e->n_experts; x++) {
		if (e->gate_up_rank) {
			MOE_TRY(copy_pair(in, e, x, MOE_ADAPTER_GATE, e->gate_up_rank, e->gate_a,
					  e->gate_b));
			MOE_TRY(copy_pair(in, e, x, MOE_ADAPTER_UP, e->gate_up_rank, e->up_a,
					  e->up_b));
		}
		if (e->rank)
			MOE_TRY(copy_pair(in, e, x, MOE_ADAPTER_DOWN, e->rank, e->down_a,
					  e->down_b));
	}
	return MOE_OK;
}

/* ---- writing ---- */

static bool gate_up_setting(const struct moe_adapter_output *out, const struct moe_adapter_entry *e,
			    int64_t *rank, double *alpha)
{
	*rank = e->gate_up_rank;
	*alpha = moe_lora_alpha(false, *rank, out->uniform);
	return *rank != 0;
}

static bool down_setting(const struct moe_adapter_output *out, const struct moe_adapter_entry *e,
			 int64_t *rank, double *alpha)
{
	*rank = e->rank;
	*alpha = moe_lora_alpha(false, *rank, out->uniform);
	return *rank != 0;
}

static enum moe_status fill_b(void *user, void *to)
{
	const struct moe_adapter_fill *f = user;
	const struct moe_adapter_entry *e = f->entry;
	bool down = f->projection == MOE_ADAPTER_DOWN;
	int64_t n = down ? e->hidden * e->rank : e->intermediate * e->gate_up_rank;
	const float *b = f->projection == MOE_ADAPTER_GATE ? e->gate_b : down ? e->down_b : e->up_b;
	float *out = to;

	for (int64_t i = 0; i < n; i++)
		out[i] = (float)(b[f->expert * n + i] * f->grow);
	return MOE_OK;
}

static enum moe_status add_projection(struct moe_adapter_output *out,
				      const struct moe_adapter_entry *e, int expert, int projection)
{
	const struct moe_adapter *a = out->adapter;
	bool down = projection == MOE_ADAPTER_DOWN;
	int64_t rank = down ? e->rank : e->gate_up_rank;
	int64_t cols = down ? e->intermediate : e->hidden,
		rows = down ? e->hidden : e->intermediate;
	const float *all = down						  ? e->down_a
			   : projection == MOE_ADAPTER_GATE || a->share_a ? e->gate_a
									  : e->up_a;
	double own = down ? moe_adapter_scaling(a, e) : moe_adapter_gate_up_scaling(a, e);
	char module[64];
	struct moe_st_item *it;

	if (!rank)
		return MOE_OK;
	snprintf(module, sizeof module, names[a->mixtral][projection], expert);
	MOE_TRY(moe_adapter_add(&out->tensors, &it,
				"base_model.model.model.layers.%d.%s.lora_A.weight", e->layer,
				module));
	it->ndim = 2;
	it->shape[0] = rank;
	it->shape[1] = cols;
	it->data = all + expert * rank * cols;
	MOE_TRY(moe_adapter_add(&out->tensors, &it,
				"base_model.model.model.layers.%d.%s.lora_B.weight", e->layer,
				module));
	it->ndim = 2;
	it->shape[0] = rows;
	it->shape[1] = rank;
	it->fill = fill_b;
	out->tensors.fill[out->tensors.n - 1] =
		(struct moe_adapter_fill){ .adapter = a,
					   .entry = e,
					   .grow = own / out->uniform,
					   .projection = projection,
					   .expert = expert };
	return MOE_OK;
}

/* The scaling of the first experts, at their rank. */
static enum moe_status begin(struct moe_adapter_output *out)
{
	const struct moe_adapter *a = out->adapter;
	const struct moe_adapter_entry *e = a->entries;
	int64_t rank;

	while (e->target != MOE_ADAPTER_EXPERTS)
		e++;
	rank = e->gate_up_rank ? e->gate_up_rank : e->rank;
	out->uniform =
		e->gate_up_rank ? moe_adapter_gate_up_scaling(a, e) : moe_adapter_scaling(a, e);
	return moe_adapter_begin_uniform(out, rank);
}

static enum moe_status write_experts(struct moe_adapter_output *out)
{
	const struct moe_adapter *a = out->adapter;

	MOE_TRY(begin(out));
	for (size_t i = 0; i < a->n_entries; i++)
		for (int x = 0; x < a->entries[i].n_experts; x++)
			for (int p = 0; a->entries[i].target == MOE_ADAPTER_EXPERTS &&
					p < MOE_ADAPTER_PROJECTIONS;
			     p++)
				MOE_TRY(add_projection(out, &a->entries[i], x, p));
	for (int p = 0; p < MOE_ADAPTER_PROJECTIONS; p++)
		MOE_TRY(moe_adapter_add_module(
			out, MOE_ADAPTER_EXPERTS, "target_modules", short_name(a->mixtral, p),
			p == MOE_ADAPTER_DOWN ? down_setting : gate_up_setting));
	if (a->mixtral) /* PEFT 0.21 looks for the parameter that w2 has become */
		return moe_adapter_add_module(out, MOE_ADAPTER_EXPERTS, NULL,
					      "mlp.experts.down_proj", down_setting);
	return MOE_OK;
}

const struct moe_adapter_form moe_adapter_form_per_expert = {
	.name = "per-expert",
	.summary = "vLLM, SGLang, PEFT with transformers 4: a module per expert",
	.has = has,
	.read = read_experts,
	.write = write_experts,
};
