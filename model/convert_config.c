/* SPDX-License-Identifier: Apache-2.0 */
#include "model/convert_config.h"

#include <stdio.h>

/* The first matrix that is quantised; its group stands for all. */
static const struct moe_convert_piece *first_coded(const struct moe_convert_plan *p)
{
	for (size_t i = 0; i < p->n_pieces; i++)
		if (p->piece[i].layout)
			return &p->piece[i];
	return NULL;
}

/* Modules with a matrix that stays plain. Embeddings are none that anything quantises. */
static cJSON *plain_modules(const struct moe_convert_plan *p)
{
	cJSON *list = cJSON_CreateArray();
	bool head = false;

	for (size_t i = 0; list && i < p->n_tensors; i++) {
		const struct moe_convert_tensor *t = &p->tensor[i];
		size_t n = strlen(t->name), cut = strlen(".weight");
		char *module;

		if (t->ndim != 2 || (!t->copy && p->piece[t->piece].layout) || n < cut ||
		    strcmp(t->name + n - cut, ".weight") || strstr(t->name, "embed_tokens"))
			continue;
		module = moe_format("%.*s", (int)(n - cut), t->name);
		head = head || (module && !strcmp(module, "lm_head"));
		if (!module || !cJSON_AddItemToArray(list, cJSON_CreateString(module))) {
			moe_free(module);
			cJSON_Delete(list);
			return NULL;
		}
		moe_free(module);
	}
	if (list && !head)
		cJSON_AddItemToArray(list, cJSON_CreateString("lm_head"));
	return list;
}

static bool add_list(const struct moe_convert_plan *p, cJSON *o, const char *key)
{
	cJSON *list = plain_modules(p);

	return list && cJSON_AddItemToObject(o, key, list);
}

static bool fp8_config(const struct moe_convert_plan *p, const struct moe_quantised *q, cJSON *o)
{
	const double block[2] = { (double)q->coding.rows, (double)q->coding.group };
	cJSON *size = cJSON_CreateDoubleArray(block, 2);

	return cJSON_AddStringToObject(o, "quant_method", "fp8") &&
	       cJSON_AddStringToObject(o, "fmt", "e4m3") &&
	       cJSON_AddStringToObject(o, "activation_scheme", "dynamic") && size &&
	       cJSON_AddItemToObject(o, "weight_block_size", size) &&
	       add_list(p, o, "modules_to_not_convert");
}

/* compressed-tensors: one group of modules. */
static bool compressed_config(const struct moe_convert_plan *p, const struct moe_quantised *q,
			      const char *format, const char *type, cJSON *o)
{
	bool row = q->coding.group >= q->k;
	cJSON *groups, *group, *weights, *targets;

	if (!cJSON_AddStringToObject(o, "quant_method", "compressed-tensors") ||
	    !cJSON_AddStringToObject(o, "format", format) ||
	    !cJSON_AddStringToObject(o, "quantization_status", "compressed"))
		return false;
	groups = cJSON_AddObjectToObject(o, "config_groups");
	group = cJSON_AddObjectToObject(groups, "group_0");
	targets = cJSON_AddArrayToObject(group, "targets");
	weights = cJSON_AddObjectToObject(group, "weights");
	return targets && weights && cJSON_AddStringToObject(group, "format", format) &&
	       cJSON_AddItemToArray(targets, cJSON_CreateString("Linear")) &&
	       cJSON_AddNumberToObject(weights, "num_bits", q->coding.format->bits) &&
	       cJSON_AddStringToObject(weights, "type", type) &&
	       cJSON_AddBoolToObject(weights, "symmetric", !q->coding.zero) &&
	       cJSON_AddBoolToObject(weights, "dynamic", false) &&
	       cJSON_AddStringToObject(weights, "strategy", row ? "channel" : "group") &&
	       (row || cJSON_AddNumberToObject(weights, "group_size", (double)q->coding.group)) &&
	       add_list(p, o, "ignore");
}

static bool int8_config(const struct moe_convert_plan *p, const struct moe_quantised *q, cJSON *o)
{
	return compressed_config(p, q, "int-quantized", "int", o);
}

static bool int4_config(const struct moe_convert_plan *p, const struct moe_quantised *q, cJSON *o)
{
	return compressed_config(p, q, "pack-quantized", "int", o);
}

static bool mxfp4_config(const struct moe_convert_plan *p, const struct moe_quantised *q, cJSON *o)
{
	const struct moe_convert_piece *c = first_coded(p);

	if (*c->layout->codes == '.')
		return compressed_config(p, q, "mxfp4-pack-quantized", "float", o);
	return cJSON_AddStringToObject(o, "quant_method", "mxfp4") &&
	       add_list(p, o, "modules_to_not_convert");
}

static bool gptq_config(const struct moe_convert_plan *p, const struct moe_quantised *q, cJSON *o)
{
	return cJSON_AddStringToObject(o, "quant_method", "gptq") &&
	       cJSON_AddNumberToObject(o, "bits", q->coding.format->bits) &&
	       cJSON_AddNumberToObject(o, "group_size", (double)q->coding.group) &&
	       cJSON_AddBoolToObject(o, "desc_act", false) &&
	       cJSON_AddBoolToObject(o, "sym", !q->coding.zero) &&
	       cJSON_AddStringToObject(o, "checkpoint_format", "gptq") &&
	       add_list(p, o, "modules_to_not_convert");
}

static bool awq_config(const struct moe_convert_plan *p, const struct moe_quantised *q, cJSON *o)
{
	return cJSON_AddStringToObject(o, "quant_method", "awq") &&
	       cJSON_AddNumberToObject(o, "bits", q->coding.format->bits) &&
	       cJSON_AddNumberToObject(o, "group_size", (double)q->coding.group) &&
	       cJSON_AddBoolToObject(o, "zero_point", true) &&
	       cJSON_AddStringToObject(o, "version", "gemm") &&
	       add_list(p, o, "modules_to_not_convert");
}

/* Of a format that has no row below: what reads it here wants its name. */
static bool own_config(const struct moe_convert_plan *p, const struct moe_quantised *q, cJSON *o)
{
	return cJSON_AddStringToObject(o, "quant_method", p->target.name) &&
	       cJSON_AddNumberToObject(o, "bits", q->coding.format->bits) &&
	       cJSON_AddNumberToObject(o, "group_size", (double)q->coding.group) &&
	       add_list(p, o, "modules_to_not_convert");
}

/* ---- weights of several codings ---- */

static bool alike(const struct moe_convert_piece *a, const struct moe_convert_piece *b)
{
	return a->format == b->format && a->q.coding.group == b->q.coding.group &&
	       a->q.coding.zero == b->q.coding.zero;
}

/* Modules of the pieces that are coded as `first` is. */
static bool add_targets(const struct moe_convert_plan *p, const struct moe_convert_piece *first,
			cJSON *list)
{
	size_t cut = 0;

	for (size_t i = 0; i < p->n_pieces; i++) {
		const struct moe_convert_piece *c = &p->piece[i];
		char *module;
		bool good;

		if (!c->layout || !alike(c, first))
			continue;
		cut = strlen(p->source[c->source].name) - strlen(".weight");
		module = moe_format("%.*s", (int)cut, p->source[c->source].name);
		good = module && cJSON_AddItemToArray(list, cJSON_CreateString(module));
		moe_free(module);
		if (!good)
			return false;
	}
	return true;
}

static bool add_group(const struct moe_convert_plan *p, const struct moe_convert_piece *c,
		      int index, cJSON *groups)
{
	const char *format = c->format->bits == 8 ? "int-quantized" : "pack-quantized";
	char name[32];
	cJSON *group, *weights, *targets;

	snprintf(name, sizeof name, "group_%d", index);
	group = cJSON_AddObjectToObject(groups, name);
	targets = cJSON_AddArrayToObject(group, "targets");
	weights = cJSON_AddObjectToObject(group, "weights");
	return targets && weights && cJSON_AddStringToObject(group, "format", format) &&
	       cJSON_AddNumberToObject(weights, "num_bits", c->format->bits) &&
	       cJSON_AddStringToObject(weights, "type", "int") &&
	       cJSON_AddBoolToObject(weights, "symmetric", !c->q.coding.zero) &&
	       cJSON_AddBoolToObject(weights, "dynamic", false) &&
	       cJSON_AddStringToObject(weights, "strategy", "group") &&
	       cJSON_AddNumberToObject(weights, "group_size", (double)c->q.coding.group) &&
	       add_targets(p, c, targets);
}

/* compressed-tensors with a group of modules for each coding. */
static bool mixed_config(const struct moe_convert_plan *p, cJSON *o)
{
	cJSON *groups;
	int n = 0;

	if (!cJSON_AddStringToObject(o, "quant_method", "compressed-tensors") ||
	    !cJSON_AddStringToObject(o, "format", "mixed-precision") ||
	    !cJSON_AddStringToObject(o, "quantization_status", "compressed"))
		return false;
	groups = cJSON_AddObjectToObject(o, "config_groups");
	for (size_t i = 0; groups && i < p->n_pieces; i++) {
		bool first = p->piece[i].layout != NULL;

		for (size_t j = 0; j < i && first; j++)
			first = !p->piece[j].layout || !alike(&p->piece[j], &p->piece[i]);
		if (first && !add_group(p, &p->piece[i], n++, groups))
			return false;
	}
	return groups && add_list(p, o, "ignore");
}

/* As readers elsewhere expect it. */
static const struct {
	const char *target;
	bool (*fill)(const struct moe_convert_plan *p, const struct moe_quantised *q, cJSON *o);
} configs[] = {
	{ "fp8", fp8_config },	   { "int8", int8_config }, { "int4", int4_config },
	{ "mxfp4", mxfp4_config }, { "gptq", gptq_config }, { "awq", awq_config },
};

static bool add_quantisation(const struct moe_convert_plan *p, cJSON *config)
{
	const struct moe_convert_piece *c = first_coded(p);
	cJSON *o = c ? cJSON_AddObjectToObject(config, "quantization_config") : NULL;

	if (!c)
		return true;
	if (o && p->target.nearest)
		return mixed_config(p, o);
	for (size_t i = 0; o && i < MOE_COUNT(configs); i++)
		if (!strcmp(configs[i].target, p->target.name))
			return configs[i].fill(p, &c->q, o);
	return o && own_config(p, &c->q, o);
}

enum moe_status moe_convert_config(const struct moe_convert_plan *p, cJSON *config)
{
	static const char *const keys[] = { "dtype", "torch_dtype" };
	const char *dtype = p->target.dtype == MOE_F16	 ? "float16"
			    : p->target.dtype == MOE_F32 ? "float32"
							 : "bfloat16";
	bool good;

	cJSON_DeleteItemFromObjectCaseSensitive(config, "quantization_config");
	cJSON_DeleteItemFromObjectCaseSensitive(config, "compression_config");
	for (size_t i = 0; i < MOE_COUNT(keys) && !p->target.format; i++)
		if (cJSON_GetObjectItemCaseSensitive(config, keys[i]))
			cJSON_ReplaceItemInObjectCaseSensitive(config, keys[i],
							       cJSON_CreateString(dtype));
	good = add_quantisation(p, config);
	return good ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory for config.json");
}
