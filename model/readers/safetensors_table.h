/* SPDX-License-Identifier: Apache-2.0 */
/* For readers of other files that give their tensors as a checkpoint's. Private to model/readers/.
 */
#ifndef MOE_MODEL_READERS_SAFETENSORS_TABLE_H
#define MOE_MODEL_READERS_SAFETENSORS_TABLE_H

#include "model/file.h"
#include "model/readers/safetensors.h"

/* One more file, with a mapping that st unmaps, also where this fails; path is copied. */
enum moe_status moe_st_table_file(struct moe_safetensors *st, const char *path,
				  struct moe_mapping map);
/* One more tensor; its name is copied. MOE_ERR_FORMAT: the name is there already. */
enum moe_status moe_st_table_tensor(struct moe_safetensors *st, const struct moe_st_tensor *t);
/* The same, in place (and in the file) of the tensor that has the name. */
enum moe_status moe_st_table_replace(struct moe_safetensors *st, const struct moe_st_tensor *t);
/*
 * Every tensor gets the name that rename gives (its own, or one in buf), or leaves the table (NULL). Pointers to tensors
 * are void afterwards. MOE_ERR_FORMAT: two have one name.
 */
typedef const char *moe_st_rename_fn(void *user, const struct moe_st_tensor *t, char *buf, size_t size);
enum moe_status moe_st_table_rename(struct moe_safetensors *st, moe_st_rename_fn *rename, void *user);
/* moe_safetensors_open of what a folder holds under its own names, also if it is kt-kernel's. */
enum moe_status moe_st_table_open(const char *path, struct moe_safetensors **out);
/* close(owned) when st is closed, before its files are unmapped; also where this fails. One for each st. */
enum moe_status moe_st_table_own(struct moe_safetensors *st, void *owned, void (*close)(void *owned));
/*
 * Zeroed memory that lives until close; NULL without. It is a shared mapping: moe_mapping_forget
 * takes pages from the process, not their contents.
 */
void *moe_st_table_memory(struct moe_safetensors *st, size_t bytes);

#endif
