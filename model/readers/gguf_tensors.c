/* SPDX-License-Identifier: Apache-2.0 */
/* A GGUF's tensors as those of a checkpoint of transformers: names, experts one by one, rows of q
 * and k in order. */
#include "model/readers/gguf.h"
#include "model/readers/safetensors_table.h"

#include <stdio.h>
#include <stdlib.h>

#define NAME_BYTES 160

struct filler {
	struct moe_gguf *g;
	const struct moe_gguf_arch *arch;
	struct moe_safetensors *st;
	int64_t layers, experts, heads, kv_heads;
	bool experts_only;
	bool *has; /* [layers][REQUIRED] */
	const struct moe_gguf_tensor *near; /* the first one whose codes only come near what it means; NULL: none */
};

static const struct {
	const char *from, *to;
} of_model[] = {
	{ "token_embd.weight", "model.embed_tokens.weight" },
	{ "output_norm.weight", "model.norm.weight" },
	{ "output.weight", "lm_head.weight" },
};

/* Below blk.N. and model.layers.N.; the first ones every layer has. */
#define REQUIRED 6
static const struct {
	const char *from, *to;
} of_layer[] = {
	{ "attn_norm.weight", "input_layernorm.weight" },
	{ "attn_q.weight", "self_attn.q_proj.weight" },
	{ "attn_k.weight", "self_attn.k_proj.weight" },
	{ "attn_v.weight", "self_attn.v_proj.weight" },
	{ "attn_output.weight", "self_attn.o_proj.weight" },
	{ "ffn_norm.weight", "post_attention_layernorm.weight" },
	{ "attn_q.bias", "self_attn.q_proj.bias" },
	{ "attn_k.bias", "self_attn.k_proj.bias" },
	{ "attn_v.bias", "self_attn.v_proj.bias" },
	{ "attn_output.bias", "self_attn.o_proj.bias" },
	{ "attn_q_norm.weight", "self_attn.q_norm.weight" },
	{ "attn_k_norm.weight", "self_attn.k_norm.weight" },
	{ "ffn_gate.weight", "mlp.gate_proj.weight" },
	{ "ffn_up.weight", "mlp.up_proj.weight" },
	{ "ffn_down.weight", "mlp.down_proj.weight" },
	{ "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight" },
	{ "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight" },
	{ "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight" },
	{ "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight" },
};

#define ROUTER "ffn_gate_inp.weight"
static const char *const expert_names[3] = { "ffn_gate", "ffn_up", "ffn_down" };

static enum moe_status bad_shape(const struct filler *f, const struct moe_gguf_tensor *t,
				 const char *want)
{
	char shape[96];

	return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' has shape %s; %s",
			moe_gguf_file_path(f->g, t->file), t->name,
			moe_shape_text(t->ndim, t->shape, shape, sizeof shape), want);
}

/* As it lies, under another name. */
static enum moe_status view(const struct filler *f, const struct moe_gguf_tensor *t, const char *name,
			    struct moe_st_tensor *v)
{
	MOE_TRY(moe_gguf_check_type(f->g, t));
	*v = (struct moe_st_tensor){ .name = name,
				     .dtype_text = t->type->name,
				     .dtype = t->type->dtype,
				     .ndim = MOE_MIN(t->ndim, MOE_MAX_NDIM),
				     .data = t->data,
				     .bytes = t->bytes,
				     .file = t->file,
				     .codes = t->type->codes };
	memcpy(v->shape, t->shape, (size_t)v->ndim * sizeof *v->shape);
	return MOE_OK;
}

static enum moe_status add(struct filler *f, const struct moe_gguf_tensor *t,
			   const struct moe_st_tensor *v)
{
	if (v->codes && v->ndim != 2)
		return bad_shape(f, t, "quantised tensors are matrices, or those of all experts");
	if (v->codes && v->codes->exact && !f->near)
		f->near = t;
	if (moe_st_table_tensor(f->st, v) != MOE_OK)
		return moe_fail_in(MOE_ERR_FORMAT, "%s: tensor '%s'",
				   moe_gguf_file_path(f->g, t->file), t->name);
	return MOE_OK;
}

/*
 * Row 2 j + i of a head is row j + i dim / 2 of transformers' (i: 0, 1): rotary pairs are
 * neighbours in one and halves in the other. Rows consist of whole blocks, so quantised ones move
 * as they are.
 */
static enum moe_status reorder(struct filler *f, const struct moe_gguf_tensor *t, int64_t heads,
			       struct moe_st_tensor *v)
{
	int64_t rows = t->shape[0], dim = rows / heads;
	size_t row = t->bytes / (size_t)rows;
	char *to;

	if (rows % heads || dim % 2)
		return bad_shape(f, t, "rows are expected in pairs for each head");
	to = moe_st_table_memory(f->st, t->bytes);
	if (!to)
		return moe_fail(MOE_ERR_NOMEM, "%s: no memory for the rows of '%s' in order",
				moe_gguf_path(f->g), t->name);
	for (int64_t r = 0; r < rows; r++) {
		int64_t in = r % dim, from = r - in + in % (dim / 2) * 2 + in / (dim / 2);

		memcpy(to + (size_t)r * row, (const char *)t->data + (size_t)from * row, row);
	}
	v->data = to;
	return MOE_OK;
}

/* All experts of a layer, [experts, n, k]. */
static enum moe_status add_experts(struct filler *f, const struct moe_gguf_tensor *t, int layer,
				   int which)
{
	struct moe_st_tensor v;
	char name[NAME_BYTES];

	if (t->ndim != 3 || t->shape[0] != f->experts)
		return bad_shape(f, t, "a matrix for each expert is expected");
	MOE_TRY(view(f, t, name, &v));
	v.ndim = 2;
	v.shape[0] = t->shape[1];
	v.shape[1] = t->shape[2];
	v.bytes = t->bytes / (size_t)f->experts;
	for (int e = 0; e < (int)f->experts; e++) {
		int n = snprintf(name, sizeof name, "model.layers.%d.", layer);

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
		snprintf(name + n, sizeof name - (size_t)n, f->arch->expert[which], e);
#pragma GCC diagnostic pop
		v.data = (const char *)t->data + (size_t)e * v.bytes;
		MOE_TRY(add(f, t, &v));
	}
	return MOE_OK;
}

/* ffn_gate_exps.weight, or ffn_gate.7.weight of older files. *taken false: neither. */
static enum moe_status try_experts(struct filler *f, const struct moe_gguf_tensor *t, int layer,
				   const char *rest, bool *taken)
{
	for (int i = 0; i < 3; i++) {
		size_t n = strlen(expert_names[i]);
		struct moe_st_tensor v;
		char name[NAME_BYTES];
		int expert, end = 0, at;

		if (strncmp(rest, expert_names[i], n))
			continue;
		*taken = true;
		if (!strcmp(rest + n, "_exps.weight"))
			return add_experts(f, t, layer, i);
		if (sscanf(rest + n, ".%5d.weight%n", &expert, &end) == 1 && end &&
		    !rest[n + (size_t)end] && expert >= 0) {
			MOE_TRY(view(f, t, name, &v));
			at = snprintf(name, sizeof name, "model.layers.%d.", layer);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
			snprintf(name + at, sizeof name - (size_t)at, f->arch->expert[i], expert);
#pragma GCC diagnostic pop
			return add(f, t, &v);
		}
		*taken = false;
	}
	return MOE_OK;
}

static enum moe_status unknown(const struct filler *f, const struct moe_gguf_tensor *t)
{
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"%s: tensor '%s' has no place in a model of architecture '%s'",
			moe_gguf_file_path(f->g, t->file), t->name, f->arch->name);
}

static enum moe_status add_of_layer(struct filler *f, const struct moe_gguf_tensor *t, int layer,
				    const char *rest)
{
	struct moe_st_tensor v;
	char name[NAME_BYTES];
	bool taken = false;
	size_t i = 0;

	MOE_TRY(try_experts(f, t, layer, rest, &taken));
	if (taken || f->experts_only)
		return MOE_OK;
	while (i < MOE_COUNT(of_layer) && strcmp(of_layer[i].from, rest))
		i++;
	if (i == MOE_COUNT(of_layer) && strcmp(rest, ROUTER))
		return unknown(f, t);
	snprintf(name, sizeof name, "model.layers.%d.%s", layer,
		 i < MOE_COUNT(of_layer) ? of_layer[i].to : f->arch->router);
	MOE_TRY(view(f, t, name, &v));
	if (i < REQUIRED)
		f->has[layer * REQUIRED + (int)i] = true;
	if (!strcmp(rest, "ffn_gate_inp_shexp.weight") && v.ndim == 1) {
		v.ndim = 2;
		v.shape[1] = v.shape[0];
		v.shape[0] = 1;
	}
	if (f->arch->permuted && !strncmp(rest, "attn_q.", 7))
		MOE_TRY(reorder(f, t, f->heads, &v));
	if (f->arch->permuted && !strncmp(rest, "attn_k.", 7))
		MOE_TRY(reorder(f, t, f->kv_heads, &v));
	return add(f, t, &v);
}

static enum moe_status add_tensor(struct filler *f, const struct moe_gguf_tensor *t)
{
	int layer, end = 0;

	for (size_t i = 0; !f->experts_only && i < MOE_COUNT(of_model); i++)
		if (!strcmp(of_model[i].from, t->name)) {
			struct moe_st_tensor v;

			MOE_TRY(view(f, t, of_model[i].to, &v));
			return add(f, t, &v);
		}
	if (sscanf(t->name, "blk.%5d.%n", &layer, &end) != 1 || !end)
		return f->experts_only ? MOE_OK : unknown(f, t);
	if (layer < 0 || layer >= f->layers)
		return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' is of layer %d; there are %lld",
				moe_gguf_file_path(f->g, t->file), t->name, layer,
				(long long)f->layers);
	return add_of_layer(f, t, layer, t->name + end);
}

/* What a layer cannot be without: said in the file's own names. */
static enum moe_status check_layer(const struct filler *f, int layer)
{
	static const char *const dense[] = { "ffn_gate.weight", "ffn_up.weight",
					     "ffn_down.weight" };
	static const char *const experts[] = { ROUTER, "ffn_gate_exps.weight", "ffn_up_exps.weight",
					       "ffn_down_exps.weight" };
	char name[NAME_BYTES];
	bool routed, single;

	for (int i = 0; i < REQUIRED; i++)
		if (!f->has[layer * REQUIRED + i])
			return moe_fail(MOE_ERR_FORMAT, "%s: tensor 'blk.%d.%s' is missing",
					moe_gguf_path(f->g), layer, of_layer[i].from);
	snprintf(name, sizeof name, "blk.%d." ROUTER, layer);
	routed = moe_gguf_find(f->g, name) != NULL;
	snprintf(name, sizeof name, "blk.%d.ffn_gate_exps.weight", layer);
	routed = routed || moe_gguf_find(f->g, name);
	snprintf(name, sizeof name, "blk.%d.ffn_gate.0.weight", layer);
	single = moe_gguf_find(f->g, name) != NULL;
	for (size_t i = 0; i < (routed ? single ? 1 : MOE_COUNT(experts) : MOE_COUNT(dense)); i++) {
		snprintf(name, sizeof name, "blk.%d.%s", layer, routed ? experts[i] : dense[i]);
		if (!moe_gguf_find(f->g, name))
			return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' is missing",
					moe_gguf_path(f->g), name);
	}
	return MOE_OK;
}

/* All three, where a layer has one of them. */
static enum moe_status check_experts(const struct filler *f, int layer)
{
	char name[3][NAME_BYTES];
	bool has[3];

	for (int i = 0; i < 3; i++) {
		snprintf(name[i], sizeof name[i], "blk.%d.%s_exps.weight", layer, expert_names[i]);
		has[i] = moe_gguf_find(f->g, name[i]) != NULL;
	}
	for (int i = 0; i < 3; i++)
		if (!has[i] && (has[0] || has[1] || has[2]))
			return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' is missing", moe_gguf_path(f->g), name[i]);
	return MOE_OK;
}

/* Measuring it would read every weight twice: inspect does, on request. */
static void tell_near(const struct filler *f)
{
	if (f->near)
		moe_log(MOE_LOG_INFO,
			"%s: the offsets of '%s' (%s) become zero points: moesaic inspect --values says how near that comes",
			moe_gguf_file_path(f->g, f->near->file), f->near->name, f->near->type->name);
}

static enum moe_status fill(struct filler *f)
{
	for (size_t i = 0; i < moe_gguf_count(f->g); i++)
		MOE_TRY(add_tensor(f, moe_gguf_at(f->g, i)));
	for (int i = 0; i < (int)f->layers; i++)
		MOE_TRY(f->experts_only ? check_experts(f, i) : check_layer(f, i));
	return f->experts_only || moe_gguf_find(f->g, "output_norm.weight")
		       ? MOE_OK
		       : moe_fail(MOE_ERR_FORMAT, "%s: tensor 'output_norm.weight' is missing",
				  moe_gguf_path(f->g));
}

/* What tells the rows of q and k; a model's checks come before its tensors are looked at. */
static enum moe_status open_model(struct filler *f)
{
	cJSON *config;

	MOE_TRY(moe_gguf_config(f->g, &config));
	cJSON_Delete(config);
	MOE_TRY(moe_gguf_size(f->g, f->arch, "attention.head_count", INT32_MAX, &f->heads));
	f->kv_heads = f->heads;
	return moe_gguf_size(f->g, f->arch, "attention.head_count_kv", INT32_MAX, &f->kv_heads);
}

enum moe_status moe_gguf_fill(struct moe_gguf *g, bool experts_only, struct moe_safetensors *st)
{
	struct filler f = { .g = g, .st = st, .experts_only = experts_only };
	enum moe_status status;

	MOE_TRY(moe_gguf_arch(g, &f.arch));
	if (!experts_only)
		MOE_TRY(open_model(&f));
	MOE_TRY(moe_gguf_size(g, f.arch, "block_count", MOE_GGUF_LAYERS, &f.layers));
	MOE_TRY(moe_gguf_size(g, f.arch, "expert_count", INT32_MAX, &f.experts));
	for (int i = 0; i < moe_gguf_file_count(g); i++)
		MOE_TRY(moe_st_table_file(st, moe_gguf_file_path(g, i), moe_gguf_take_file(g, i)));
	f.has = moe_calloc((size_t)f.layers * REQUIRED, sizeof *f.has);
	status = f.has ? fill(&f) : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", moe_gguf_path(g));
	moe_free(f.has);
	if (status == MOE_OK)
		tell_near(&f);
	return status;
}
