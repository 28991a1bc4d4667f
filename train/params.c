/* SPDX-License-Identifier: Apache-2.0 */
#include "train/params.h"

#include "codelets/router_lora.h"
#include "model/state.h"

#include <math.h>
#include <stdio.h>

static const char *const lora_names[MOE_LORA_ARRAYS] = {
	"gate_lora_a", "up_lora_a", "down_lora_a", "gate_lora_b", "up_lora_b", "down_lora_b"
};
static const char *const linear_names[MOE_ATTN_LINEARS] = { "q_proj", "k_proj", "v_proj",
							    "o_proj" };
static const char *const ffn_names[MOE_FFN_MATRICES] = { "mlp.gate_proj", "mlp.up_proj",
							 "mlp.down_proj", "mlp.shared_gate" };
static const struct {
	enum moe_param_field field;
	const char *name;
} saved[] = { { MOE_VALUE, "value" }, { MOE_MOMENT1, "exp_avg" }, { MOE_MOMENT2, "exp_avg_sq" } };

#define EXPERT_ROWS "expert_rows"

/* Where out is: A and B of one matrix; returns how many. */
static size_t pair(const struct moe_param *a, const struct moe_param *b, int layer,
		   const char *name, struct moe_train_array *out)
{
	const struct moe_param *const both[] = { a, b };

	for (int i = 0; out && i < 2; i++) {
		out[i] = (struct moe_train_array){ .param = (struct moe_param *)both[i],
						   .pieces = 1,
						   .piece = both[i]->piece };
		snprintf(out[i].name, sizeof out[i].name, "layers.%d.%s.lora_%c", layer, name,
			 "ab"[i]);
	}
	return 2;
}

static size_t layer_arrays(const struct moe_decoder_layer *layer, int l,
			   struct moe_train_array *out)
{
	struct moe_experts *e = layer->experts;
	size_t n = 0;

	for (int a = 0; e && e->r && e->a_gu.grad && a < MOE_LORA_ARRAYS; a++) {
		if (a == MOE_UP_A && e->ra == e->r)
			continue; /* the same array as gate's */
		if (out) {
			out[n] = (struct moe_train_array){ .experts = e,
							   .array = (enum moe_lora_array)a,
							   .pieces = e->E,
							   .piece = moe_lora_elements(
								   e, (enum moe_lora_array)a) };
			snprintf(out[n].name, sizeof out[n].name, "layers.%d.experts.%s", l,
				 lora_names[a]);
		}
		n++;
	}
	if (e && e->router_lora)
		n += pair(&e->router_lora->a, &e->router_lora->b, l, "router",
			  out ? out + n : NULL);
	if (e && e->router_param.m) {
		if (out) {
			out[n] = (struct moe_train_array){ .param = &e->router_param,
							   .pieces = 1,
							   .piece = e->router_param.piece };
			snprintf(out[n].name, sizeof out[n].name, "layers.%d.router.weight", l);
		}
		n++;
	}
	for (int i = 0; i < MOE_ATTN_LINEARS; i++) {
		const struct moe_linear *linear = &layer->linear[i];

		if (linear->r && linear->lora_a.grad)
			n += pair(&linear->lora_a, &linear->lora_b, l, linear_names[i],
				  out ? out + n : NULL);
	}
	for (int i = 0; layer->ffn && i < MOE_FFN_MATRICES; i++)
		if (moe_ffn_trains(layer->ffn, i))
			n += pair(&layer->ffn->lora[i].a, &layer->ffn->lora[i].b, l, ffn_names[i],
				  out ? out + n : NULL);
	return n + moe_train_whole_layer(layer, l, out ? out + n : NULL);
}

enum moe_status moe_train_arrays(const struct moe_decoder *d, struct moe_train_array **out,
				 size_t *n)
{
	*n = 0;
	for (int l = 0; l < d->n_layers; l++)
		*n += layer_arrays(&d->layers[l], l, NULL);
	*n += moe_train_whole_ends(d, NULL);
	*out = moe_alloc(*n, sizeof **out);
	if (!*out)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the list of parameters");
	*n = 0;
	for (int l = 0; l < d->n_layers; l++)
		*n += layer_arrays(&d->layers[l], l, *out + *n);
	*n += moe_train_whole_ends(d, *out + *n);
	return MOE_OK;
}

static float *param_field(const struct moe_param *p, enum moe_param_field f)
{
	return f == MOE_VALUE ? p->value : f == MOE_GRAD ? p->grad : f == MOE_MOMENT1 ? p->m : p->v;
}

static void array_get(const struct moe_train_array *a, enum moe_param_field f, int piece,
			 float *dst)
{
	if (a->whole || a->base)
		moe_train_whole_get(a, f, piece, dst);
	else if (a->experts)
		moe_experts_get(a->experts, a->array, f, piece, dst);
	else
		memcpy(dst, param_field(a->param, f), (size_t)a->piece * sizeof *dst);
}

static void array_set(const struct moe_train_array *a, enum moe_param_field f, int piece,
			 const float *src)
{
	if (a->whole || a->base)
		moe_train_whole_set(a, f, piece, src);
	else if (a->experts)
		moe_experts_set(a->experts, a->array, f, piece, src);
	else
		memcpy(param_field(a->param, f), src, (size_t)a->piece * sizeof *src);
}

struct fill {
	const struct moe_train_array *array;
	enum moe_param_field field;
	char name[128];
};

static enum moe_status fill_item(void *user, void *out)
{
	const struct fill *f = user;

	for (int e = 0; e < f->array->pieces; e++)
		array_get(f->array, f->field, e, (float *)out + e * f->array->piece);
	return MOE_OK;
}

static enum moe_status write_state(const char *dir, const struct moe_train_array *a, size_t n,
				   const struct moe_train_progress *p)
{
	size_t count = n * MOE_COUNT(saved);
	struct moe_st_item *items = moe_calloc(count + 1, sizeof *items);
	struct fill *fills = moe_calloc(count, sizeof *fills);
	const struct moe_scalar scalars[] = {
		{ .key = "step", .kind = MOE_SCALAR_INT, .i = p->step },
		{ .key = "tokens", .kind = MOE_SCALAR_INT, .i = p->tokens },
		{ .key = "trained_tokens", .kind = MOE_SCALAR_INT, .i = p->trained_tokens },
		{ .key = "seconds", .kind = MOE_SCALAR_REAL, .r = p->seconds },
		{ .key = "first_loss", .kind = MOE_SCALAR_REAL, .r = p->first_loss },
		{ .key = "skipped", .kind = MOE_SCALAR_INT, .i = p->skipped },
		{ .key = "last_loss", .kind = MOE_SCALAR_REAL, .r = p->last_loss },
		{ .key = "eval_loss", .kind = MOE_SCALAR_REAL, .r = p->eval_loss },
		{ .key = "best_loss", .kind = MOE_SCALAR_REAL, .r = p->best_loss },
		{ .key = "best_step", .kind = MOE_SCALAR_INT, .i = p->best_step },
		{ .key = "data_hash",
		  .kind = MOE_SCALAR_TEXT,
		  .text = p->data_hash ? p->data_hash : "" },
		{ .key = "seed", .kind = MOE_SCALAR_INT, .i = (int64_t)p->seed },
		{ .key = "batch_size", .kind = MOE_SCALAR_INT, .i = p->batch_size },
		{ .key = "batch_tokens", .kind = MOE_SCALAR_INT, .i = p->batch_tokens },
		{ .key = "accumulation", .kind = MOE_SCALAR_INT, .i = p->accumulation },
		{ .key = "keep_order", .kind = MOE_SCALAR_INT, .i = p->keep_order },
		{ .key = "packs", .kind = MOE_SCALAR_INT, .i = p->packs },
		{ .key = "order_seed", .kind = MOE_SCALAR_INT, .i = p->order_seed },
		{ .key = "drop_last", .kind = MOE_SCALAR_INT, .i = p->drop_last },
	};
	enum moe_status st = MOE_ERR_NOMEM;

	if (!items || !fills) {
		moe_fail(st, "no memory for the training state");
		goto out;
	}
	for (size_t i = 0; i < count; i++) {
		const struct moe_train_array *array = &a[i / MOE_COUNT(saved)];

		fills[i].array = array;
		fills[i].field = saved[i % MOE_COUNT(saved)].field;
		snprintf(fills[i].name, sizeof fills[i].name, "%s.%s", array->name,
			 saved[i % MOE_COUNT(saved)].name);
		items[i] = (struct moe_st_item){ .name = fills[i].name,
						 .dtype = MOE_F32,
						 .ndim = 2,
						 .shape = { array->pieces, array->piece },
						 .fill = fill_item,
						 .user = &fills[i] };
	}
	items[count] = (struct moe_st_item){ .name = EXPERT_ROWS,
					     .dtype = MOE_I64,
					     .ndim = 1,
					     .shape = { p->n_expert_rows },
					     .data = p->expert_rows };
	st = moe_state_write(dir, items, count + 1, scalars, MOE_COUNT(scalars));
out:
	moe_free(items);
	moe_free(fills);
	return st;
}

enum moe_status moe_train_state_save(const struct moe_decoder *d, const char *dir,
				     const struct moe_train_progress *p)
{
	struct moe_train_array *a;
	size_t n;
	enum moe_status st;

	MOE_TRY(moe_train_arrays(d, &a, &n));
	st = write_state(dir, a, n, p);
	moe_free(a);
	return st;
}

static enum moe_status order_differs(const char *key, int64_t have, int64_t want)
{
	return moe_fail(MOE_ERR_ARG,
			"the checkpoint was made with %s %lld, this run has %lld: the data would come in another order; "
			"resume with what it was made with, or begin anew (--overwrite)",
			key, (long long)have, (long long)want);
}

static enum moe_status check_int(const struct moe_state *s, const char *key, int64_t want)
{
	int64_t have;

	MOE_TRY(moe_state_int(s, key, &have));
	return have == want ? MOE_OK : order_differs(key, have, want);
}

/* Of a key younger than the format: what a checkpoint without it was made with. */
static enum moe_status check_younger(const struct moe_state *s, const char *key, int64_t want, int64_t without)
{
	if (moe_state_has(s, key))
		return check_int(s, key, want);
	return want == without ? MOE_OK : order_differs(key, without, want);
}

static enum moe_status load_progress(const struct moe_state *s, struct moe_train_progress *p)
{
	const char *hash;

	MOE_TRY(moe_state_text(s, "data_hash", &hash));
	if (strcmp(hash, p->data_hash ? p->data_hash : ""))
		return moe_fail(MOE_ERR_ARG,
				"the checkpoint was made with other data (hash %.16s...): resume with those, or begin anew (--overwrite)",
				hash);
	MOE_TRY(check_int(s, "seed", (int64_t)p->seed));
	MOE_TRY(check_int(s, "batch_size", p->batch_size));
	MOE_TRY(check_int(s, "batch_tokens", p->batch_tokens));
	MOE_TRY(check_int(s, "accumulation", p->accumulation));
	MOE_TRY(check_int(s, "keep_order", p->keep_order));
	MOE_TRY(check_int(s, "packs", p->packs));
	MOE_TRY(check_younger(s, "order_seed", p->order_seed, (int64_t)p->seed));
	MOE_TRY(check_younger(s, "drop_last", p->drop_last, 0));
	MOE_TRY(moe_state_int(s, "step", &p->step));
	MOE_TRY(moe_state_int(s, "tokens", &p->tokens));
	MOE_TRY(moe_state_int(s, "trained_tokens", &p->trained_tokens));
	MOE_TRY(moe_state_real(s, "seconds", &p->seconds));
	MOE_TRY(moe_state_real(s, "first_loss", &p->first_loss));
	MOE_TRY(moe_state_int(s, "skipped", &p->skipped));
	MOE_TRY(moe_state_real(s, "last_loss", &p->last_loss));
	MOE_TRY(moe_state_real(s, "eval_loss", &p->eval_loss));
	MOE_TRY(moe_state_real(s, "best_loss", &p->best_loss));
	MOE_TRY(moe_state_int(s, "best_step", &p->best_step));
	if (p->step < 0 || p->tokens < 0 || p->trained_tokens < 0 || !(p->seconds >= 0))
		return moe_fail(
			MOE_ERR_FORMAT,
			"state.json: step %lld, tokens %lld, trained_tokens %lld, seconds %g",
			(long long)p->step, (long long)p->tokens, (long long)p->trained_tokens,
			p->seconds);
	return MOE_OK;
}

static enum moe_status load_expert_rows(const struct moe_state *s,
					const struct moe_train_progress *p)
{
	const struct moe_st_tensor *t;

	if (!p->expert_rows)
		return MOE_OK;
	MOE_TRY(moe_safetensors_get_typed(moe_state_arrays(s), EXPERT_ROWS, MOE_I64, 1,
					  &p->n_expert_rows, &t));
	memcpy(p->expert_rows, t->data, (size_t)p->n_expert_rows * sizeof *p->expert_rows);
	return MOE_OK;
}

static enum moe_status load_array(const struct moe_state *s, const struct moe_train_array *a)
{
	int64_t shape[2] = { a->pieces, a->piece };
	float *buf = moe_alloc((size_t)(a->pieces * a->piece), sizeof *buf);
	enum moe_status st = buf ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "no memory for %s", a->name);
	char name[128];

	for (size_t f = 0; st == MOE_OK && f < MOE_COUNT(saved); f++) {
		snprintf(name, sizeof name, "%s.%s", a->name, saved[f].name);
		if (!moe_safetensors_find(moe_state_arrays(s), name)) {
			st = moe_fail(MOE_ERR_ARG,
				      "the checkpoint has no %s: it was made with another method, masters or targets; resume with "
				      "those, or begin anew (--overwrite)",
				      name);
			break;
		}
		st = moe_safetensors_read_f32(moe_state_arrays(s), name, 2, shape, buf);
		for (int e = 0; st == MOE_OK && e < a->pieces; e++)
			array_set(a, saved[f].field, e, buf + e * a->piece);
	}
	moe_free(buf);
	return st;
}

enum moe_status moe_train_state_load(const struct moe_decoder *d, const char *dir,
				     struct moe_train_progress *p)
{
	struct moe_train_array *a = NULL;
	struct moe_state *s;
	size_t n = 0, count;
	enum moe_status st;

	MOE_TRY(moe_state_open(dir, &s));
	st = load_progress(s, p);
	if (st == MOE_OK)
		st = moe_train_arrays(d, &a, &n);
	count = st == MOE_OK ? moe_safetensors_count(moe_state_arrays(s)) : 0;
	if (st == MOE_OK && count != n * MOE_COUNT(saved) + 1)
		st = moe_fail(MOE_ERR_ARG,
			      "the checkpoint has %zu arrays, this run has %zu: other targets; resume with those it was made with, "
			      "or begin anew (--overwrite)",
			      count, n * MOE_COUNT(saved) + 1);
	if (st == MOE_OK)
		st = load_expert_rows(s, p);
	for (size_t i = 0; st == MOE_OK && i < n; i++)
		st = load_array(s, &a[i]);
	for (int l = 0; st == MOE_OK && l < d->n_layers; l++)
		if (d->layers[l].experts && d->layers[l].experts->router_lora)
			moe_router_fold(d->layers[l].experts);
	moe_free(a);
	moe_state_close(s);
	return st == MOE_OK ? st : moe_fail_in(st, "%s", dir);
}

/* The first piece of field f of an array that is not finite; -1: none. */
static int bad_piece(const struct moe_train_array *a, enum moe_param_field f, float *buf)
{
	for (int e = 0; e < a->pieces; e++) {
		array_get(a, f, e, buf);
		for (int64_t i = 0; i < a->piece; i++)
			if (!isfinite(buf[i]))
				return e;
	}
	return -1;
}

static bool find_bad(const struct moe_decoder *d, const enum moe_param_field *fields,
		     const char *const *names, int n_fields, char *buf, size_t size)
{
	struct moe_train_array *a;
	int piece = -1;
	size_t n;

	if (moe_train_arrays(d, &a, &n) != MOE_OK)
		return false;
	for (size_t i = 0; i < n && piece < 0; i++) {
		float *values = moe_alloc((size_t)a[i].piece, sizeof *values);

		for (int f = 0; values && f < n_fields && piece < 0; f++) {
			piece = bad_piece(&a[i], fields[f], values);
			if (piece >= 0)
				snprintf(buf, size, "%s of %s, piece %d", names[f], a[i].name,
					 piece);
		}
		moe_free(values);
	}
	moe_free(a);
	return piece >= 0;
}

bool moe_train_first_bad(const struct moe_decoder *d, char *buf, size_t size)
{
	static const enum moe_param_field fields[] = { MOE_VALUE, MOE_GRAD };
	static const char *const names[] = { "value", "gradient" };

	return find_bad(d, fields, names, 2, buf, size);
}

bool moe_train_bad_value(const struct moe_decoder *d, char *buf, size_t size)
{
	static const enum moe_param_field fields[] = { MOE_VALUE, MOE_MOMENT1, MOE_MOMENT2 };
	static const char *const names[] = { "value", "first moment", "second moment" };

	return find_bad(d, fields, names, 3, buf, size);
}
