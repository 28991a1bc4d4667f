/* SPDX-License-Identifier: Apache-2.0 */
/* Base weights of a layer's experts, from memory and from safetensors. */
#include "api/experts.h"

#include "model/quantised.h"
#include "model/readers/safetensors.h"

#include <stdio.h>

enum moe_status moe_experts_check_map(const struct moe_expert_layer *l, const int64_t *map, int64_t n)
{
	int E = l->layer.E;
	bool *used;
	enum moe_status st = MOE_OK;

	if (!map)
		return MOE_OK;
	if (n < E)
		return moe_fail(MOE_ERR_ARG, "the map of experts has %lld entries; at least %d are needed",
				(long long)n, E);
	used = moe_calloc((size_t)E, sizeof *used);
	if (!used)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a map of experts");
	for (int e = 0; st == MOE_OK && e < E; e++) {
		if (map[e] < 0 || map[e] >= E)
			st = moe_fail(MOE_ERR_ARG, "map[%d] is %lld; there are %d experts", e,
				      (long long)map[e], E);
		else if (used[map[e]] && l->params.train_base)
			st = moe_fail(MOE_ERR_ARG,
				      "map[%d] is %lld again: a row that is trained belongs to one expert", e,
				      (long long)map[e]);
		else
			used[map[e]] = true;
	}
	moe_free(used);
	return st;
}

/* Packed weights of this dtype fit where memory was taken for weight_dtype. */
static enum moe_status check_width(const struct moe_expert_layer *l, const char *name,
				   enum moe_dtype dtype)
{
	const struct moe_kernels *k = moe_kernels();

	if (dtype > MOE_F64)
		return moe_fail(MOE_ERR_ARG, "%s has dtype %s; a float type is expected", name,
				moe_dtype_name(dtype));
	if (l->params.weight_format)
		return MOE_OK; /* it becomes codes */
	if (k->weight_bytes(dtype, 1, 1024, MOE_USE_GEMM) >
	    k->weight_bytes(l->params.weight_dtype, 1, 1024, MOE_USE_GEMM))
		return moe_fail(MOE_ERR_ARG, "%s is %s, wider than weight_dtype %s", name,
				moe_dtype_name(dtype), moe_dtype_name(l->params.weight_dtype));
	return MOE_OK;
}

/* rows [3 E]: where each expert's matrix begins, in the order of the arrays; waits. */
static enum moe_status pack(struct moe_expert_layer *l, const void *const *rows, enum moe_dtype dtype,
			    const int64_t *map)
{
	struct moe_context c = moe_experts_context(l, l->ticket, MOE_PHASE_OTHER, 0);
	int E = l->layer.E;
	const void **source = moe_calloc((size_t)(MOE_EXPERT_MATRICES * E), sizeof *source);
	struct moe_repack_args a = { .dtype = dtype };
	enum moe_status st;

	if (!source)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", E);
	for (int i = 0; i < MOE_EXPERT_MATRICES; i++) {
		for (int e = 0; e < E; e++)
			source[i * E + e] = rows[i * E + (map ? (int)map[e] : e)];
		a.source[i] = source + i * E;
	}
	st = moe_submit_begin(l->engine);
	if (st == MOE_OK) {
		st = moe_graph_moe_take_base(&c, &l->layer, &l->tensors, &a);
		moe_submit_end(l->engine);
	}
	moe_ticket_drain(l->ticket);
	moe_free(source);
	return st;
}

enum moe_status moe_experts_loaded(struct moe_expert_layer *l, const int64_t *map)
{
	size_t E = (size_t)l->layer.E;

	if (map) {
		l->map = moe_alloc(E, sizeof *l->map);
		if (!l->map)
			return moe_fail(MOE_ERR_NOMEM, "no memory for a map of experts");
		memcpy(l->map, map, E * sizeof *l->map);
	}
	l->loaded = true;
	l->version++;
	return MOE_OK;
}

static enum moe_status load_rows(struct moe_expert_layer *l, const void *const *rows, enum moe_dtype dtype,
				 const int64_t *map)
{
	MOE_TRY(l->params.weight_format ? moe_experts_pack_floats(l, rows, dtype, map) : pack(l, rows, dtype, map));
	return moe_experts_loaded(l, map);
}

static enum moe_status load(struct moe_expert_layer *l, const struct moe_array *const *arrays,
			    const int64_t *map, int64_t n_map)
{
	size_t E = (size_t)l->layer.E, bytes;
	const void **rows;
	enum moe_status st;

	if (l->loaded)
		return MOE_OK;
	MOE_TRY(moe_engine_check_running(l->engine));
	MOE_TRY(moe_experts_check_map(l, map, n_map));
	for (int i = 0; i < MOE_EXPERT_MATRICES; i++) {
		const char *name = moe_experts_array_name((enum moe_block_array)i);
		int64_t shape[3];

		moe_experts_shape(l, (enum moe_block_array)i, shape);
		MOE_TRY(moe_check_shape(name, arrays[i], 3, shape));
		MOE_TRY(check_width(l, name, arrays[i]->dtype));
		if (arrays[i]->dtype != arrays[0]->dtype)
			return moe_fail(MOE_ERR_ARG, "%s is %s and gate_proj %s; they must be alike", name,
					moe_dtype_name(arrays[i]->dtype),
					moe_dtype_name(arrays[0]->dtype));
	}
	rows = moe_calloc(E * MOE_EXPERT_MATRICES, sizeof *rows);
	if (!rows)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %zu experts", E);
	bytes = (size_t)l->layer.I * (size_t)l->layer.H * moe_dtype_size(arrays[0]->dtype);
	for (size_t i = 0; i < E * MOE_EXPERT_MATRICES; i++)
		rows[i] = (const char *)arrays[i / E]->data + i % E * bytes;
	st = load_rows(l, rows, arrays[0]->dtype, map);
	moe_free(rows);
	return st;
}

enum moe_status moe_experts_load(struct moe_expert_layer *l, const struct moe_array *gate,
				 const struct moe_array *up, const struct moe_array *down,
				 const int64_t *map, int64_t n_map)
{
	const struct moe_array *arrays[MOE_EXPERT_MATRICES] = { gate, up, down };
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = load(l, arrays, map, n_map);
	moe_experts_leave(l);
	return st;
}

/* ---- safetensors ---- */

#define NAME_MAX_BYTES 256

/* Names below the prefix, per expert; %d is the expert. */
static const char *const per_expert[][MOE_EXPERT_MATRICES] = {
	{ "mlp.experts.%d.gate_proj.weight", "mlp.experts.%d.up_proj.weight",
	  "mlp.experts.%d.down_proj.weight" },
	{ "block_sparse_moe.experts.%d.w1.weight", "block_sparse_moe.experts.%d.w3.weight",
	  "block_sparse_moe.experts.%d.w2.weight" },
	{ "experts.%d.gate_proj.weight", "experts.%d.up_proj.weight", "experts.%d.down_proj.weight" },
};
static const char *const fused[][2] = {
	{ "mlp.experts.gate_up_proj", "mlp.experts.down_proj" },
	{ "experts.gate_up_proj", "experts.down_proj" },
};

static void name_of(char *buf, const char *prefix, const char *form, int expert)
{
	char rest[NAME_MAX_BYTES / 2];

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
	snprintf(rest, sizeof rest, form, expert);
#pragma GCC diagnostic pop
	snprintf(buf, NAME_MAX_BYTES, "%.*s.%s", NAME_MAX_BYTES / 2 - 2, prefix, rest);
}

/* One tensor of the layer; all have one dtype. */
static enum moe_status find(const struct moe_expert_layer *l, const struct moe_safetensors *st,
			    const char *name, int ndim, const int64_t *shape, enum moe_dtype *dtype,
			    const void **out)
{
	const struct moe_st_tensor *t;

	MOE_TRY(moe_safetensors_get(st, name, ndim, shape, &t));
	if (*dtype == MOE_DTYPE_COUNT)
		*dtype = t->dtype;
	if (t->dtype != *dtype)
		return moe_fail(MOE_ERR_FORMAT, "%s is %s, other experts are %s", name,
				moe_dtype_name(t->dtype), moe_dtype_name(*dtype));
	*out = t->data;
	return check_width(l, name, t->dtype);
}

static enum moe_status find_fused(const struct moe_expert_layer *l, const struct moe_safetensors *st,
				  const char *prefix, const char *const *forms, enum moe_dtype *dtype,
				  const void **rows)
{
	int64_t E = l->layer.E, I = l->layer.I, H = l->layer.H;
	char name[NAME_MAX_BYTES];
	const void *gate_up, *down;
	size_t bytes;

	name_of(name, prefix, forms[0], 0);
	MOE_TRY(find(l, st, name, 3, (int64_t[]){ E, 2 * I, H }, dtype, &gate_up));
	name_of(name, prefix, forms[1], 0);
	MOE_TRY(find(l, st, name, 3, (int64_t[]){ E, H, I }, dtype, &down));
	bytes = (size_t)(I * H) * moe_dtype_size(*dtype);
	for (int64_t e = 0; e < E; e++) {
		rows[e] = (const char *)gate_up + (size_t)(2 * e) * bytes;
		rows[E + e] = (const char *)gate_up + (size_t)(2 * e + 1) * bytes;
		rows[2 * E + e] = (const char *)down + (size_t)e * bytes;
	}
	return MOE_OK;
}

static enum moe_status find_each(const struct moe_expert_layer *l, const struct moe_safetensors *st,
				 const char *prefix, const char *const *forms, enum moe_dtype *dtype,
				 const void **rows)
{
	int E = l->layer.E;

	for (int i = 0; i < MOE_EXPERT_MATRICES * E; i++) {
		char name[NAME_MAX_BYTES];
		int64_t shape[3];

		moe_experts_shape(l, (enum moe_block_array)(i / E), shape);
		name_of(name, prefix, forms[i / E], i % E);
		MOE_TRY(find(l, st, name, 2, shape + 1, dtype, &rows[i]));
	}
	return MOE_OK;
}

/* Quantised tensors of single experts; *found false: there are none. */
static enum moe_status find_quantised(const struct moe_expert_layer *l, const struct moe_safetensors *st,
				      const char *prefix, struct moe_quantised *q, bool *found)
{
	int E = l->layer.E;

	*found = false;
	for (size_t f = 0; f < MOE_COUNT(per_expert) && !*found; f++)
		for (int i = 0; i < MOE_EXPERT_MATRICES * E && (!i || *found); i++) {
			char name[NAME_MAX_BYTES];
			struct moe_st_quantised t;
			int64_t shape[3];

			moe_experts_shape(l, (enum moe_block_array)(i / E), shape);
			name_of(name, prefix, per_expert[f][i / E], i % E);
			MOE_TRY(moe_st_quantised_find(st, name, 0, shape[1], shape[2], &t, found));
			if (!*found && i)
				return moe_fail(MOE_ERR_FORMAT, "%s: other experts are quantised, this one has no codes",
						name);
			if (*found && strcmp(t.q.coding.format->name, l->params.weight_format))
				return moe_fail(MOE_ERR_FORMAT, "%s is %s; the layer's weight_format is %s", t.codes->name,
						t.q.coding.format->name, l->params.weight_format);
			q[i] = t.q;
		}
	return MOE_OK;
}

static enum moe_status load_quantised(struct moe_expert_layer *l, const struct moe_safetensors *file, const char *prefix,
				      const int64_t *map, bool *found)
{
	struct moe_quantised *q = moe_calloc((size_t)(MOE_EXPERT_MATRICES * l->layer.E), sizeof *q);
	enum moe_status st = q ? find_quantised(l, file, prefix, q, found)
			       : moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", l->layer.E);

	if (st == MOE_OK && *found)
		st = moe_experts_pack_quantised(l, q, map);
	if (st == MOE_OK && *found)
		st = moe_experts_loaded(l, map);
	moe_free(q);
	return st;
}

static enum moe_status find_rows(const struct moe_expert_layer *l, const struct moe_safetensors *st,
				 const char *prefix, enum moe_dtype *dtype, const void **rows)
{
	char name[NAME_MAX_BYTES];

	for (size_t i = 0; i < MOE_COUNT(fused); i++) {
		name_of(name, prefix, fused[i][0], 0);
		if (moe_safetensors_find(st, name))
			return find_fused(l, st, prefix, fused[i], dtype, rows);
	}
	for (size_t i = 0; i < MOE_COUNT(per_expert); i++) {
		name_of(name, prefix, per_expert[i][0], 0);
		if (moe_safetensors_find(st, name))
			return find_each(l, st, prefix, per_expert[i], dtype, rows);
	}
	return moe_fail(MOE_ERR_FORMAT,
			"no experts below \"%s\": neither %s.mlp.experts.0.gate_proj.weight nor "
			"%s.mlp.experts.gate_up_proj; give the prefix of the layer's tensors",
			prefix, prefix, prefix);
}

static enum moe_status load_file(struct moe_expert_layer *l, const char *path, const char *prefix,
				 const int64_t *map, int64_t n_map)
{
	const void **rows = NULL;
	struct moe_safetensors *file = NULL;
	enum moe_dtype dtype = MOE_DTYPE_COUNT;
	char standard[64];
	enum moe_status st;
	bool found = false;

	if (l->loaded)
		return MOE_OK;
	if (!path)
		return moe_fail(MOE_ERR_ARG, "path is NULL");
	snprintf(standard, sizeof standard, "model.layers.%d", l->params.layer);
	if (!prefix)
		prefix = standard;
	if (strlen(prefix) > NAME_MAX_BYTES / 2 - 2)
		return moe_fail(MOE_ERR_ARG, "the prefix \"%.32s...\" is too long", prefix);
	MOE_TRY(moe_engine_check_running(l->engine));
	MOE_TRY(moe_experts_check_map(l, map, n_map));
	MOE_TRY(moe_safetensors_open(path, &file));
	if (l->params.weight_format) {
		st = load_quantised(l, file, prefix, map, &found);
		if (st != MOE_OK || found) {
			moe_safetensors_close(file);
			return st == MOE_OK ? st : moe_fail_in(st, "%s", path);
		}
	}
	rows = moe_calloc((size_t)(MOE_EXPERT_MATRICES * l->layer.E), sizeof *rows);
	st = rows ? find_rows(l, file, prefix, &dtype, rows)
		  : moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", l->layer.E);
	if (st == MOE_OK)
		st = load_rows(l, rows, dtype, map);
	else
		moe_fail_in(st, "%s", path);
	moe_free(rows);
	moe_safetensors_close(file);
	return st;
}

enum moe_status moe_experts_load_file(struct moe_expert_layer *l, const char *path, const char *prefix,
				      const int64_t *map, int64_t n_map)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = load_file(l, path, prefix, map, n_map);
	moe_experts_leave(l);
	return st;
}
