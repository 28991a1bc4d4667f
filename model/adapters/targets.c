/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapters/targets.h"
#include "model/adapters/pattern.h"

#include <stdio.h>
#include <strings.h>

enum part { WHOLE, GATE, UP, DOWN, GATE_UP };

/* Names below model.layers.N., in memory of transformers 5, of transformers 4, in checkpoints. */
static const struct module {
	const char *name;
	enum moe_adapter_target target;
	enum part part;
} modules[] = {
	{ "self_attn.q_proj", MOE_ADAPTER_Q, WHOLE },
	{ "self_attn.k_proj", MOE_ADAPTER_K, WHOLE },
	{ "self_attn.v_proj", MOE_ADAPTER_V, WHOLE },
	{ "self_attn.o_proj", MOE_ADAPTER_O, WHOLE },
	{ "mlp.experts", MOE_ADAPTER_EXPERTS, WHOLE },
	{ "mlp.experts.gate_proj", MOE_ADAPTER_EXPERTS, GATE },
	{ "mlp.experts.up_proj", MOE_ADAPTER_EXPERTS, UP },
	{ "mlp.experts.down_proj", MOE_ADAPTER_EXPERTS, DOWN },
	{ "mlp.experts.gate_up_proj", MOE_ADAPTER_EXPERTS, GATE_UP },
	{ "mlp.experts.0.gate_proj", MOE_ADAPTER_EXPERTS, GATE },
	{ "mlp.experts.0.up_proj", MOE_ADAPTER_EXPERTS, UP },
	{ "mlp.experts.0.down_proj", MOE_ADAPTER_EXPERTS, DOWN },
	{ "block_sparse_moe.experts.0.w1", MOE_ADAPTER_EXPERTS, GATE },
	{ "block_sparse_moe.experts.0.w3", MOE_ADAPTER_EXPERTS, UP },
	{ "block_sparse_moe.experts.0.w2", MOE_ADAPTER_EXPERTS, DOWN },
	{ "mlp.gate", MOE_ADAPTER_ROUTER, WHOLE },
	{ "mlp.gate.weight", MOE_ADAPTER_ROUTER, WHOLE },
	{ "block_sparse_moe.gate", MOE_ADAPTER_ROUTER, WHOLE },
	{ "mlp.shared_expert_gate", MOE_ADAPTER_SHARED_GATE, WHOLE },
	{ "mlp.shared_expert.gate_proj", MOE_ADAPTER_SHARED_FFN, WHOLE },
	{ "mlp.shared_expert.up_proj", MOE_ADAPTER_SHARED_FFN + 1, WHOLE },
	{ "mlp.shared_expert.down_proj", MOE_ADAPTER_SHARED_FFN + 2, WHOLE },
	{ "mlp.gate_proj", MOE_ADAPTER_DENSE_FFN, WHOLE },
	{ "mlp.up_proj", MOE_ADAPTER_DENSE_FFN + 1, WHOLE },
	{ "mlp.down_proj", MOE_ADAPTER_DENSE_FFN + 2, WHOLE },
};

struct choice {
	struct moe_targets *out;
	bool own_a, gate, up;
};

static bool is_mixtral(const struct moe_arch *arch)
{
	return arch->name && !strcmp(arch->name, "mixtral");
}

/*
 * PEFT 0.21 turns gate_proj, up_proj, down_proj and gate into the fused parameters and the router
 * of these models, whatever else has such names. In Qwen2-MoE they stay the MLPs' own.
 */
static bool is_fused_by_peft(const struct moe_arch *arch)
{
	return arch->n_experts && strcmp(arch->name, "qwen2_moe") != 0;
}

/* Whether the name, in text, is of something in the layer. */
static bool exists(const struct moe_arch *arch, const struct module *m, int layer, const char *text)
{
	int64_t shape[MOE_MAX_NDIM];

	if (!moe_arch_tensor_shape(arch, moe_adapter_target_role(m->target), layer, shape))
		return false;
	if (!strncmp(m->name, "block_sparse", 12) && !is_mixtral(arch))
		return false;
	if (m->target >= MOE_ADAPTER_SHARED_FFN)
		return !is_fused_by_peft(arch);
	if (m->target == MOE_ADAPTER_EXPERTS && m->part != WHOLE)
		return is_fused_by_peft(arch) || strstr(text, "experts");
	return true;
}

static void choose(struct choice *c, const struct module *m, int layer)
{
	c->out->on[m->target][layer] = c->out->any[m->target] = true;
	if (m->target != MOE_ADAPTER_EXPERTS)
		return;
	c->own_a |= m->part == WHOLE;
	c->gate |= m->part == GATE;
	c->up |= m->part == UP;
	c->out->gate_up |= m->part != DOWN;
	c->out->down |= m->part == DOWN || m->part == WHOLE;
	c->out->fused_twice |= m->part == GATE || m->part == UP;
	c->out->fused |= m->part == GATE_UP;
}

/* Calls choose for what fits; false: nothing does. */
static bool choose_all(struct choice *c, const struct moe_arch *arch, const char *text,
		       bool (*fits)(const char *name, const void *user), const void *user)
{
	bool found = false;
	char name[96];

	for (int l = 0; l < arch->n_layers; l++)
		for (size_t i = 0; i < MOE_COUNT(modules); i++) {
			snprintf(name, sizeof name, "model.layers.%d.%s", l, modules[i].name);
			if (!exists(arch, &modules[i], l, text) || !fits(name, user))
				continue;
			choose(c, &modules[i], l);
			found = true;
		}
	return found;
}

static bool ends_with(const char *name, const void *user)
{
	const char *end = user;
	size_t n = strlen(name), m = strlen(end);

	return n >= m && !strcmp(name + n - m, end) && (n == m || name[n - m - 1] == '.');
}

static bool matches(const char *name, const void *user)
{
	return moe_pattern_matches(user, name);
}

static enum moe_status no_match(const struct moe_arch *arch, const char *name)
{
	return moe_fail(
		MOE_ERR_ARG,
		"lora_targets: nothing in this %s model is called \"%.100s\"; q_proj, k_proj, "
		"v_proj, o_proj%s, gate_proj, up_proj, down_proj%s can be adapted, all-linear is "
		"what PEFT makes of it",
		arch->name, name, arch->n_experts ? ", experts, gate (the router)" : "",
		arch->n_experts && arch->shared_intermediate ? ", shared_expert_gate" : "");
}

static enum moe_status choose_list(struct choice *c, const char *list, const struct moe_arch *arch)
{
	while (*list) {
		size_t n = strcspn(list, ", ");
		char name[128];

		if (n) {
			snprintf(name, sizeof name, "%.*s", (int)n, list);
			/* Mixtral's own names, wherever they stand */
			if (is_mixtral(arch) &&
			    (!strcmp(name, "w1") || !strcmp(name, "w2") || !strcmp(name, "w3")))
				snprintf(name, sizeof name, "block_sparse_moe.experts.0.%.*s",
					 (int)n, list);
			if (!choose_all(c, arch, name, ends_with, name))
				return no_match(arch, name);
		}
		list += n;
		list += strspn(list, ", ");
	}
	return MOE_OK;
}

static enum moe_status choose_expression(struct choice *c, const char *text,
					 const struct moe_arch *arch)
{
	regex_t re;
	bool found;

	MOE_TRY(moe_pattern_compile(text, false, "lora_targets", &re));
	found = choose_all(c, arch, text, matches, &re);
	regfree(&re);
	if (c->out->fused_twice) /* an expression on the projections also fits "mlp.experts" */
		c->own_a = false;
	return found ? MOE_OK : no_match(arch, text);
}

/* Shared experts, or dense layers, whose MLPs PEFT can name. */
static bool has_mlps(const struct moe_arch *arch, bool shared)
{
	bool any = shared && arch->n_experts && arch->shared_intermediate;

	for (int l = 0; !shared && l < arch->n_layers; l++)
		any |= !arch->layer_is_moe[l];
	return any && !is_fused_by_peft(arch);
}

enum moe_status moe_targets_resolve(const char *text, const struct moe_arch *arch,
				    struct moe_targets *out)
{
	static const char attention[] = "q_proj,k_proj,v_proj,o_proj";
	struct choice c = { .out = out };

	memset(out, 0, sizeof *out);
	if (!strcasecmp(text, "all-linear")) {
		MOE_TRY(choose_list(&c, attention, arch));
		if (is_fused_by_peft(arch))
			MOE_TRY(choose_list(&c, "gate", arch));
		MOE_TRY(choose_list(&c, "gate_proj,up_proj,down_proj", arch));
		if (arch->n_experts && arch->shared_intermediate)
			MOE_TRY(choose_list(&c, "shared_expert_gate", arch));
	} else if (!strcmp(text, "all")) {
		MOE_TRY(choose_list(&c, attention, arch));
		if (arch->n_experts)
			MOE_TRY(choose_list(&c, "experts", arch));
		if (has_mlps(arch, true))
			MOE_TRY(choose_list(&c,
					    "shared_expert.gate_proj,shared_expert.up_proj,"
					    "shared_expert.down_proj,shared_expert_gate",
					    arch));
		if (has_mlps(arch, false))
			MOE_TRY(choose_list(&c, "mlp.gate_proj,mlp.up_proj,mlp.down_proj", arch));
	} else if (moe_pattern_is_expression(text)) {
		MOE_TRY(choose_expression(&c, text, arch));
	} else {
		MOE_TRY(choose_list(&c, text, arch));
	}
	if (c.gate != c.up && !c.own_a)
		return moe_fail(MOE_ERR_ARG,
				"lora_targets \"%.100s\": gate_proj and up_proj of experts are one "
				"matrix: name both, or neither",
				text);
	if (c.own_a)
		out->fused = out->fused_twice = false;
	if (out->fused_twice)
		out->fused = false;
	for (int t = 0; t < MOE_ADAPTER_TARGETS; t++)
		if (out->any[t])
			return MOE_OK;
	return moe_fail(MOE_ERR_ARG, "lora_targets \"%.100s\" names nothing", text);
}
