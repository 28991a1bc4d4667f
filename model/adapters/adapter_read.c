/* SPDX-License-Identifier: Apache-2.0 */
/* Reading an adapter: files, names, single matrices; forms/ read the experts. */
#include "model/adapters/adapter_form.h"
#include "model/adapters/adapter_input.h"
#include "model/file.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_EXPERTS 65536 /* a hostile name must not ask for gigabytes */

enum moe_status moe_adapter_check_pair(const struct moe_adapter_pair *pair)
{
	const struct moe_st_tensor *a = pair->a, *b = pair->b;

	if (!a || !b)
		return moe_fail(MOE_ERR_FORMAT, "tensor '%.200s' has no partner lora_%c",
				a ? a->name : b->name, a ? 'B' : 'A');
	for (int i = 0; i < 2; i++, a = b)
		if (a->ndim != 2 || a->shape[0] < 1 || a->shape[1] < 1)
			return moe_fail(MOE_ERR_FORMAT, "tensor '%.200s' is not a matrix", a->name);
	if (pair->a->shape[0] != b->shape[1])
		return moe_fail(
			MOE_ERR_FORMAT, "tensor '%.200s' has %lld rows, its lora_B %lld columns",
			pair->a->name, (long long)pair->a->shape[0], (long long)b->shape[1]);
	return MOE_OK;
}

enum moe_status moe_adapter_to_f32(const struct moe_st_tensor *t, float *out)
{
	size_t size = t->dtype == MOE_DTYPE_COUNT ? 0 : moe_dtype_size(t->dtype);

	if (!size || !moe_to_f32(out, t->data, t->dtype, t->bytes / size))
		return moe_fail(
			MOE_ERR_UNSUPPORTED,
			"tensor '%.200s' has dtype %.32s: F32, BF16, F16 and F64 can be read",
			t->name, t->dtype_text);
	return MOE_OK;
}

/* ---- names ---- */

static bool skip(const char **at, const char *text)
{
	size_t n = strlen(text);

	if (strncmp(*at, text, n) != 0)
		return false;
	*at += n;
	return true;
}

/* A number and the dot behind it. */
static bool number(const char **at, long below, int *out)
{
	char *end;
	long n = **at >= '0' && **at <= '9' ? strtol(*at, &end, 10) : -1;

	if (n < 0 || n >= below || *end != '.')
		return false;
	*at = end + 1;
	*out = (int)n;
	return true;
}

static struct moe_adapter_pair *expert_pair(struct moe_adapter_layer *l, int expert, int projection)
{
	if (expert >= l->n_experts) {
		int cap = MOE_MAX(expert + 1, 2 * l->n_experts);
		void *p = moe_realloc(l->expert, (size_t)cap, sizeof *l->expert);

		if (!p)
			return NULL;
		l->expert = p;
		memset(l->expert + l->n_experts, 0,
		       (size_t)(cap - l->n_experts) * sizeof *l->expert);
		l->n_experts = cap;
	}
	return &l->expert[expert][projection];
}

/* What follows "experts." of a layer; NULL: unknown, with *status MOE_OK. */
static struct moe_adapter_pair *experts_place(struct moe_adapter_input *in,
					      struct moe_adapter_layer *l, const char **at,
					      enum moe_status *status)
{
	static const char *const names[2][MOE_ADAPTER_PROJECTIONS] = {
		{ "gate_proj.", "up_proj.", "down_proj." }, { "w1.", "w3.", "w2." }
	};
	struct moe_adapter_pair *pair;
	int expert;

	if (skip(at, "base_layer."))
		return &l->inner;
	if (!number(at, MAX_EXPERTS, &expert))
		return &l->outer;
	for (int style = 0; style < 2; style++)
		for (int p = 0; p < MOE_ADAPTER_PROJECTIONS; p++) {
			if (!skip(at, names[style][p]))
				continue;
			in->adapter->mixtral |= style == 1;
			pair = expert_pair(l, expert, p);
			if (!pair)
				*status = moe_fail(MOE_ERR_NOMEM, "out of memory");
			return pair;
		}
	return NULL;
}

static struct moe_adapter_pair *place(struct moe_adapter_input *in, const char **at, bool *router,
				      enum moe_status *status)
{
	struct moe_adapter_layer *l;
	int layer;

	skip(at, "base_model.model.");
	if (!skip(at, "model.layers.") || !number(at, MOE_ARCH_MAX_LAYERS, &layer))
		return NULL;
	l = &in->layer[layer];
	in->n_layers = MOE_MAX(in->n_layers, layer + 1);
	if (skip(at, "mlp.experts.") || skip(at, "block_sparse_moe.experts."))
		return experts_place(in, l, at, status);
	*router = skip(at, "block_sparse_moe.gate.");
	if (*router)
		return &l->matrix[MOE_ADAPTER_ROUTER];
	for (int t = 0; t < MOE_ADAPTER_TARGETS; t++) {
		const char *after = *at;

		if (t == MOE_ADAPTER_EXPERTS ||
		    !skip(&after, moe_adapter_target_module((enum moe_adapter_target)t)) ||
		    !skip(&after, "."))
			continue;
		*at = after;
		*router = t == MOE_ADAPTER_ROUTER;
		return &l->matrix[t];
	}
	return NULL;
}

/* Sorts one tensor into in->layer by its name. */
static enum moe_status place_tensor(struct moe_adapter_input *in, const struct moe_st_tensor *t)
{
	enum moe_status status = MOE_OK;
	const char *at = t->name;
	bool router = false;
	struct moe_adapter_pair *pair = place(in, &at, &router, &status);
	const struct moe_st_tensor **slot = NULL;

	if (status != MOE_OK)
		return status;
	if (pair && !strcmp(at, "lora_A.weight"))
		slot = &pair->a;
	else if (pair && !strcmp(at, "lora_B.weight"))
		slot = &pair->b;
	else if (router && !strcmp(at, "weight"))
		slot = &pair->weight;
	if (!slot)
		return moe_fail(
			MOE_ERR_UNSUPPORTED,
			"tensor '%.200s' cannot be used: adapters of q_proj, k_proj, v_proj, o_proj, "
			"gate, shared_expert_gate, MLPs and routed experts can",
			t->name);
	if (*slot) /* "01" and "1" are one layer */
		return moe_fail(MOE_ERR_FORMAT, "tensors '%.200s' and '%.200s' are the same",
				t->name, (*slot)->name);
	*slot = t;
	return MOE_OK;
}

/* ---- entries ---- */

/* A router that was trained itself. */
static enum moe_status read_weight(const struct moe_adapter_pair *pair, struct moe_adapter_entry *e)
{
	const struct moe_st_tensor *t = pair->weight;

	if (pair->a || pair->b)
		return moe_fail(MOE_ERR_FORMAT, "tensors '%.200s' and '%.200s' are of one router: a weight or LoRA is "
				"expected", t->name, (pair->a ? pair->a : pair->b)->name);
	if (t->ndim != 2 || t->shape[0] < 1 || t->shape[1] < 1)
		return moe_fail(MOE_ERR_FORMAT, "tensor '%.200s' is not a matrix", t->name);
	e->out = t->shape[0];
	e->in = t->shape[1];
	e->block = e->weight = moe_alloc((size_t)(e->in * e->out), sizeof *e->weight);
	if (!e->weight)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	return moe_adapter_to_f32(t, e->weight);
}

static enum moe_status read_matrix(struct moe_adapter_input *in,
				   const struct moe_adapter_pair *pair, struct moe_adapter_entry *e)
{
	int64_t rank;
	char name[96];

	if (pair->weight)
		return read_weight(pair, e);
	MOE_TRY(moe_adapter_check_pair(pair));
	snprintf(name, sizeof name, "model.layers.%d.%s", e->layer,
		 moe_adapter_target_module(e->target));
	MOE_TRY(moe_adapter_config_setting(&in->config, name, &rank, &e->alpha));
	if (e->target ==
	    MOE_ADAPTER_ROUTER) { /* PEFT: the parameter of a module that is no Linear */
		double alpha;
		int64_t other;

		snprintf(name, sizeof name, "model.layers.%d.mlp.gate.weight", e->layer);
		MOE_TRY(moe_adapter_config_setting(&in->config, name, &other, &alpha));
		if (other != in->adapter->rank || alpha != in->adapter->alpha) {
			rank = other;
			e->alpha = alpha;
		}
	}
	e->rank = pair->a->shape[0];
	e->in = pair->a->shape[1];
	e->out = pair->b->shape[0];
	if (e->rank != rank)
		return moe_fail(MOE_ERR_FORMAT,
				"tensor '%.200s' has rank %lld, the configuration %lld",
				pair->a->name, (long long)e->rank, (long long)rank);
	e->a = moe_alloc((size_t)(e->rank * (e->in + e->out)), sizeof *e->a);
	if (!e->a)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	e->block = e->a;
	e->b = e->a + e->rank * e->in;
	MOE_TRY(moe_adapter_to_f32(pair->a, e->a));
	return moe_adapter_to_f32(pair->b, e->b);
}

/* The form of the experts; NULL: there are none. */
static enum moe_status choose_form(const struct moe_adapter_input *in,
				   const struct moe_adapter_form **out)
{
	*out = NULL;
	for (int i = 0; moe_adapter_form_list[i]; i++)
		for (int l = 0; l < MOE_ARCH_MAX_LAYERS; l++) {
			if (!moe_adapter_form_list[i]->has(in, l))
				continue;
			if (*out && *out != moe_adapter_form_list[i])
				return moe_fail(
					MOE_ERR_FORMAT,
					"has experts in the forms %s and %s: one is expected",
					(*out)->name, moe_adapter_form_list[i]->name);
			*out = moe_adapter_form_list[i];
		}
	return MOE_OK;
}

static enum moe_status read_layers(struct moe_adapter_input *in,
				   const struct moe_adapter_form *form)
{
	struct moe_adapter *adapter = in->adapter;

	adapter->entries =
		moe_calloc((size_t)in->n_layers * MOE_ADAPTER_TARGETS, sizeof *adapter->entries);
	if (!adapter->entries)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (int i = 0; i < in->n_layers; i++)
		for (int t = 0; t < MOE_ADAPTER_TARGETS; t++) {
			struct moe_adapter_entry *e = &adapter->entries[adapter->n_entries];
			bool experts = t == MOE_ADAPTER_EXPERTS;

			if (experts ? !form || !form->has(in, i)
				    : !moe_adapter_has(&in->layer[i].matrix[t]))
				continue;
			adapter->n_entries++; /* before reading: its block must be freed */
			e->layer = i;
			e->target = (enum moe_adapter_target)t;
			MOE_TRY(experts ? form->read(in, e)
					: read_matrix(in, &in->layer[i].matrix[t], e));
		}
	if (!adapter->n_entries)
		return moe_fail(MOE_ERR_FORMAT, "holds no tensors");
	return form && form->finish ? form->finish(in) : MOE_OK;
}

/* Whether a form must name layers when it is written again. */
static void note_partial(struct moe_adapter_input *in)
{
	static const char *const experts[] = { "mlp.experts.gate_up_proj",
					       "mlp.experts.down_proj",
					       "mlp.experts.0.gate_proj",
					       "mlp.experts.0.down_proj",
					       "block_sparse_moe.experts.0.w1",
					       "block_sparse_moe.experts.0.w2",
					       "mlp.experts",
					       NULL };

	for (int t = 0; t < MOE_ADAPTER_TARGETS; t++) {
		enum moe_adapter_target target = (enum moe_adapter_target)t;
		const char *const one[] = { moe_adapter_target_module(target),
					    t == MOE_ADAPTER_ROUTER ? "mlp.gate.weight" : NULL,
					    NULL };
		int first = -1, n = 0, last = moe_adapter_layers(in->adapter) - 1;
		const struct moe_adapter_entry *e;
		bool weights = false;

		for (int i = 0; i <= last; i++)
			if ((e = moe_adapter_find(in->adapter, i, target))) {
				first = first < 0 ? i : first;
				weights |= e->weight != NULL;
				n++;
			}
		/* leading layers may be dense; a gap or an early end says that a choice was made */
		in->adapter->partial[t] = n && n != last + 1 - first;
		if (n && !weights && !(in->kt && t == MOE_ADAPTER_EXPERTS))
			in->adapter->partial[t] |= moe_adapter_config_partial(
				&in->config, t == MOE_ADAPTER_EXPERTS ? experts : one);
	}
}

static enum moe_status open_files(struct moe_adapter_input *in)
{
	char *tensors = moe_path_join(in->dir, MOE_ADAPTER_FILE);
	char *config = moe_path_join(in->dir, MOE_ADAPTER_CONFIG_FILE);
	char *kt = moe_path_join(in->dir, MOE_ADAPTER_KT_FILE);
	enum moe_status status;

	if (!tensors || !config || !kt)
		status = moe_fail(MOE_ERR_NOMEM, "out of memory");
	else
		status = moe_adapter_config_read(config, &in->config, in->adapter);
	if (status == MOE_OK && moe_path_exists(kt))
		status = moe_safetensors_open(kt, &in->kt);
	if (status == MOE_OK)
		status = moe_safetensors_open(tensors, &in->file);
	moe_free(tensors);
	moe_free(config);
	moe_free(kt);
	return status;
}

static enum moe_status read_all(struct moe_adapter_input *in, const char *dir)
{
	const struct moe_adapter_form *form;

	in->dir = moe_strdup(dir);
	in->adapter = moe_calloc(1, sizeof *in->adapter);
	in->layer = moe_calloc(MOE_ARCH_MAX_LAYERS, sizeof *in->layer);
	if (!in->dir || !in->adapter || !in->layer)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	MOE_TRY(open_files(in));
	for (size_t i = 0; i < moe_safetensors_count(in->file); i++)
		MOE_TRY(place_tensor(in, moe_safetensors_at(in->file, i)));
	MOE_TRY(choose_form(in, &form));
	in->adapter->form = form ? form->name : "peft";
	if (in->kt)
		in->n_layers = MOE_ARCH_MAX_LAYERS; /* it has layers of its own */
	MOE_TRY(read_layers(in, form));
	note_partial(in);
	return MOE_OK;
}

enum moe_status moe_adapter_read(const char *dir, struct moe_adapter **out)
{
	struct moe_adapter_input in = { 0 };
	enum moe_status status = read_all(&in, dir);

	if (status != MOE_OK) {
		moe_fail_in(status, "adapter %s", dir);
		moe_adapter_free(in.adapter);
	} else {
		*out = in.adapter;
	}
	for (int i = 0; in.layer && i < MOE_ARCH_MAX_LAYERS; i++)
		moe_free(in.layer[i].expert);
	moe_safetensors_close(in.file);
	moe_safetensors_close(in.kt);
	cJSON_Delete(in.config.root);
	moe_free(in.layer);
	moe_free(in.dir);
	return status;
}

enum moe_status moe_adapter_form_find(const char *name, const struct moe_adapter_form **out)
{
	char list[256] = "";

	for (int i = 0; moe_adapter_form_list[i]; i++) {
		size_t at = strlen(list);

		if (!strcmp(name ? name : "peft", moe_adapter_form_list[i]->name)) {
			*out = moe_adapter_form_list[i];
			return MOE_OK;
		}
		snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "",
			 moe_adapter_form_list[i]->name);
	}
	return moe_fail(MOE_ERR_ARG, "adapter format '%.64s' is none of %s", name, list);
}
