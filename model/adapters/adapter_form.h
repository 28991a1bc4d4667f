/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forms of adapters on disk. They share adapter_config.json and the tensors of single matrices; a
 * form is how routed experts are stored, one file of model/adapters/forms/.
 */
#ifndef MOE_MODEL_ADAPTERS_ADAPTER_FORM_H
#define MOE_MODEL_ADAPTERS_ADAPTER_FORM_H

#include "model/adapters/adapter.h"

struct moe_adapter_input;
struct moe_adapter_output;

struct moe_adapter_form {
	const char *name;    /* as --adapter-format has it: "peft" */
	const char *summary; /* who reads it */
	/* true if layer has experts in this form. No two forms may claim a directory. */
	bool (*has)(const struct moe_adapter_input *in, int layer);
	/* Fills in e, whose layer and target are set; e->block frees all arrays. */
	enum moe_status (*read)(struct moe_adapter_input *in, struct moe_adapter_entry *e);
	/* After the last layer; NULL: nothing to do. */
	enum moe_status (*finish)(struct moe_adapter_input *in);
	/* Adds the configuration's defaults, tensors and targets of out->adapter's experts. */
	enum moe_status (*write)(struct moe_adapter_output *out);
};

/* The registry generated from model/adapters/forms/; NULL ends. */
extern const struct moe_adapter_form *const moe_adapter_form_list[];
/* MOE_ERR_ARG listing the forms that there are; name NULL: "peft". */
enum moe_status moe_adapter_form_find(const char *name, const struct moe_adapter_form **out);

/*
 * Reads the directory dir in whichever form it has; *out is the caller's (moe_adapter_free).
 * MOE_ERR_IO: a file is missing; MOE_ERR_FORMAT: malformed, a partner tensor missing, shapes or
 * ranks that contradict each other or the configuration; MOE_ERR_UNSUPPORTED: DoRA, biases, other
 * target modules. The text names the directory, and tensor or key.
 */
enum moe_status moe_adapter_read(const char *dir, struct moe_adapter **out);

/*
 * Writes the files of a form (NULL: "peft") into dir (made if missing), each atomically, the
 * configuration last. MOE_ERR_ARG: an unknown form, an incomplete adapter; MOE_ERR_UNSUPPORTED:
 * the form cannot hold it.
 */
enum moe_status moe_adapter_write(const char *dir, const struct moe_adapter *adapter,
				  const char *form);

#endif
