/* SPDX-License-Identifier: Apache-2.0 */
/* Base weights of a layer's experts from files: plain or quantised, one by one or fused. */
#include "api/experts.h"

#include "model/expert_names.h"
#include "model/quantised.h"
#include "model/readers/safetensors.h"

#include <stdio.h>

#define NAME_MAX_BYTES 256

/* Where experts are below the prefix, and what their matrices are called: one by one, or all in two tensors. */
static const struct place {
	const char *where, *const *names;
} per_expert[] = {
	{ "mlp.experts", moe_expert_names[MOE_NAMES_USUAL] },
	{ "block_sparse_moe.experts", moe_expert_names[MOE_NAMES_MIXTRAL] },
	{ "experts", moe_expert_names[MOE_NAMES_USUAL] },
};
static const char *const fused[] = { "mlp.experts", "experts" };

#define PREFIX_BYTES (NAME_MAX_BYTES / 2 - 2) /* at most */

static void name_of(char *buf, const char *prefix, const struct place *p, int which, int expert)
{
	snprintf(buf, NAME_MAX_BYTES, "%.*s.%s.%d.%s.weight", PREFIX_BYTES, prefix, p->where, expert, p->names[which]);
}

static void name_of_all(char *buf, const char *prefix, const char *where, bool down)
{
	snprintf(buf, NAME_MAX_BYTES, "%.*s.%s.%s", PREFIX_BYTES, prefix, where,
		 down ? moe_expert_names[MOE_NAMES_USUAL][2] : MOE_NAME_GATE_UP);
}

/* ---- quantised ---- */

/* How the layer's quantised experts were found. */
struct coded {
	struct moe_quantised *q; /* [3 E] */
	const char **scale;	 /* [3 E] tensors of scales */
	bool found, fused;
};

/*
 * Of gate. Up and down may be coded otherwise, as in GGUF files that keep more bits for down; each matrix has the
 * coding of its tensors.
 */
static enum moe_status check_format(const struct moe_expert_layer *l,
				    const struct moe_st_quantised *t)
{
	const char *format = t->q.coding.format->name;

	if (!l->params.weight_format)
		return moe_fail(MOE_ERR_STATE,
				"%s is %s: create layer %d with weight_format \"%s\"",
				t->codes->name, format, l->params.layer, format);
	if (strcmp(format, l->params.weight_format))
		return moe_fail(MOE_ERR_FORMAT, "%s is %s; the layer's weight_format is %s",
				t->codes->name, format, l->params.weight_format);
	return MOE_OK;
}

/* gpt_oss's experts have biases, and rows of gate and up in turn: they would be taken for others.
 */
static enum moe_status check_biases(const struct moe_safetensors *st, const char *name)
{
	char bias[NAME_MAX_BYTES + 8];

	snprintf(bias, sizeof bias, "%s_bias", name);
	if (moe_safetensors_find(st, bias))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: experts with biases cannot be loaded into a layer's object",
				bias);
	return MOE_OK;
}

/* The first experts of more would be another layer. */
static enum moe_status check_no_more(const struct moe_expert_layer *l, const struct moe_safetensors *st,
				     const char *prefix, const struct place *place)
{
	char name[NAME_MAX_BYTES];
	struct moe_st_quantised t;
	int64_t shape[3];
	bool found;

	moe_experts_shape(l, MOE_BLOCK_GATE_PROJ, shape);
	name_of(name, prefix, place, MOE_GATE, l->layer.E);
	found = moe_safetensors_find(st, name) != NULL;
	if (!found)
		MOE_TRY(moe_st_quantised_find(st, name, 0, shape[1], shape[2], &t, &found));
	if (found)
		return moe_fail(MOE_ERR_FORMAT, "%s: the layer was created with %d experts, the file has more", name,
				l->layer.E);
	return MOE_OK;
}

/* Of all experts; what they are is told by the first tensor. */
static enum moe_status find_fused_coded(const struct moe_expert_layer *l,
					const struct moe_safetensors *st, const char *prefix,
					const char *where, struct coded *c)
{
	int64_t E = l->layer.E, I = l->layer.I, H = l->layer.H;
	struct moe_st_quantised t;
	char name[NAME_MAX_BYTES];
	bool found;

	name_of_all(name, prefix, where, false);
	MOE_TRY(moe_st_quantised_find(st, name, E, 2 * I, H, &t, &found));
	if (!found)
		return MOE_OK;
	MOE_TRY(check_format(l, &t));
	MOE_TRY(check_biases(st, name));
	for (int64_t e = 0; e < E; e++) {
		c->q[e] = c->q[E + e] = moe_st_quantised_expert(&t, e);
		c->scale[e] = c->scale[E + e] = t.scale->name;
	}
	name_of_all(name, prefix, where, true);
	MOE_TRY(moe_st_quantised_find(st, name, E, H, I, &t, &found));
	if (!found)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: gate_up_proj is quantised, this one has no codes", name);
	for (int64_t e = 0; e < E; e++) {
		c->q[2 * E + e] = moe_st_quantised_expert(&t, e);
		c->scale[2 * E + e] = t.scale->name;
	}
	c->found = c->fused = true;
	return MOE_OK;
}

static enum moe_status find_each_coded(struct moe_expert_layer *l,
				       const struct moe_safetensors *st, const char *prefix,
				       const struct place *place, struct coded *c)
{
	int E = l->layer.E;

	for (int i = 0; i < MOE_EXPERT_MATRICES * E; i++) {
		char name[NAME_MAX_BYTES];
		struct moe_st_quantised t;
		int64_t shape[3];
		bool found;

		moe_experts_shape(l, (enum moe_block_array)(i / E), shape);
		name_of(name, prefix, place, i / E, i % E);
		MOE_TRY(moe_st_quantised_find(st, name, 0, shape[1], shape[2], &t, &found));
		if (!found && !i)
			return MOE_OK;
		if (!found)
			return moe_fail(MOE_ERR_FORMAT,
					"%s: other experts are quantised, this one has no codes",
					name);
		if (i / E == MOE_GATE)
			MOE_TRY(check_format(l, &t));
		c->q[i] = t.q;
		c->scale[i] = t.scale->name;
		if (t.codes->codes && t.codes->codes->exact)
			MOE_TRY(moe_experts_add_error(l, &t.q, t.codes, NULL, MOE_F32));
	}
	c->found = true;
	return check_no_more(l, st, prefix, place);
}

static enum moe_status find_coded(struct moe_expert_layer *l,
				  const struct moe_safetensors *st, const char *prefix,
				  struct coded *c)
{
	for (size_t i = 0; i < MOE_COUNT(fused) && !c->found; i++)
		MOE_TRY(find_fused_coded(l, st, prefix, fused[i], c));
	for (size_t i = 0; i < MOE_COUNT(per_expert) && !c->found; i++)
		MOE_TRY(find_each_coded(l, st, prefix, &per_expert[i], c));
	return MOE_OK;
}

static enum moe_status load_coded(struct moe_expert_layer *l, const struct moe_safetensors *file,
				  const char *prefix, const int64_t *map, bool *found)
{
	size_t n = (size_t)(MOE_EXPERT_MATRICES * l->layer.E);
	struct coded c = { .q = moe_calloc(n, sizeof *c.q), .scale = moe_calloc(n, sizeof *c.scale) };
	enum moe_status st;

	l->load_error = (struct moe_load_error){ 0 };
	st = c.q && c.scale ? find_coded(l, file, prefix, &c)
			    : moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", l->layer.E);
	*found = c.found;
	if (st == MOE_OK && c.found)
		st = moe_experts_pack_quantised(l, c.q, c.fused, c.scale, map);
	if (st == MOE_OK && c.found)
		st = moe_experts_loaded(l, map);
	moe_free(c.q);
	moe_free(c.scale);
	return st;
}

/* ---- plain ---- */

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
	return moe_experts_check_width(l, name, t->dtype);
}

static enum moe_status find_fused(const struct moe_expert_layer *l,
				  const struct moe_safetensors *st, const char *prefix,
				  const char *where, enum moe_dtype *dtype,
				  const void **rows)
{
	int64_t E = l->layer.E, I = l->layer.I, H = l->layer.H;
	char name[NAME_MAX_BYTES];
	const void *gate_up, *down;
	size_t bytes;

	name_of_all(name, prefix, where, false);
	MOE_TRY(check_biases(st, name));
	MOE_TRY(find(l, st, name, 3, (int64_t[]){ E, 2 * I, H }, dtype, &gate_up));
	name_of_all(name, prefix, where, true);
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
				 const char *prefix, const struct place *place,
				 enum moe_dtype *dtype, const void **rows)
{
	int E = l->layer.E;

	for (int i = 0; i < MOE_EXPERT_MATRICES * E; i++) {
		char name[NAME_MAX_BYTES];
		int64_t shape[3];

		moe_experts_shape(l, (enum moe_block_array)(i / E), shape);
		name_of(name, prefix, place, i / E, i % E);
		MOE_TRY(find(l, st, name, 2, shape + 1, dtype, &rows[i]));
	}
	return check_no_more(l, st, prefix, place);
}

static enum moe_status find_rows(const struct moe_expert_layer *l, const struct moe_safetensors *st,
				 const char *prefix, enum moe_dtype *dtype, const void **rows)
{
	char name[NAME_MAX_BYTES];

	for (size_t i = 0; i < MOE_COUNT(fused); i++) {
		name_of_all(name, prefix, fused[i], false);
		if (moe_safetensors_find(st, name))
			return find_fused(l, st, prefix, fused[i], dtype, rows);
	}
	for (size_t i = 0; i < MOE_COUNT(per_expert); i++) {
		name_of(name, prefix, &per_expert[i], 0, 0);
		if (moe_safetensors_find(st, name))
			return find_each(l, st, prefix, &per_expert[i], dtype, rows);
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
	if (strlen(prefix) > PREFIX_BYTES)
		return moe_fail(MOE_ERR_ARG, "the prefix \"%.32s...\" is too long", prefix);
	MOE_TRY(moe_engine_check_running(l->engine));
	MOE_TRY(moe_experts_check_map(l, map, n_map));
	MOE_TRY(moe_safetensors_open_experts(path, &file));
	st = load_coded(l, file, prefix, map, &found);
	if (st != MOE_OK || found) {
		moe_safetensors_close(file);
		return st == MOE_OK ? st : moe_fail_in(st, "%s", path);
	}
	rows = moe_calloc((size_t)(MOE_EXPERT_MATRICES * l->layer.E), sizeof *rows);
	st = rows ? find_rows(l, file, prefix, &dtype, rows)
		  : moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", l->layer.E);
	if (st == MOE_OK)
		st = moe_experts_load_rows(l, rows, dtype, map);
	else
		moe_fail_in(st, "%s", path);
	moe_free(rows);
	moe_safetensors_close(file);
	return st;
}

enum moe_status moe_experts_load_file(struct moe_expert_layer *l, const char *path,
				      const char *prefix, const int64_t *map, int64_t n_map)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = load_file(l, path, prefix, map, n_map);
	moe_experts_leave(l);
	return st;
}
