/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a checkpoint's tensors, as safetensors.c fills it and safetensors_table.c keeps it.
 * Private to these two. */
#ifndef MOE_MODEL_READERS_SAFETENSORS_OWN_H
#define MOE_MODEL_READERS_SAFETENSORS_OWN_H

#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors.h"

struct st_file {
	char *path;
	struct moe_mapping map;
	cJSON *root; /* owns names and metadata */
	const cJSON *metadata;
};

/* Memory of moe_st_table_memory: the first bytes of it. */
struct block {
	struct block *next;
	size_t bytes, used;
};

struct moe_safetensors {
	char *path;
	struct block *blocks;
	void *owned; /* by moe_st_table_own */
	void (*close_owned)(void *owned);
	struct st_file *files;
	int n_files, cap_files;
	struct moe_st_tensor *tensors;
	size_t count, cap;
	cJSON *index;	 /* owns the names that came from it; NULL without an index */
	uint32_t *slots; /* open addressing: 1 + tensor, 0 = free; a power of two, at most half full
			  */
	size_t n_slots;
};

/* One more tensor, under a name that is not there and lives as long as st. */
enum moe_status moe_st_append(struct moe_safetensors *st, const struct moe_st_tensor *t);
/* The tensor of that name; NULL: none. */
struct moe_st_tensor *moe_st_known(const struct moe_safetensors *st, const char *name);
/* One more file, not mapped yet; path (NULL: no memory) is st's then, and freed where this fails.
 */
enum moe_status moe_st_add_file(struct moe_safetensors *st, char *path);

#endif
