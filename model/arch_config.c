/* SPDX-License-Identifier: Apache-2.0 */
/* From config.json to struct moe_arch: what all architectures share. */
#include "codelets/format.h"
#include "model/arch_reader.h"
#include "model/file.h"
#include "model/readers/gguf.h"

#include <stdio.h>
#include <strings.h>

#define MAX_SIZE INT32_MAX

static enum moe_status read_int(const cJSON *config, const char *key, int64_t max, int *out)
{
	int64_t v;

	MOE_TRY(moe_json_int(config, key, 1, max, &v));
	*out = (int)v;
	return MOE_OK;
}

static enum moe_status add_eos(const cJSON *v, struct moe_arch *arch)
{
	int64_t id;

	MOE_TRY(moe_json_as_int(v, "eos_token_id", -1, arch->vocab - 1, &id));
	for (int i = 0; i < arch->n_eos; i++)
		if (arch->eos_ids[i] == id)
			return MOE_OK;
	if (id < 0)
		return MOE_OK;
	if (arch->n_eos == MOE_ARCH_MAX_EOS)
		return moe_fail(MOE_ERR_UNSUPPORTED, "eos_token_id has more than %d entries",
				MOE_ARCH_MAX_EOS);
	arch->eos_ids[arch->n_eos++] = id;
	return MOE_OK;
}

/* An id or a list of ids. */
static enum moe_status read_eos(const cJSON *config, struct moe_arch *arch)
{
	const cJSON *v = moe_json_get(config, "eos_token_id"), *c;

	if (!v)
		return MOE_OK;
	if (!cJSON_IsArray(v))
		return add_eos(v, arch);
	cJSON_ArrayForEach(c, v) MOE_TRY(add_eos(c, arch));
	return MOE_OK;
}

static enum moe_status read_optional_id(const cJSON *config, const char *key, int64_t *out)
{
	return moe_json_opt_int(config, key, -1, MAX_SIZE, out);
}

static enum moe_status read_yarn(const cJSON *scaling, const cJSON *config, struct moe_rope *rope)
{
	rope->beta_fast = 32;
	rope->beta_slow = 1;
	rope->truncate = true;
	MOE_TRY(moe_json_opt_int(scaling, "original_max_position_embeddings", 1, MAX_SIZE,
				 &rope->original_max_positions));
	/* a value beside the scaling wins in transformers */
	MOE_TRY(moe_json_opt_int(config, "original_max_position_embeddings", 1, MAX_SIZE,
				 &rope->original_max_positions));
	MOE_TRY(moe_json_opt_real(scaling, "beta_fast", &rope->beta_fast));
	MOE_TRY(moe_json_opt_real(scaling, "beta_slow", &rope->beta_slow));
	MOE_TRY(moe_json_opt_real(scaling, "attention_factor", &rope->attention_factor));
	MOE_TRY(moe_json_opt_real(scaling, "mscale", &rope->mscale));
	MOE_TRY(moe_json_opt_real(scaling, "mscale_all_dim", &rope->mscale_all_dim));
	MOE_TRY(moe_json_opt_bool(scaling, "truncate", &rope->truncate));
	if (!(rope->beta_fast > 0) || !(rope->beta_slow > 0) || rope->attention_factor < 0)
		return moe_fail(MOE_ERR_FORMAT,
				"rope beta_fast %g, beta_slow %g and attention_factor %g must not be negative, nor beta 0",
				rope->beta_fast, rope->beta_slow, rope->attention_factor);
	return MOE_OK;
}

/* Scaling of the new form (rope_parameters) or the old one (rope_scaling). */
static enum moe_status read_rope_scaling(const cJSON *scaling, const cJSON *config,
					 struct moe_arch *arch)
{
	struct moe_rope *rope = &arch->rope;
	const char *type = "default";
	double partial = 1;

	MOE_TRY(moe_json_opt_text(scaling, "type", &type));
	MOE_TRY(moe_json_opt_text(scaling, "rope_type", &type));
	MOE_TRY(moe_json_opt_real(config, "partial_rotary_factor", &partial));
	MOE_TRY(moe_json_opt_real(scaling, "partial_rotary_factor", &partial));
	if (partial != 1)
		return moe_fail(MOE_ERR_UNSUPPORTED, "partial_rotary_factor %g is not implemented",
				partial);
	rope->factor = 1;
	rope->original_max_positions = arch->max_positions;
	if (!strcmp(type, "default") || !strcmp(type, "none"))
		return MOE_OK;
	if (!strcmp(type, "linear"))
		rope->type = MOE_ROPE_LINEAR;
	else if (!strcmp(type, "yarn"))
		rope->type = MOE_ROPE_YARN;
	else
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"rope type '%.64s' is not implemented (known: "
				"default, linear, yarn)",
				type);
	if (rope->type == MOE_ROPE_YARN)
		MOE_TRY(read_yarn(scaling, config, rope));
	if (moe_json_get(scaling, "factor"))
		MOE_TRY(moe_json_opt_real(scaling, "factor", &rope->factor));
	else if (rope->type == MOE_ROPE_YARN)
		rope->factor = (double)arch->max_positions / (double)rope->original_max_positions;
	else
		return moe_fail(MOE_ERR_FORMAT, "factor of the linear rope scaling is missing");
	if (!(rope->factor > 0))
		return moe_fail(MOE_ERR_FORMAT, "rope factor %g must be positive", rope->factor);
	return MOE_OK;
}

static enum moe_status read_rope(const cJSON *config, double default_theta, struct moe_arch *arch)
{
	const cJSON *params = moe_json_get(config, "rope_parameters");

	if (!params)
		params = moe_json_get(config, "rope_scaling");
	if (params && !cJSON_IsObject(params))
		return moe_fail(MOE_ERR_FORMAT, "rope_parameters or rope_scaling is not an object");
	arch->rope.theta = default_theta;
	MOE_TRY(moe_json_opt_real(config, "rope_theta", &arch->rope.theta));
	MOE_TRY(moe_json_opt_real(params, "rope_theta", &arch->rope.theta));
	if (!(arch->rope.theta > 1))
		return moe_fail(MOE_ERR_FORMAT, "rope_theta is %g, must be above 1",
				arch->rope.theta);
	return read_rope_scaling(params, config, arch);
}

static enum moe_status read_heads(const cJSON *config, struct moe_arch *arch)
{
	int64_t kv, dim;

	MOE_TRY(read_int(config, "num_attention_heads", 1 << 16, &arch->n_heads));
	kv = arch->n_heads;
	MOE_TRY(moe_json_opt_int(config, "num_key_value_heads", 1, 1 << 16, &kv));
	arch->n_kv_heads = (int)kv;
	if (arch->n_heads % arch->n_kv_heads)
		return moe_fail(MOE_ERR_FORMAT,
				"num_attention_heads %d is not a multiple of "
				"num_key_value_heads %d",
				arch->n_heads, arch->n_kv_heads);
	if (moe_json_get(config, "head_dim")) {
		MOE_TRY(moe_json_int(config, "head_dim", 1, 1 << 16, &dim));
	} else {
		dim = arch->hidden / arch->n_heads;
		if (arch->hidden % arch->n_heads)
			return moe_fail(MOE_ERR_FORMAT,
					"hidden_size %lld is not a multiple of "
					"num_attention_heads %d and head_dim is not given",
					(long long)arch->hidden, arch->n_heads);
	}
	if (dim % 2)
		return moe_fail(MOE_ERR_FORMAT,
				"head_dim %lld is odd: rotary embedding needs pairs",
				(long long)dim);
	arch->head_dim = (int)dim;
	return MOE_OK;
}

static enum moe_status read_model_sizes(const cJSON *config, struct moe_arch *arch)
{
	MOE_TRY(moe_json_int(config, "vocab_size", 1, MAX_SIZE, &arch->vocab));
	MOE_TRY(moe_json_int(config, "hidden_size", 1, MAX_SIZE, &arch->hidden));
	MOE_TRY(read_int(config, "num_hidden_layers", MOE_ARCH_MAX_LAYERS, &arch->n_layers));
	MOE_TRY(read_heads(config, arch));
	MOE_TRY(moe_json_int(config, "max_position_embeddings", 1, MAX_SIZE, &arch->max_positions));
	if (!moe_json_get(config, "rms_norm_eps"))
		return moe_fail(MOE_ERR_FORMAT, "rms_norm_eps is missing");
	MOE_TRY(moe_json_opt_real(config, "rms_norm_eps", &arch->rms_eps));
	if (!(arch->rms_eps > 0) || arch->rms_eps > 1)
		return moe_fail(MOE_ERR_FORMAT, "rms_norm_eps is %g, must be in (0, 1]",
				arch->rms_eps);
	MOE_TRY(moe_json_opt_bool(config, "tie_word_embeddings", &arch->tie_embeddings));
	MOE_TRY(read_optional_id(config, "bos_token_id", &arch->bos_id));
	return read_optional_id(config, "pad_token_id", &arch->pad_id);
}

static bool is_one_of(const char *text, const char *const *list, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (!strcmp(text, list[i]))
			return true;
	return false;
}

/* Packings that have the names and shapes of the known one, and other numbers in them. */
static enum moe_status check_packing(const cJSON *q, const char *method)
{
	bool gptq = !strcmp(method, "gptq");
	const char *key = gptq ? "checkpoint_format" : "version", *known = gptq ? "gptq" : "gemm", *packing = known;

	MOE_TRY(moe_json_opt_text(q, key, &packing));
	if (!strcasecmp(packing, known))
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED, "quantization_config: %s '%.64s' of %s cannot be read (known: %s)", key, packing,
			method, known);
}

/* What the tensors' names and dtypes then tell is read from them, and checked there. */
enum moe_status moe_arch_check_quantisation(const cJSON *config)
{
	static const char *const methods[] = { "fp8", "compressed-tensors", "gptq", "awq",
					       "mxfp4" };
	static const char *const formats[] = { "int-quantized",	  "pack-quantized",	  "float-quantized",
					       "naive-quantized", "mxfp4-pack-quantized", "mixed-precision" };
	const cJSON *q = moe_json_get(config, "quantization_config");
	const char *method = "none", *format = formats[0];
	int64_t bits = 4;

	if (!q)
		return MOE_OK;
	MOE_TRY(moe_json_opt_text(q, "quant_method", &method));
	MOE_TRY(moe_json_opt_text(q, "format", &format));
	if (!is_one_of(method, methods, MOE_COUNT(methods)) && !moe_format_find(method))
		return moe_fail(
			MOE_ERR_UNSUPPORTED,
			"quantization_config: quant_method '%.64s' cannot be read (known: fp8, "
			"compressed-tensors, gptq, awq, mxfp4)",
			method);
	if (!strcmp(method, "compressed-tensors") &&
	    !is_one_of(format, formats, MOE_COUNT(formats)))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"quantization_config: format '%.64s' cannot be read (known: "
				"int-quantized, pack-quantized, float-quantized, naive-quantized, "
				"mxfp4-pack-quantized, mixed-precision)",
				format);
	if (strcmp(method, "gptq") && strcmp(method, "awq"))
		return MOE_OK;
	MOE_TRY(moe_json_opt_int(q, "bits", 1, 64, &bits));
	MOE_TRY(check_packing(q, method));
	return bits == 4
		       ? MOE_OK
		       : moe_fail(MOE_ERR_UNSUPPORTED,
				  "quantization_config: %s of %lld bits cannot be read (known: 4)",
				  method, (long long)bits);
}

/* 0: none; the range is that of struct moe_block_params */
static enum moe_status read_swiglu_limit(const cJSON *config, struct moe_arch *arch)
{
	MOE_TRY(moe_json_opt_real(config, "swiglu_limit", &arch->swiglu_limit));
	if (arch->swiglu_limit != 0 && !(arch->swiglu_limit >= 1e-6 && arch->swiglu_limit <= 1e6))
		return moe_fail(MOE_ERR_FORMAT, "swiglu_limit is %g, must be 0 or in [1e-6, 1e6]", arch->swiglu_limit);
	return MOE_OK;
}

enum moe_status moe_arch_read_common(const cJSON *config, double default_theta,
				     struct moe_arch *arch)
{
	const char *act = "silu";

	MOE_TRY(read_model_sizes(config, arch));
	MOE_TRY(moe_json_opt_text(config, "hidden_act", &act));
	if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"hidden_act '%.64s' is not implemented "
				"(known: silu)",
				act);
	MOE_TRY(read_swiglu_limit(config, arch));
	MOE_TRY(moe_arch_check_quantisation(config));
	return read_rope(config, default_theta, arch);
}

enum moe_status moe_arch_read_sizes(const cJSON *config, struct moe_arch *arch)
{
	arch->rope.theta = 10000;
	return read_model_sizes(config, arch);
}

enum moe_status moe_arch_read_experts(const cJSON *config, const char *intermediate_key,
				      double default_aux, struct moe_arch *arch)
{
	const char *count_key =
		moe_json_get(config, "num_experts") ? "num_experts" : "num_local_experts";
	int64_t experts;

	MOE_TRY(moe_json_int(config, count_key, 0, 1 << 16, &experts));
	arch->n_experts = (int)experts;
	arch->router = "softmax_topk";
	arch->aux_loss_coef = default_aux;
	if (!experts)
		return MOE_OK;
	MOE_TRY(read_int(config, "num_experts_per_tok", 1 << 16, &arch->top_k));
	if (arch->top_k > arch->n_experts)
		return moe_fail(MOE_ERR_FORMAT, "num_experts_per_tok %d exceeds %s %d", arch->top_k,
				count_key, arch->n_experts);
	MOE_TRY(moe_json_int(config, intermediate_key, 1, MAX_SIZE, &arch->moe_intermediate));
	MOE_TRY(moe_json_opt_real(config, "router_aux_loss_coef", &arch->aux_loss_coef));
	if (arch->aux_loss_coef < 0)
		return moe_fail(MOE_ERR_FORMAT, "router_aux_loss_coef is %g; 0 or more is possible", arch->aux_loss_coef);
	for (int i = 0; i < arch->n_layers; i++)
		arch->layer_is_moe[i] = true;
	return MOE_OK;
}

enum moe_status moe_arch_read_sparse_layers(const cJSON *config, struct moe_arch *arch)
{
	const cJSON *dense = moe_json_get(config, "mlp_only_layers"), *c;
	int64_t step = 1, layer;
	int sparse;

	MOE_TRY(moe_json_opt_int(config, "decoder_sparse_step", 1, MAX_SIZE, &step));
	for (int i = 0; i < arch->n_layers; i++)
		arch->layer_is_moe[i] = arch->n_experts > 0 && (i + 1) % step == 0;
	if (dense && !cJSON_IsArray(dense))
		return moe_fail(MOE_ERR_FORMAT, "mlp_only_layers is not a list");
	cJSON_ArrayForEach(c, dense)
	{
		MOE_TRY(moe_json_as_int(c, "mlp_only_layers", 0, MAX_SIZE, &layer));
		if (layer < arch->n_layers)
			arch->layer_is_moe[layer] = false;
	}
	sparse = moe_arch_moe_layers(arch);
	if (sparse < arch->n_layers)
		MOE_TRY(moe_json_int(config, "intermediate_size", 1, MAX_SIZE,
				     &arch->intermediate));
	if (!sparse)
		arch->n_experts = 0;
	return MOE_OK;
}

enum moe_status moe_arch_check_window(const cJSON *config, bool enabled,
				      const struct moe_arch *arch)
{
	int64_t window = 0;

	MOE_TRY(moe_json_opt_int(config, "sliding_window", 0, MAX_SIZE, &window));
	if (enabled && window && window < arch->max_positions)
		return moe_fail(
			MOE_ERR_UNSUPPORTED,
			"sliding_window %lld below max_position_embeddings %lld: sliding-window "
			"attention is not implemented",
			(long long)window, (long long)arch->max_positions);
	return MOE_OK;
}

static enum moe_status unknown_type(const char *type)
{
	char lists[2][512] = { "", "" };
	size_t at[2] = { 0, 0 };

	for (int i = 0; moe_arch_reader_list[i]; i++) {
		int j = moe_arch_reader_list[i]->estimate_only != NULL;

		if (at[j] < sizeof lists[j])
			at[j] += (size_t)snprintf(lists[j] + at[j], sizeof lists[j] - at[j], "%s%s",
						  at[j] ? ", " : "",
						  moe_arch_reader_list[i]->model_type);
	}
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"model_type '%.64s' is not supported (known: %s; for estimates also: %s)",
			type, lists[0], lists[1]);
}

static enum moe_status read_arch(const cJSON *config, const cJSON *generation,
				 struct moe_arch *arch)
{
	const struct moe_arch_reader *reader = NULL;
	const char *type = NULL;

	MOE_TRY(moe_json_opt_text(config, "model_type", &type));
	if (!type)
		return moe_fail(MOE_ERR_FORMAT, "model_type is missing");
	for (int i = 0; moe_arch_reader_list[i]; i++)
		if (!strcmp(moe_arch_reader_list[i]->model_type, type))
			reader = moe_arch_reader_list[i];
	if (!reader)
		return unknown_type(type);
	*arch = (struct moe_arch){
		.name = reader->model_type, .reader = reader, .bos_id = -1, .pad_id = -1
	};
	MOE_TRY(reader->read(config, arch));
	MOE_TRY(read_eos(generation, arch));
	return read_eos(config, arch);
}

enum moe_status moe_arch_parse(const char *config, const char *generation, struct moe_arch *out)
{
	cJSON *c = NULL, *g = NULL;
	enum moe_status status;

	MOE_TRY_GOTO(moe_json_parse(config, strlen(config), "config.json", &c), status, done);
	if (generation)
		MOE_TRY_GOTO(moe_json_parse(generation, strlen(generation),
					    "generation_config.json", &g),
			     status, done);
	if (!cJSON_IsObject(c) || (g && !cJSON_IsObject(g)))
		status = moe_fail(MOE_ERR_FORMAT, "config is not a JSON object");
	else
		status = read_arch(c, g, out);
done:
	cJSON_Delete(c);
	cJSON_Delete(g);
	return status;
}

enum moe_status moe_arch_load(const char *dir, struct moe_arch *out)
{
	bool is_file = moe_path_exists(dir) && !moe_path_is_dir(dir);
	char *path = is_file ? moe_strdup(dir) : moe_path_join(dir, "config.json");
	char *generation_path = moe_path_join(dir, "generation_config.json");
	cJSON *c = NULL, *g = NULL;
	enum moe_status status;

	if (!path || !generation_path) {
		status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
		goto done;
	}
	MOE_TRY_GOTO(is_file && moe_gguf_is(dir) ? moe_gguf_read_config(dir, &c) : moe_json_read(path, &c), status,
		     done);
	if (!is_file && moe_path_exists(generation_path))
		MOE_TRY_GOTO(moe_json_read(generation_path, &g), status, done);
	status = read_arch(c, g, out);
	if (status != MOE_OK)
		moe_fail_in(status, "%s", path);
done:
	cJSON_Delete(c);
	cJSON_Delete(g);
	moe_free(path);
	moe_free(generation_path);
	return status;
}
