/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised base weights of a layer's experts: from memory, from safetensors, from floats. */
#include "api/experts.h"

#include "codelets/kernels/packed/requantise.h"
#include "model/quantised.h"

#define ERROR_ROWS 16 /* of a matrix, at most: enough for two digits of the error */

static enum moe_status in_expert(const struct moe_expert_layer *l, enum moe_status st, int i, int64_t row)
{
	return moe_fail_in(st, "layer %d, %s of expert %lld", l->params.layer,
			   moe_experts_array_name((enum moe_block_array)i), (long long)row);
}

/* Where gate and up are trained, each has blocks of its own. */
static enum moe_status check_blocks(const struct moe_expert_layer *l, int64_t rows)
{
	if (!l->params.train_base || l->layer.I % rows == 0)
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"gate and up lie in one tensor, and one scale for %lld rows serves both: with train_base each needs its "
			"own. moesaic convert makes tensors of single experts",
			(long long)rows);
}

/* One coding per matrix, which can be quantised again where it is trained. */
static enum moe_status check_codings(const struct moe_expert_layer *l, const struct moe_quantised *q, bool fused,
				     const char *const *names, struct moe_coding *out)
{
	int E = l->layer.E;

	for (int i = 0; i < MOE_EXPERT_MATRICES * E; i++) {
		const struct moe_coding *c = &q[i].coding;
		enum moe_status st = fused && i == 0 ? check_blocks(l, c->rows) : MOE_OK;

		if (st != MOE_OK)
			return in_expert(l, st, i / E, i % E);
		if (i % E == 0) {
			out[i / E] = *c;
			st = l->params.train_base ? moe_requantise_check(c, q[i].n, q[i].k) : MOE_OK;
		} else if (!moe_coding_alike(c, &out[i / E], l->params.train_base)) {
			st = moe_fail(MOE_ERR_FORMAT,
				      "%s with a scale (%s) per %lld columns of %lld rows, expert 0 is %s with one (%s) per "
				      "%lld of %lld: they must be alike",
				      c->format->name, moe_dtype_name(c->scale), (long long)c->group, (long long)c->rows,
				      out[i / E].format->name, moe_dtype_name(out[i / E].scale),
				      (long long)out[i / E].group, (long long)out[i / E].rows);
		}
		if (st == MOE_OK && !(fused && i / E == MOE_UP)) /* gate's are up's too */
			st = moe_check_scales(&q[i], names ? names[i] : "scale");
		if (st != MOE_OK)
			return in_expert(l, st, i / E, i % E);
	}
	return MOE_OK;
}

static enum moe_status submit(struct moe_expert_layer *l, const struct moe_repack_args *a)
{
	struct moe_context c = moe_experts_context(l, l->ticket, MOE_PHASE_OTHER, 0);
	enum moe_status st = moe_submit_begin(l->engine);

	if (st == MOE_OK) {
		st = moe_graph_moe_take_base(&c, &l->layer, &l->tensors, a);
		moe_submit_end(l->engine);
	}
	moe_ticket_drain(l->ticket);
	return st;
}

enum moe_status moe_experts_pack_quantised(struct moe_expert_layer *l, const struct moe_quantised *q, bool fused,
					   const char *const *names, const int64_t *map)
{
	struct moe_coding coding[MOE_EXPERT_MATRICES];
	struct moe_repack_args a = { .dtype = MOE_U8 };
	int E = l->layer.E;
	struct moe_quantised *by_id;
	enum moe_status st;

	MOE_TRY(check_codings(l, q, fused, names, coding));
	by_id = moe_alloc((size_t)(MOE_EXPERT_MATRICES * E), sizeof *by_id);
	if (!by_id)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", E);
	for (int i = 0; i < MOE_EXPERT_MATRICES * E; i++)
		by_id[i] = q[i / E * E + (map ? (int)map[i % E] : i % E)];
	for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
		a.coded[i] = by_id + i * E;
	a.first_row[MOE_UP] = fused ? l->layer.I : 0;
	st = moe_experts_take_coded(l->engine, &l->layer, coding);
	if (st == MOE_OK)
		st = submit(l, &a);
	moe_free(by_id);
	return st;
}

enum moe_status moe_experts_add_error(struct moe_expert_layer *l, const struct moe_quantised *q,
				      const struct moe_st_tensor *file, const void *floats, enum moe_dtype dtype)
{
	struct moe_load_error *sum = &l->load_error;
	size_t k = (size_t)q->k;
	float *want = moe_alloc(2 * k, sizeof *want), *got = want + k;

	if (!want)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", l->layer.E);
	for (int64_t row = 0; row < q->n; row += (q->n + ERROR_ROWS - 1) / ERROR_ROWS) {
		if (file)
			moe_st_quantised_row(file, q, row, 0, q->k, want);
		else
			moe_to_f32(want, (const char *)floats + (size_t)row * k * moe_dtype_size(dtype), dtype, k);
		moe_dequantise_row(q, row, 0, q->k, got);
		for (size_t i = 0; i < k; i++) {
			double off = (double)got[i] - (double)want[i];

			sum->wrong += off * off;
			sum->all += (double)want[i] * (double)want[i];
		}
	}
	moe_free(want);
	return MOE_OK;
}

/* Floats: masters take them where they are trained, else whole matrices become codes here. */
enum moe_status moe_experts_pack_floats(struct moe_expert_layer *l, const void *const *rows, enum moe_dtype dtype,
					const int64_t *map)
{
	const struct moe_format *f = moe_format_find(l->params.weight_format);
	int E = l->layer.E, n_all = MOE_EXPERT_MATRICES * E;
	struct moe_quantised *q = moe_calloc((size_t)n_all, sizeof *q);
	void **memory = moe_calloc((size_t)n_all, sizeof *memory);
	enum moe_status st = q && memory ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", E);

	l->load_error = (struct moe_load_error){ 0 };
	for (int i = 0; st == MOE_OK && i < n_all; i++) {
		bool down = i / E == MOE_DOWN;
		int64_t n = down ? l->layer.H : l->layer.I, k = down ? l->layer.I : l->layer.H;

		st = moe_quantise(f, rows[i], dtype, n, k, k, &q[i], &memory[i]);
		if (st == MOE_OK)
			st = moe_experts_add_error(l, &q[i], NULL, rows[i], dtype);
		if (st != MOE_OK)
			in_expert(l, st, i / E, i % E);
	}
	if (st == MOE_OK)
		st = moe_experts_pack_quantised(l, q, false, NULL, map);
	if (st == MOE_OK && l->params.train_base) { /* masters keep what codes drop */
		struct moe_repack_args a = { .dtype = dtype };
		const void **by_id = moe_alloc((size_t)n_all, sizeof *by_id);

		for (int i = 0; by_id && i < n_all; i++)
			by_id[i] = rows[i / E * E + (map ? (int)map[i % E] : i % E)];
		for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
			a.source[i] = by_id + i * E;
		st = by_id ? submit(l, &a) : moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", E);
		moe_free(by_id);
	}
	for (int i = 0; memory && i < n_all; i++)
		moe_free(memory[i]);
	moe_free(memory);
	moe_free(q);
	return st;
}

/* ---- arrays of the caller ---- */

static enum moe_status check_fused(const struct moe_array *a, const char *what, int E)
{
	if (!a->data)
		return moe_fail(MOE_ERR_ARG, "%s has no data", what);
	if (a->ndim < 2 || a->ndim > MOE_MAX_NDIM || a->shape[0] != E)
		return moe_fail(MOE_ERR_ARG, "%s must have %d experts as its first dimension", what, E);
	return MOE_OK;
}

static enum moe_status check_arrays(const struct moe_expert_layer *l, const struct moe_quantised_arrays *a, int64_t n)
{
	if (a->struct_size < sizeof *a)
		return moe_fail(MOE_ERR_ARG, "quantised arrays: struct_size is not set");
	if (!a->codes.data || !a->scale.data)
		return moe_fail(MOE_ERR_ARG, "%s has no data", a->codes.data ? "scale" : "codes");
	if (n)
		return MOE_OK;
	MOE_TRY(check_fused(&a->codes, "codes", l->layer.E));
	MOE_TRY(check_fused(&a->scale, "scale", l->layer.E));
	return a->zero.data ? check_fused(&a->zero, "zero", l->layer.E) : MOE_OK;
}

static enum moe_status open_row(const struct moe_expert_layer *l, const struct moe_quantised_arrays *a, int64_t n, int i,
				int row, struct moe_quantised *q)
{
	bool down = i == MOE_DOWN;
	struct moe_stored s = { .codes_name = "codes", .scale_name = "scale", .zero_name = "zero" };

	a += n ? row : 0;
	MOE_TRY(check_arrays(l, a, n));
	s.n = down ? l->layer.H : l->layer.I;
	s.k = down ? l->layer.I : l->layer.H;
	s.codes = n ? a->codes : moe_array_of_expert(&a->codes, row);
	s.scale = n ? a->scale : moe_array_of_expert(&a->scale, row);
	s.zero = n || !a->zero.data ? a->zero : moe_array_of_expert(&a->zero, row);
	return moe_open_stored(moe_format_find(l->params.weight_format), &s, q);
}

static enum moe_status load(struct moe_expert_layer *l, const struct moe_quantised_arrays *const *arrays, int64_t n,
			    const int64_t *map, int64_t n_map)
{
	int E = l->layer.E;
	struct moe_quantised *q;
	enum moe_status st = MOE_OK;

	if (l->loaded)
		return MOE_OK;
	if (!l->params.weight_format)
		return moe_fail(MOE_ERR_STATE, "layer %d has no weight_format: create it with the weights' format",
				l->params.layer);
	if (n != 0 && n != E)
		return moe_fail(MOE_ERR_ARG, "%lld quantised matrices; 0 (one array of all) or %d are possible",
				(long long)n, E);
	MOE_TRY(moe_engine_check_running(l->engine));
	MOE_TRY(moe_experts_check_map(l, map, n_map));
	q = moe_calloc((size_t)(MOE_EXPERT_MATRICES * E), sizeof *q);
	if (!q)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %d experts", E);
	l->load_error = (struct moe_load_error){ 0 };
	for (int i = 0; st == MOE_OK && i < MOE_EXPERT_MATRICES * E; i++) {
		st = arrays[i / E] ? open_row(l, arrays[i / E], n, i / E, i % E, &q[i])
				   : moe_fail(MOE_ERR_ARG, "it is NULL");
		if (st != MOE_OK)
			in_expert(l, st, i / E, i % E);
	}
	if (st == MOE_OK)
		st = moe_experts_pack_quantised(l, q, false, NULL, map);
	if (st == MOE_OK)
		st = moe_experts_loaded(l, map);
	moe_free(q);
	return st;
}

enum moe_status moe_experts_load_quantised(struct moe_expert_layer *l, const struct moe_quantised_arrays *gate,
					   const struct moe_quantised_arrays *up,
					   const struct moe_quantised_arrays *down, int64_t n, const int64_t *map,
					   int64_t n_map)
{
	const struct moe_quantised_arrays *arrays[MOE_EXPERT_MATRICES] = { gate, up, down };
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = load(l, arrays, n, map, n_map);
	moe_experts_leave(l);
	return st;
}
