/* SPDX-License-Identifier: Apache-2.0 */
/* Writing an adapter: single matrices, configuration, files; forms/ add the experts. */
#include "model/adapters/adapter_form.h"
#include "model/adapters/adapter_output.h"
#include "model/file.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

enum moe_status moe_adapter_begin(struct moe_adapter_output *out, int64_t rank, double alpha,
				  bool rslora)
{
	out->rslora = rslora;
	return moe_adapter_config_new(out->adapter, rank, alpha, rslora, &out->config);
}

enum moe_status moe_adapter_begin_uniform(struct moe_adapter_output *out, int64_t rank)
{
	if (!out->uniform)
		return moe_fail(MOE_ERR_UNSUPPORTED, "the adapter's experts have alpha 0 and add nothing: this form cannot say "
						     "so, peft can");
	return moe_adapter_begin(out, rank, moe_lora_alpha(false, rank, out->uniform), false);
}

enum moe_status moe_adapter_add(struct moe_adapter_items *items, struct moe_st_item **it,
				const char *fmt, ...)
{
	char name[MOE_TENSOR_NAME_MAX];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(name, sizeof name, fmt, ap);
	va_end(ap);
	if (items->n == items->cap) {
		size_t cap = items->cap ? 2 * items->cap : 64;
		struct moe_st_item *p = moe_realloc(items->item, cap, sizeof *p);
		struct moe_adapter_fill *f = NULL;

		if (p)
			items->item = p;
		f = p ? moe_realloc(items->fill, cap, sizeof *f) : NULL;
		if (!f)
			return moe_fail(MOE_ERR_NOMEM, "out of memory for tensor names");
		items->fill = f;
		items->cap = cap;
	}
	*it = &items->item[items->n];
	**it = (struct moe_st_item){ .name = moe_strdup(name), .dtype = MOE_F32 };
	items->fill[items->n] = (struct moe_adapter_fill){ 0 };
	if (!(*it)->name)
		return moe_fail(MOE_ERR_NOMEM, "out of memory for tensor names");
	items->n++;
	return MOE_OK;
}

static void free_items(struct moe_adapter_items *items)
{
	for (size_t i = 0; i < items->n; i++)
		moe_free((void *)(uintptr_t)items->item[i].name);
	moe_free(items->item);
	moe_free(items->fill);
}

/* ---- configuration ---- */

static bool alike(const struct moe_adapter_output *out, enum moe_adapter_target target,
		  moe_adapter_setting_fn get)
{
	const struct moe_adapter *a = out->adapter;
	int64_t rank, first_rank = 0;
	double alpha, first_alpha = 0;

	for (size_t i = 0; i < a->n_entries; i++) {
		if (a->entries[i].target != target || !get(out, &a->entries[i], &rank, &alpha))
			continue;
		if (first_rank && (rank != first_rank || alpha != first_alpha))
			return false;
		first_rank = rank;
		first_alpha = alpha;
	}
	return true;
}

enum moe_status moe_adapter_add_module(struct moe_adapter_output *out,
				       enum moe_adapter_target target, const char *list,
				       const char *module, moe_adapter_setting_fn get)
{
	const struct moe_adapter *a = out->adapter;
	bool same = alike(out, target, get);

	for (size_t i = 0; i < a->n_entries; i++) {
		const struct moe_adapter_entry *e = &a->entries[i];
		char full[96];
		int64_t rank;
		double alpha;

		if (e->target != target || !get(out, e, &rank, &alpha))
			continue;
		snprintf(full, sizeof full, "layers.%d.%s", e->layer,
			 strchr(module, '.') ? module : moe_adapter_target_module(target));
		MOE_TRY(moe_adapter_config_pattern(out->config, same ? module : full, rank, alpha));
		if (list)
			MOE_TRY(moe_adapter_config_target(out->config, list,
							  a->partial[target] ? full : module));
	}
	return MOE_OK;
}

/* ---- single matrices ---- */

static bool matrix_setting(const struct moe_adapter_output *out, const struct moe_adapter_entry *e,
			   int64_t *rank, double *alpha)
{
	if (e->weight)
		return false;
	*rank = e->rank;
	if (!out->uniform && out->rslora == out->adapter->rslora)
		*alpha = e->alpha;
	else
		*alpha = moe_lora_alpha(out->rslora, e->rank,
					out->uniform ? out->uniform
						     : moe_adapter_scaling(out->adapter, e));
	return true;
}

static enum moe_status fill_grown(void *user, void *to)
{
	const struct moe_adapter_fill *f = user;
	const struct moe_adapter_entry *e = f->entry;
	float *out = to;

	for (int64_t i = 0; i < e->out * e->rank; i++)
		out[i] = (float)(e->b[i] * f->grow);
	return MOE_OK;
}

static enum moe_status add_matrix(struct moe_adapter_output *out, const struct moe_adapter_entry *e)
{
	const char *module = moe_adapter_target_module(e->target);
	double grow = out->uniform ? moe_adapter_scaling(out->adapter, e) / out->uniform : 1;
	struct moe_st_item *it;

	MOE_TRY(moe_adapter_add(&out->tensors, &it,
				"base_model.model.model.layers.%d.%s.lora_A.weight", e->layer,
				module));
	it->ndim = 2;
	it->shape[0] = e->rank;
	it->shape[1] = e->in;
	it->data = e->a;
	MOE_TRY(moe_adapter_add(&out->tensors, &it,
				"base_model.model.model.layers.%d.%s.lora_B.weight", e->layer,
				module));
	it->ndim = 2;
	it->shape[0] = e->out;
	it->shape[1] = e->rank;
	if (grow == 1) {
		it->data = e->b;
		return MOE_OK;
	}
	it->fill = fill_grown;
	out->tensors.fill[out->tensors.n - 1] =
		(struct moe_adapter_fill){ .adapter = out->adapter, .entry = e, .grow = grow };
	return MOE_OK;
}

/* A router's weight, as PEFT saves modules_to_save. */
static enum moe_status add_weight(struct moe_adapter_output *out, const struct moe_adapter_entry *e)
{
	const char *module = moe_adapter_target_module(e->target);
	char full[96];
	struct moe_st_item *it;

	MOE_TRY(moe_adapter_add(&out->tensors, &it, "base_model.model.model.layers.%d.%s.weight", e->layer,
				module));
	it->ndim = 2;
	it->shape[0] = e->out;
	it->shape[1] = e->in;
	it->data = e->weight;
	snprintf(full, sizeof full, "layers.%d.%s", e->layer, module);
	return moe_adapter_config_target(out->config, "modules_to_save",
					 out->adapter->partial[e->target] ? full : module);
}

static enum moe_status add_matrices(struct moe_adapter_output *out)
{
	const struct moe_adapter *a = out->adapter;

	for (size_t i = 0; i < a->n_entries; i++)
		if (a->entries[i].target != MOE_ADAPTER_EXPERTS)
			MOE_TRY(a->entries[i].weight ? add_weight(out, &a->entries[i])
						     : add_matrix(out, &a->entries[i]));
	for (int t = 0; t < MOE_ADAPTER_TARGETS; t++) {
		enum moe_adapter_target target = (enum moe_adapter_target)t;

		if (t == MOE_ADAPTER_EXPERTS)
			continue;
		/* the router is no Linear in transformers 5: PEFT adapts its parameter */
		MOE_TRY(t == MOE_ADAPTER_ROUTER
				? moe_adapter_add_module(out, target, "target_parameters",
							 "mlp.gate.weight", matrix_setting)
				: moe_adapter_add_module(out, target, "target_modules",
							 moe_adapter_target_name(target),
							 matrix_setting));
	}
	return MOE_OK;
}

/* ---- files ---- */

static enum moe_status write_tensors(const char *path, struct moe_adapter_items *items,
				     const struct moe_st_meta *meta, size_t n_meta)
{
	for (size_t i = 0; i < items->n; i++)
		items->item[i].user = &items->fill[i];
	return moe_safetensors_write(path, items->item, items->n, meta, n_meta);
}

static enum moe_status write_files(struct moe_adapter_output *out, const char *tensors,
				   const char *kt, const char *config)
{
	const struct moe_st_meta meta[] = { { "format", "pt" },
					    { out->mark_key, out->mark_value } };

	if (out->kt.n)
		MOE_TRY(write_tensors(kt, &out->kt, meta, 1));
	else if (unlink(kt) != 0 && errno != ENOENT) /* of another form, written here before */
		return moe_fail(MOE_ERR_IO, "%s: cannot remove: %s", kt, strerror(errno));
	MOE_TRY(write_tensors(tensors, &out->tensors, meta, out->mark_key ? 2 : 1));
	return moe_json_write(config, out->config);
}

static bool has_experts(const struct moe_adapter *a)
{
	for (size_t i = 0; i < a->n_entries; i++)
		if (a->entries[i].target == MOE_ADAPTER_EXPERTS)
			return true;
	return false;
}

enum moe_status moe_adapter_write(const char *dir, const struct moe_adapter *adapter,
				  const char *form)
{
	struct moe_adapter_output out = { .adapter = adapter };
	char *tensors = moe_path_join(dir, MOE_ADAPTER_FILE);
	char *config = moe_path_join(dir, MOE_ADAPTER_CONFIG_FILE);
	char *kt = moe_path_join(dir, MOE_ADAPTER_KT_FILE);
	const struct moe_adapter_form *f;
	enum moe_status status;

	if (!tensors || !config || !kt) {
		status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
		goto done;
	}
	MOE_TRY_GOTO(moe_adapter_form_find(form, &f), status, done);
	MOE_TRY_GOTO(moe_adapter_validate(adapter), status, done);
	MOE_TRY_GOTO(has_experts(adapter) ? f->write(&out)
					  : moe_adapter_begin(&out, adapter->rank, adapter->alpha,
							      adapter->rslora),
		     status, done);
	MOE_TRY_GOTO(add_matrices(&out), status, done);
	MOE_TRY_GOTO(moe_dir_make(dir), status, done);
	status = write_files(&out, tensors, kt, config);
done:
	free_items(&out.tensors);
	free_items(&out.kt);
	cJSON_Delete(out.config);
	moe_free(tensors);
	moe_free(config);
	moe_free(kt);
	return status;
}
