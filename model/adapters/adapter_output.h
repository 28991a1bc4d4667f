/* SPDX-License-Identifier: Apache-2.0 */
/* An adapter's files while they are put together. Private to model/adapters/. */
#ifndef MOE_MODEL_ADAPTERS_ADAPTER_OUTPUT_H
#define MOE_MODEL_ADAPTERS_ADAPTER_OUTPUT_H

#include "model/adapters/adapter_config.h"
#include "model/adapters/adapter_input.h"
#include "model/readers/safetensors_writer.h"

/* One tensor of experts that is composed while the file is written. */
struct moe_adapter_fill {
	const struct moe_adapter *adapter;
	const struct moe_adapter_entry *entry;
	int64_t rank; /* of the file, at least the entry's */
	double grow;  /* factor of B */
	int projection, expert;
	bool b;
};

struct moe_adapter_items {
	struct moe_st_item *item;
	struct moe_adapter_fill *fill; /* fill[i] is item[i].user */
	size_t n, cap;
};

struct moe_adapter_output {
	const struct moe_adapter *adapter;
	cJSON *config;
	bool rslora;	/* of the configuration */
	double uniform; /* not 0: every module has this scaling; B takes up what differs */
	struct moe_adapter_items tensors, kt;
	const char *mark_key, *mark_value; /* metadata of tensors, or NULL */
};

/* Rank and alpha of an entry's module as the file has them; false: the entry has no such module. */
typedef bool (*moe_adapter_setting_fn)(const struct moe_adapter_output *out,
				       const struct moe_adapter_entry *e, int64_t *rank,
				       double *alpha);

/* Starts the configuration; every form's write calls it first. */
enum moe_status moe_adapter_begin(struct moe_adapter_output *out, int64_t rank, double alpha,
				  bool rslora);
/* The same for a form with one scaling, out->uniform, for all experts. MOE_ERR_UNSUPPORTED: it is 0, and then no B says so. */
enum moe_status moe_adapter_begin_uniform(struct moe_adapter_output *out, int64_t rank);
/* Appends a tensor with a formatted name; *it is valid until the next call. */
enum moe_status moe_adapter_add(struct moe_adapter_items *items, struct moe_st_item **it,
				const char *fmt, ...) MOE_PRINTF(3, 4);
/*
 * For the entries of target that get accepts: rank and alpha patterns and the target in a list
 * ("target_modules", "target_parameters"; NULL: none), once as "module" where all layers are alike
 * and adapted, else per layer.
 */
enum moe_status moe_adapter_add_module(struct moe_adapter_output *out,
				       enum moe_adapter_target target, const char *list,
				       const char *module, moe_adapter_setting_fn get);

#endif
