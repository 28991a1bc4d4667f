/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch.h"
#include "model/arch_reader.h"

#include <stdio.h>

#define IN_LAYER "model.layers.{L}."

enum role_scope { SCOPE_MODEL, SCOPE_LAYER, SCOPE_DENSE, SCOPE_MOE, SCOPE_SHARED };

/* Names are those of most architectures; a reader may have its own. */
#define ROLE(scope, group, name, ...)                                                              \
	{                                                                                          \
		name, SCOPE_##scope, MOE_PARAMS_##group,                                           \
		{                                                                                  \
			{                                                                          \
				__VA_ARGS__                                                        \
			}                                                                          \
		}                                                                                  \
	}
static const struct {
	const char *name;
	enum role_scope scope;
	enum moe_param_group group;
	struct moe_role_names common;
} roles[MOE_ROLE_COUNT] = {
	[MOE_ROLE_EMBED] = ROLE(MODEL, EMBED, "embed", "model.embed_tokens.weight"),
	[MOE_ROLE_FINAL_NORM] = ROLE(MODEL, NORM, "final_norm", "model.norm.weight"),
	[MOE_ROLE_LM_HEAD] = ROLE(MODEL, EMBED, "lm_head", "lm_head.weight"),
	[MOE_ROLE_ATTN_NORM] = ROLE(LAYER, NORM, "attn_norm", IN_LAYER "input_layernorm.weight"),
	[MOE_ROLE_Q] = ROLE(LAYER, ATTENTION, "q", IN_LAYER "self_attn.q_proj.weight"),
	[MOE_ROLE_K] = ROLE(LAYER, ATTENTION, "k", IN_LAYER "self_attn.k_proj.weight"),
	[MOE_ROLE_V] = ROLE(LAYER, ATTENTION, "v", IN_LAYER "self_attn.v_proj.weight"),
	[MOE_ROLE_O] = ROLE(LAYER, ATTENTION, "o", IN_LAYER "self_attn.o_proj.weight"),
	[MOE_ROLE_Q_BIAS] = ROLE(LAYER, ATTENTION, "q_bias", IN_LAYER "self_attn.q_proj.bias"),
	[MOE_ROLE_K_BIAS] = ROLE(LAYER, ATTENTION, "k_bias", IN_LAYER "self_attn.k_proj.bias"),
	[MOE_ROLE_V_BIAS] = ROLE(LAYER, ATTENTION, "v_bias", IN_LAYER "self_attn.v_proj.bias"),
	[MOE_ROLE_O_BIAS] = ROLE(LAYER, ATTENTION, "o_bias", IN_LAYER "self_attn.o_proj.bias"),
	[MOE_ROLE_Q_NORM] = ROLE(LAYER, NORM, "q_norm", IN_LAYER "self_attn.q_norm.weight"),
	[MOE_ROLE_K_NORM] = ROLE(LAYER, NORM, "k_norm", IN_LAYER "self_attn.k_norm.weight"),
	[MOE_ROLE_FFN_NORM] =
		ROLE(LAYER, NORM, "ffn_norm", IN_LAYER "post_attention_layernorm.weight"),
	[MOE_ROLE_DENSE_GATE] = ROLE(DENSE, DENSE, "dense_gate", IN_LAYER "mlp.gate_proj.weight"),
	[MOE_ROLE_DENSE_UP] = ROLE(DENSE, DENSE, "dense_up", IN_LAYER "mlp.up_proj.weight"),
	[MOE_ROLE_DENSE_DOWN] = ROLE(DENSE, DENSE, "dense_down", IN_LAYER "mlp.down_proj.weight"),
	[MOE_ROLE_ROUTER] = ROLE(MOE, ROUTER, "router", IN_LAYER "mlp.gate.weight"),
	[MOE_ROLE_EXPERT_GATE] =
		ROLE(MOE, EXPERTS, "expert_gate", IN_LAYER "mlp.experts.{E}.gate_proj.weight"),
	[MOE_ROLE_EXPERT_UP] =
		ROLE(MOE, EXPERTS, "expert_up", IN_LAYER "mlp.experts.{E}.up_proj.weight"),
	[MOE_ROLE_EXPERT_DOWN] =
		ROLE(MOE, EXPERTS, "expert_down", IN_LAYER "mlp.experts.{E}.down_proj.weight"),
	[MOE_ROLE_EXPERTS_GATE_UP] =
		ROLE(MOE, EXPERTS, "experts_gate_up", IN_LAYER "mlp.experts.gate_up_proj",
		     IN_LAYER "mlp.experts.gate_up_proj.weight"),
	[MOE_ROLE_EXPERTS_DOWN] =
		ROLE(MOE, EXPERTS, "experts_down", IN_LAYER "mlp.experts.down_proj",
		     IN_LAYER "mlp.experts.down_proj.weight"),
	[MOE_ROLE_SHARED_GATE] =
		ROLE(SHARED, SHARED, "shared_gate", IN_LAYER "mlp.shared_expert.gate_proj.weight"),
	[MOE_ROLE_SHARED_UP] =
		ROLE(SHARED, SHARED, "shared_up", IN_LAYER "mlp.shared_expert.up_proj.weight"),
	[MOE_ROLE_SHARED_DOWN] =
		ROLE(SHARED, SHARED, "shared_down", IN_LAYER "mlp.shared_expert.down_proj.weight"),
	[MOE_ROLE_SHARED_ROUTER] =
		ROLE(SHARED, SHARED, "shared_router", IN_LAYER "mlp.shared_expert_gate.weight"),
};
#undef ROLE

const char *moe_role_name(enum moe_role role)
{
	return (unsigned)role < MOE_ROLE_COUNT ? roles[role].name : "?";
}

const char *moe_param_group_name(enum moe_param_group group)
{
	static const char *const names[MOE_PARAMS_COUNT] = {
		[MOE_PARAMS_EMBED] = "embedding and head",
		[MOE_PARAMS_NORM] = "norms",
		[MOE_PARAMS_ATTENTION] = "attention",
		[MOE_PARAMS_DENSE] = "dense MLPs",
		[MOE_PARAMS_ROUTER] = "router",
		[MOE_PARAMS_SHARED] = "shared experts",
		[MOE_PARAMS_EXPERTS] = "routed experts",
	};

	return (unsigned)group < MOE_PARAMS_COUNT ? names[group] : "?";
}

static int dims(int64_t *shape, int64_t a, int64_t b, int64_t c)
{
	shape[0] = a;
	shape[1] = b;
	shape[2] = c;
	return c ? 3 : b ? 2 : 1;
}

static bool role_applies(const struct moe_arch *arch, enum moe_role role, int layer)
{
	if (roles[role].scope == SCOPE_MODEL)
		return role != MOE_ROLE_LM_HEAD || !arch->tie_embeddings;
	if (layer < 0 || layer >= arch->n_layers)
		return false;
	switch (roles[role].scope) {
	case SCOPE_DENSE:
		return !arch->layer_is_moe[layer];
	case SCOPE_MOE:
		return arch->layer_is_moe[layer];
	case SCOPE_SHARED:
		return arch->layer_is_moe[layer] && arch->shared_intermediate;
	default:
		return true;
	}
}

static int attention_shape(const struct moe_arch *a, enum moe_role role, int64_t *shape)
{
	int64_t q = (int64_t)a->n_heads * a->head_dim, kv = (int64_t)a->n_kv_heads * a->head_dim;

	switch (role) {
	case MOE_ROLE_Q:
		return dims(shape, q, a->hidden, 0);
	case MOE_ROLE_K:
	case MOE_ROLE_V:
		return dims(shape, kv, a->hidden, 0);
	case MOE_ROLE_O:
		return dims(shape, a->hidden, q, 0);
	case MOE_ROLE_Q_BIAS:
		return a->qkv_bias ? dims(shape, q, 0, 0) : 0;
	case MOE_ROLE_K_BIAS:
	case MOE_ROLE_V_BIAS:
		return a->qkv_bias ? dims(shape, kv, 0, 0) : 0;
	case MOE_ROLE_O_BIAS:
		return a->o_bias ? dims(shape, a->hidden, 0, 0) : 0;
	default: /* Q_NORM, K_NORM */
		if (a->qk_norm == MOE_QK_NORM_NONE)
			return 0;
		if (a->qk_norm == MOE_QK_NORM_HEAD)
			return dims(shape, a->head_dim, 0, 0);
		return dims(shape, role == MOE_ROLE_Q_NORM ? q : kv, 0, 0);
	}
}

int moe_arch_tensor_shape(const struct moe_arch *a, enum moe_role role, int layer,
			  int64_t shape[MOE_MAX_NDIM])
{
	if ((unsigned)role >= MOE_ROLE_COUNT || !role_applies(a, role, layer))
		return 0;
	switch (role) {
	case MOE_ROLE_EMBED:
	case MOE_ROLE_LM_HEAD:
		return dims(shape, a->vocab, a->hidden, 0);
	case MOE_ROLE_FINAL_NORM:
	case MOE_ROLE_ATTN_NORM:
	case MOE_ROLE_FFN_NORM:
		return dims(shape, a->hidden, 0, 0);
	case MOE_ROLE_DENSE_GATE:
	case MOE_ROLE_DENSE_UP:
		return dims(shape, a->intermediate, a->hidden, 0);
	case MOE_ROLE_DENSE_DOWN:
		return dims(shape, a->hidden, a->intermediate, 0);
	case MOE_ROLE_ROUTER:
		return dims(shape, a->n_experts, a->hidden, 0);
	case MOE_ROLE_EXPERT_GATE:
	case MOE_ROLE_EXPERT_UP:
		return dims(shape, a->moe_intermediate, a->hidden, 0);
	case MOE_ROLE_EXPERT_DOWN:
		return dims(shape, a->hidden, a->moe_intermediate, 0);
	case MOE_ROLE_EXPERTS_GATE_UP:
		return dims(shape, a->n_experts, 2 * a->moe_intermediate, a->hidden);
	case MOE_ROLE_EXPERTS_DOWN:
		return dims(shape, a->n_experts, a->hidden, a->moe_intermediate);
	case MOE_ROLE_SHARED_GATE:
	case MOE_ROLE_SHARED_UP:
		return dims(shape, a->shared_intermediate, a->hidden, 0);
	case MOE_ROLE_SHARED_DOWN:
		return dims(shape, a->hidden, a->shared_intermediate, 0);
	case MOE_ROLE_SHARED_ROUTER:
		return a->shared_gate ? dims(shape, 1, a->hidden, 0) : 0;
	default:
		return attention_shape(a, role, shape);
	}
}

/* pattern with {L} and {E} replaced. */
static void expand_name(const char *pattern, int layer, int expert, char *buf)
{
	size_t at = 0;

	while (*pattern && at + 12 < MOE_TENSOR_NAME_MAX) {
		if (!strncmp(pattern, "{L}", 3) || !strncmp(pattern, "{E}", 3)) {
			at += (size_t)sprintf(buf + at, "%d", pattern[1] == 'L' ? layer : expert);
			pattern += 3;
		} else {
			buf[at++] = *pattern++;
		}
	}
	buf[at] = 0;
}

bool moe_arch_tensor_name(const struct moe_arch *arch, enum moe_role role, int layer, int expert,
			  int variant, char *buf)
{
	const struct moe_role_names *own = arch->reader ? arch->reader->names : NULL;
	const char *const *names;
	int64_t shape[MOE_MAX_NDIM];

	if (variant < 0 || variant >= MOE_NAME_VARIANTS ||
	    !moe_arch_tensor_shape(arch, role, layer, shape))
		return false;
	if (moe_role_is_expert(role) && (expert < 0 || expert >= arch->n_experts))
		return false;
	names = own && own[role].names[0] ? own[role].names : roles[role].common.names;
	if (!names[variant])
		return false;
	expand_name(names[variant], layer, expert, buf);
	return true;
}

int moe_arch_moe_layers(const struct moe_arch *arch)
{
	int n = 0;

	for (int i = 0; i < arch->n_layers; i++)
		n += arch->layer_is_moe[i];
	return n;
}

void moe_arch_count_params(const struct moe_arch *arch, struct moe_param_count *out)
{
	int64_t shape[MOE_MAX_NDIM], inactive;

	*out = (struct moe_param_count){ 0 };
	for (int role = 0; role < MOE_ROLE_COUNT; role++) {
		int layers = roles[role].scope == SCOPE_MODEL ? 1 : arch->n_layers;

		/* the fused roles stand for the per-expert ones */
		if (moe_role_is_expert((enum moe_role)role))
			continue;
		for (int i = 0; i < layers; i++) {
			int ndim = moe_arch_tensor_shape(arch, (enum moe_role)role, i, shape);

			if (ndim)
				out->groups[roles[role].group] += moe_shape_count(ndim, shape);
		}
	}
	out->groups[MOE_PARAMS_ATTENTION] += arch->attention_params_more;
	out->groups[MOE_PARAMS_EXPERTS] += arch->expert_params_more;
	for (int g = 0; g < MOE_PARAMS_COUNT; g++)
		out->total += out->groups[g];
	inactive = arch->n_experts ? out->groups[MOE_PARAMS_EXPERTS] / arch->n_experts *
					     (arch->n_experts - arch->top_k)
				   : 0;
	out->active = out->total - inactive;
}
