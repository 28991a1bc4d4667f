/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints and adapters as files: merging, converting. Needs no engine. */
#include "codelets/format.h"
#include "codelets/kernels/kernels.h"
#include "model/adapters/adapter_form.h"
#include "model/convert.h"
#include "model/file.h"
#include "model/inspect.h"
#include "model/merge.h"
#include "model/staging.h"

enum moe_status moe_merge(const struct moe_merge_params *params, struct moe_merge_result *result)
{
	struct moe_merge_result own = { .struct_size = sizeof own };

	if (!params || params->struct_size < sizeof *params)
		return moe_fail(MOE_ERR_ARG, "merge params: struct_size is not set");
	if (result && result->struct_size < sizeof *result)
		return moe_fail(MOE_ERR_ARG, "merge result: struct_size is not set");
	if (!params->model || !params->adapter || !params->output_dir)
		return moe_fail(MOE_ERR_ARG, "merge params: model, adapter or output_dir is NULL");
	if (params->max_shard_bytes < 0)
		return moe_fail(MOE_ERR_ARG, "max_shard_bytes is %lld; 0 (no limit) or more is possible",
				(long long)params->max_shard_bytes);
	return moe_merge_run(params, result ? result : &own);
}

static enum moe_status convert(struct moe_adapter *adapter, const struct moe_convert_params *p,
			       const struct moe_adapter_form *form)
{
	struct moe_staging staging = { 0 };
	struct moe_arch *arch;
	enum moe_status status = MOE_OK;

	if (p->model) {
		arch = moe_calloc(1, sizeof *arch);
		status = arch ? moe_arch_load(p->model, arch)
			      : moe_fail(MOE_ERR_NOMEM, "out of memory");
		if (status == MOE_OK && moe_adapter_check(adapter, arch) != MOE_OK)
			status = moe_fail_in(MOE_ERR_FORMAT, "adapter %s, model %s", p->in,
					     p->model);
		if (status == MOE_OK)
			adapter->mixtral = !strcmp(arch->name, "mixtral");
		moe_free(arch);
	}
	if (status == MOE_OK)
		status = moe_staging_begin(p->out, &staging);
	if (status == MOE_OK)
		status = moe_adapter_write(staging.path, adapter, form->name);
	if (status == MOE_OK)
		status = moe_staging_commit(&staging);
	moe_staging_abort(&staging);
	return status;
}

enum moe_status moe_convert_adapter(const struct moe_convert_params *p,
				    struct moe_convert_result *result)
{
	const struct moe_adapter_form *form;
	struct moe_adapter *adapter = NULL;
	enum moe_status status;

	if (!p || p->struct_size < sizeof *p || (result && result->struct_size < sizeof *result))
		return moe_fail(MOE_ERR_ARG, "convert params: struct_size is not set");
	if (!p->in || !p->out || !p->adapter_format)
		return moe_fail(MOE_ERR_ARG, "convert params: in, out or adapter_format is NULL");
	MOE_TRY(moe_adapter_form_find(p->adapter_format, &form));
	MOE_TRY(moe_adapter_read(p->in, &adapter));
	status = convert(adapter, p, form);
	if (status == MOE_OK && result) {
		result->from = adapter->form;
		result->to = form->name;
		result->params = moe_adapter_count_params(adapter);
	}
	moe_adapter_free(adapter);
	return status;
}

enum moe_status moe_convert_model(const struct moe_convert_model_params *p,
				  struct moe_convert_model_result *result)
{
	struct moe_convert_model_result own = { .struct_size = sizeof own };
	const struct moe_kernels *kernels;

	if (!p || p->struct_size < sizeof *p || (result && result->struct_size < sizeof *result))
		return moe_fail(MOE_ERR_ARG, "convert params: struct_size is not set");
	if (!p->in || !p->out || !p->weights)
		return moe_fail(MOE_ERR_ARG, "convert params: in, out or weights is NULL");
	if (p->max_shard_bytes < 0 || p->threads < 0)
		return moe_fail(MOE_ERR_ARG, "convert params: max_shard_bytes %lld, threads %d; none may be negative",
				(long long)p->max_shard_bytes, p->threads);
	if (!strcmp(p->weights, "keep"))
		return moe_fail(MOE_ERR_ARG, "weights \"keep\" converts nothing: name a format");
	if (p->kt_parts < 0 || p->kt_parts > 64)
		return moe_fail(MOE_ERR_ARG, "kt_parts %d: 1 to 64 are possible, 0 is 1", p->kt_parts);
	if ((p->kt_parts || p->kt_backward) && strncmp(p->weights, "kt-", 3))
		return moe_fail(MOE_ERR_ARG, "weights \"%s\": kt_parts and kt_backward are for \"kt-int8\" and \"kt-int4\"",
				p->weights);
	MOE_TRY(moe_kernels_choose(NULL, &kernels));
	moe_coders_use(kernels->coders);
	return moe_convert_model_run(p, NULL, NULL, result ? result : &own);
}

enum moe_status moe_inspect_with(const char *path, const struct moe_inspect_params *params,
				 char **json)
{
	enum moe_status status;
	cJSON *o = NULL;
	char *text;

	if (!path || !json)
		return moe_fail(MOE_ERR_ARG, "path or json is NULL");
	if (params && params->struct_size < sizeof *params)
		return moe_fail(MOE_ERR_ARG, "inspect params: struct_size is not set");
	*json = NULL;
	status = moe_inspect_path(path, params, &o);
	if (status != MOE_OK)
		return status;
	text = cJSON_PrintUnformatted(o);
	*json = text ? moe_strdup(text) : NULL;
	cJSON_free(text);
	cJSON_Delete(o);
	return *json ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory");
}

enum moe_status moe_inspect(const char *path, char **json)
{
	return moe_inspect_with(path, NULL, json);
}

void moe_text_free(char *text)
{
	moe_free(text);
}
