/* SPDX-License-Identifier: Apache-2.0 */
/* Base weights of a layer's experts, from arrays; what all ways to load them share. */
#include "api/experts.h"

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

enum moe_status moe_experts_check_width(const struct moe_expert_layer *l, const char *name, enum moe_dtype dtype)
{
	if (dtype > MOE_F64)
		return moe_fail(MOE_ERR_ARG, "%s has dtype %s; a float type is expected", name,
				moe_dtype_name(dtype));
	if (l->params.weight_format)
		return MOE_OK; /* it becomes codes */
	if (moe_packed_wider(dtype, l->params.weight_dtype))
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

enum moe_status moe_experts_load_rows(struct moe_expert_layer *l, const void *const *rows, enum moe_dtype dtype,
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
		MOE_TRY(moe_experts_check_width(l, name, arrays[i]->dtype));
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
	st = moe_experts_load_rows(l, rows, arrays[0]->dtype, map);
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
