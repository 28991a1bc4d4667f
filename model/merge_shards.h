/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors files of a merge. Private to model/merge*.c. */
#ifndef MOE_MODEL_MERGE_SHARDS_H
#define MOE_MODEL_MERGE_SHARDS_H

#include "model/adapters/adapter.h"
#include "model/readers/safetensors.h"

struct moe_merge_job;
struct moe_merge_part;

struct moe_merge_shards {
	const char *model;     /* the base's folder */
	struct moe_arch *arch; /* all three owned */
	struct moe_adapter *adapter; /* NULL: tensors are rewritten */
	struct moe_safetensors *base;
	struct moe_merge_job *job;	     /* [tensors of base] what is added to each */
	const struct moe_st_tensor **tensor; /* all of them, by file and place */
	struct moe_merge_part *part;	     /* [n_shards] */
	int n_shards;
	bool split;	     /* shards have other names than the base's */
	int64_t merged;	     /* tensors with something to add */
	int64_t done, total; /* bytes */
	moe_work_fn progress;
	void *user;
};

/* Finds the tensors and cuts shards; adds their bytes to total. */
enum moe_status moe_merge_plan(struct moe_merge_shards *m, int64_t max_shard_bytes);
/* Writes all shards into dir, and an index where they are split. */
enum moe_status moe_merge_write_shards(struct moe_merge_shards *m, const char *dir);
/* More bytes are written; MOE_ERR_INTERRUPTED when progress asks for it. */
enum moe_status moe_merge_advance(struct moe_merge_shards *m, const char *what, int64_t bytes);
/* A tensor whose values are new: model/rewrite.c. */
struct moe_file_writer;
enum moe_status moe_rewrite_tensor(struct moe_merge_shards *m, struct moe_file_writer *w,
				   const struct moe_st_tensor *t, const struct moe_merge_job *job);
void moe_merge_shards_free(struct moe_merge_shards *m);

#endif
