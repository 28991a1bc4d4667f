/* SPDX-License-Identifier: Apache-2.0 */
/* What config.json says, from a GGUF's metadata and the shapes of its tensors. */
#include "model/readers/gguf.h"

#include <stdio.h>

#define KEY_BYTES 128

static const struct moe_gguf_arch archs[] = {
	{
		.name = "qwen3moe",
		.model_type = "qwen3_moe",
		.class = "Qwen3MoeForCausalLM",
		.norm_topk = true,
		.router = "mlp.gate.weight",
		.expert = { "mlp.experts.%d.gate_proj.weight", "mlp.experts.%d.up_proj.weight",
			    "mlp.experts.%d.down_proj.weight" },
	},
	{
		.name = "qwen2moe",
		.model_type = "qwen2_moe",
		.class = "Qwen2MoeForCausalLM",
		.bias = true,
		.router = "mlp.gate.weight",
		.expert = { "mlp.experts.%d.gate_proj.weight", "mlp.experts.%d.up_proj.weight",
			    "mlp.experts.%d.down_proj.weight" },
	},
	{
		.name = "olmoe",
		.model_type = "olmoe",
		.class = "OlmoeForCausalLM",
		.router = "mlp.gate.weight",
		.expert = { "mlp.experts.%d.gate_proj.weight", "mlp.experts.%d.up_proj.weight",
			    "mlp.experts.%d.down_proj.weight" },
	},
	{
		.name = "llama",
		.model_type = "mixtral",
		.class = "MixtralForCausalLM",
		.norm_topk = true,
		.permuted = true,
		.router = "block_sparse_moe.gate.weight",
		.expert = { "block_sparse_moe.experts.%d.w1.weight",
			    "block_sparse_moe.experts.%d.w3.weight",
			    "block_sparse_moe.experts.%d.w2.weight" },
	},
};

enum moe_status moe_gguf_arch(const struct moe_gguf *g, const struct moe_gguf_arch **out)
{
	char name[64] = "", key[KEY_BYTES];
	int64_t experts = 0;
	bool found;

	MOE_TRY(moe_gguf_text(g, "general.architecture", name, sizeof name, &found));
	if (!found)
		return moe_fail(MOE_ERR_FORMAT, "%s: general.architecture is missing",
				moe_gguf_path(g));
	*out = NULL;
	for (size_t i = 0; i < MOE_COUNT(archs); i++)
		if (!strcmp(archs[i].name, name))
			*out = &archs[i];
	if (!*out)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: architecture '%s' cannot be trained from a GGUF file (known: "
				"qwen3moe, qwen2moe, "
				"olmoe, llama with experts)",
				moe_gguf_path(g), name);
	snprintf(key, sizeof key, "%s.expert_count", name);
	MOE_TRY(moe_gguf_int(g, key, &experts, &found));
	if (experts < 1)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: a dense '%s' (%s is %s): models with experts are trained",
				moe_gguf_path(g), name, key, found ? "0" : "missing");
	return MOE_OK;
}

static enum moe_status read_int(const struct moe_gguf *g, const struct moe_gguf_arch *a,
				const char *rest, int64_t *out, bool *found)
{
	char key[KEY_BYTES];

	snprintf(key, sizeof key, "%s.%s", a->name, rest);
	return moe_gguf_int(g, key, out, found);
}

static enum moe_status read_real(const struct moe_gguf *g, const struct moe_gguf_arch *a,
				 const char *rest, double *out, bool *found)
{
	char key[KEY_BYTES];

	snprintf(key, sizeof key, "%s.%s", a->name, rest);
	return moe_gguf_real(g, key, out, found);
}

enum moe_status moe_gguf_size(const struct moe_gguf *g, const struct moe_gguf_arch *a,
			      const char *rest, int64_t max, int64_t *out)
{
	int64_t value;
	bool found;

	MOE_TRY(read_int(g, a, rest, &value, &found));
	if (!found && *out)
		return MOE_OK;
	if (!found)
		return moe_fail(MOE_ERR_FORMAT, "%s: key '%s.%s' is missing", moe_gguf_path(g),
				a->name, rest);
	if (value < 1 || value > max)
		return moe_fail(MOE_ERR_FORMAT, "%s: key '%s.%s' is %lld; 1 to %lld is expected",
				moe_gguf_path(g), a->name, rest, (long long)value, (long long)max);
	*out = value;
	return MOE_OK;
}

static bool add(cJSON *o, const char *key, int64_t value)
{
	return cJSON_AddNumberToObject(o, key, (double)value) != NULL;
}

static enum moe_status no_memory(const struct moe_gguf *g, bool good)
{
	return good ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", moe_gguf_path(g));
}

/* ---- attention ---- */

static enum moe_status add_heads(const struct moe_gguf *g, const struct moe_gguf_arch *a,
				 int64_t hidden, cJSON *o)
{
	int64_t heads = 0, kv, dim, value_dim, rotary, window = 0;
	bool found;

	MOE_TRY(moe_gguf_size(g, a, "attention.head_count", 1 << 16, &heads));
	kv = heads;
	MOE_TRY(moe_gguf_size(g, a, "attention.head_count_kv", 1 << 16, &kv));
	dim = MOE_MAX(hidden / heads, 1);
	MOE_TRY(moe_gguf_size(g, a, "attention.key_length", 1 << 16, &dim));
	value_dim = rotary = dim;
	MOE_TRY(moe_gguf_size(g, a, "attention.value_length", 1 << 16, &value_dim));
	MOE_TRY(moe_gguf_size(g, a, "rope.dimension_count", 1 << 16, &rotary));
	if (value_dim != dim || rotary != dim)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: heads have %lld columns of keys, %lld of values, %lld of them "
				"rotated; all alike is "
				"implemented",
				moe_gguf_path(g), (long long)dim, (long long)value_dim,
				(long long)rotary);
	MOE_TRY(read_int(g, a, "attention.sliding_window", &window, &found));
	return no_memory(g,
			 add(o, "num_attention_heads", heads) &&
				 add(o, "num_key_value_heads", kv) && add(o, "head_dim", dim) &&
				 (window < 1 || add(o, "sliding_window", window)) &&
				 (window < 1 || cJSON_AddTrueToObject(o, "use_sliding_window")) &&
				 (!a->bias || cJSON_AddTrueToObject(o, "qkv_bias")));
}

static enum moe_status add_rope(const struct moe_gguf *g, const struct moe_gguf_arch *a, cJSON *o)
{
	double theta = 10000, factor = 1;
	char type[32] = "none", key[KEY_BYTES];
	int64_t original = 0;
	bool found;
	cJSON *scaling;

	MOE_TRY(read_real(g, a, "rope.freq_base", &theta, &found));
	snprintf(key, sizeof key, "%s.rope.scaling.type", a->name);
	MOE_TRY(moe_gguf_text(g, key, type, sizeof type, &found));
	if (moe_gguf_find(g, "rope_freqs.weight"))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: tensor 'rope_freqs.weight' scales rotary frequencies one by "
				"one, which is not "
				"implemented",
				moe_gguf_path(g));
	MOE_TRY(no_memory(g, cJSON_AddNumberToObject(o, "rope_theta", theta)));
	if (!strcmp(type, "none"))
		return MOE_OK;
	MOE_TRY(read_real(g, a, "rope.scaling.factor", &factor, &found));
	MOE_TRY(read_int(g, a, "rope.scaling.original_context_length", &original, &found));
	scaling = cJSON_AddObjectToObject(o, "rope_scaling");
	return no_memory(g, scaling && cJSON_AddStringToObject(scaling, "rope_type", type) &&
				    cJSON_AddNumberToObject(scaling, "factor", factor) &&
				    (original < 1 ||
				     add(scaling, "original_max_position_embeddings", original)));
}

/* ---- layers ---- */

static const struct moe_gguf_tensor *of_layer(const struct moe_gguf *g, int64_t layer,
					      const char *rest)
{
	char name[KEY_BYTES];

	snprintf(name, sizeof name, "blk.%lld.%s", (long long)layer, rest);
	return moe_gguf_find(g, name);
}

/* A routed expert's first matrix: all of them in one tensor, or (older files) one by one. */
static const struct moe_gguf_tensor *experts_of(const struct moe_gguf *g, int64_t layer)
{
	const struct moe_gguf_tensor *t = of_layer(g, layer, "ffn_gate_exps.weight");

	return t ? t : of_layer(g, layer, "ffn_gate.0.weight");
}

static enum moe_status add_layers(const struct moe_gguf *g, const struct moe_gguf_arch *a,
				  int64_t layers, cJSON *o)
{
	const char *moe_key = a->permuted || !strcmp(a->name, "olmoe") ? "intermediate_size"
								       : "moe_intermediate_size";
	const struct moe_gguf_tensor *experts = NULL, *dense = NULL, *shared = NULL;
	cJSON *plain = cJSON_CreateArray();
	bool good = plain != NULL;

	for (int64_t i = 0; good && i < layers; i++) {
		const struct moe_gguf_tensor *here = experts_of(g, i);

		experts = experts ? experts : here;
		dense = dense || here ? dense : of_layer(g, i, "ffn_gate.weight");
		shared = shared ? shared : of_layer(g, i, "ffn_gate_shexp.weight");
		if (!here)
			good = cJSON_AddItemToArray(plain, cJSON_CreateNumber((double)i));
	}
	if (!experts || experts->ndim < 2 || (dense && dense->ndim != 2) ||
	    (shared && shared->ndim != 2)) {
		cJSON_Delete(plain);
		return experts ? moe_fail(MOE_ERR_FORMAT,
					  "%s: tensor '%s' and its like have wrong shapes",
					  moe_gguf_path(g), experts->name)
			       : moe_fail(MOE_ERR_FORMAT,
					  "%s: no layer has experts: tensor "
					  "'blk.0.ffn_gate_exps.weight' "
					  "is missing",
					  moe_gguf_path(g));
	}
	if (cJSON_GetArraySize(plain) && a->permuted) {
		cJSON_Delete(plain);
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: some layers have no experts; in '%s' all have",
				moe_gguf_path(g), a->name);
	}
	good = good && add(o, moe_key, experts->shape[experts->ndim - 2]);
	if (good && dense && strcmp(moe_key, "intermediate_size"))
		good = add(o, "intermediate_size", dense->shape[0]);
	if (good && shared)
		good = add(o, "shared_expert_intermediate_size", shared->shape[0]);
	if (good && strcmp(moe_key, "intermediate_size"))
		return no_memory(g, cJSON_AddItemToObject(o, "mlp_only_layers", plain));
	cJSON_Delete(plain);
	return no_memory(g, good);
}

static enum moe_status add_sizes(const struct moe_gguf *g, const struct moe_gguf_arch *a, cJSON *o)
{
	const struct moe_gguf_tensor *embed = moe_gguf_find(g, "token_embd.weight");
	int64_t hidden = 0, layers = 0, positions = 0, experts = 0, top_k = 0;
	double eps;
	bool found, good;

	if (!embed || embed->ndim != 2)
		return moe_fail(MOE_ERR_FORMAT, "%s: tensor 'token_embd.weight' is %s",
				moe_gguf_path(g), embed ? "no matrix" : "missing");
	MOE_TRY(moe_gguf_size(g, a, "embedding_length", 1 << 24, &hidden));
	MOE_TRY(moe_gguf_size(g, a, "block_count", MOE_GGUF_LAYERS, &layers));
	MOE_TRY(moe_gguf_size(g, a, "context_length", INT32_MAX, &positions));
	MOE_TRY(moe_gguf_size(g, a, "expert_count", 1 << 16, &experts));
	MOE_TRY(moe_gguf_size(g, a, "expert_used_count", 1 << 16, &top_k));
	MOE_TRY(read_real(g, a, "attention.layer_norm_rms_epsilon", &eps, &found));
	if (!found)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: key '%s.attention.layer_norm_rms_epsilon' is missing",
				moe_gguf_path(g), a->name);
	good = add(o, "vocab_size", embed->shape[0]) && add(o, "hidden_size", hidden) &&
	       add(o, "num_hidden_layers", layers) &&
	       add(o, "max_position_embeddings", positions) &&
	       add(o, a->permuted ? "num_local_experts" : "num_experts", experts) &&
	       add(o, "num_experts_per_tok", top_k) &&
	       cJSON_AddNumberToObject(o, "rms_norm_eps", eps) &&
	       cJSON_AddBoolToObject(o, "tie_word_embeddings",
				     !moe_gguf_find(g, "output.weight")) &&
	       (a->permuted || cJSON_AddBoolToObject(o, "norm_topk_prob", a->norm_topk));
	MOE_TRY(no_memory(g, good));
	MOE_TRY(add_heads(g, a, hidden, o));
	MOE_TRY(add_rope(g, a, o));
	return add_layers(g, a, layers, o);
}

static enum moe_status add_tokens(const struct moe_gguf *g, cJSON *o)
{
	static const char *const keys[][2] = {
		{ "tokenizer.ggml.bos_token_id", "bos_token_id" },
		{ "tokenizer.ggml.eos_token_id", "eos_token_id" },
		{ "tokenizer.ggml.padding_token_id", "pad_token_id" },
	};
	int64_t id;
	bool found;

	for (size_t i = 0; i < MOE_COUNT(keys); i++) {
		MOE_TRY(moe_gguf_int(g, keys[i][0], &id, &found));
		if (found && id >= 0 && id <= INT32_MAX)
			MOE_TRY(no_memory(g, add(o, keys[i][1], id)));
	}
	return MOE_OK;
}

enum moe_status moe_gguf_config(const struct moe_gguf *g, cJSON **out)
{
	const struct moe_gguf_arch *a;
	cJSON *o, *classes;
	enum moe_status st;

	*out = NULL;
	MOE_TRY(moe_gguf_arch(g, &a));
	o = cJSON_CreateObject();
	classes = cJSON_AddArrayToObject(o, "architectures");
	st = no_memory(g, classes && cJSON_AddItemToArray(classes, cJSON_CreateString(a->class)) &&
				  cJSON_AddStringToObject(o, "model_type", a->model_type) &&
				  cJSON_AddStringToObject(o, "dtype", "bfloat16") &&
				  cJSON_AddStringToObject(o, "hidden_act", "silu"));
	if (st == MOE_OK)
		st = add_sizes(g, a, o);
	if (st == MOE_OK)
		st = add_tokens(g, o);
	if (st == MOE_OK)
		*out = o;
	else
		cJSON_Delete(o);
	return st;
}

enum moe_status moe_gguf_read_config(const char *path, cJSON **out)
{
	struct moe_gguf *g;
	enum moe_status st;

	*out = NULL;
	MOE_TRY(moe_gguf_open(path, &g));
	st = moe_gguf_config(g, out);
	moe_gguf_close(g);
	return st;
}
