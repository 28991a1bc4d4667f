/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The folder that a conversion fills: OUT.partial until it is complete, with convert.json that says
 * from what it is made and which files are done. Private to model/convert*.c.
 */
#ifndef MOE_MODEL_CONVERT_FOLDER_H
#define MOE_MODEL_CONVERT_FOLDER_H

#include "model/convert_plan.h"
#include "model/json.h"

struct moe_convert_folder {
	char *final, *path;
	cJSON *state;
	int fd; /* locked */
	bool fresh;
};

/*
 * Makes or takes up the folder: shards of the plan that are there and have their checksums are done
 * then; what else a killed process left is removed. MOE_ERR_ARG: p->out is there and not empty, or
 * the folder is another conversion's; MOE_ERR_BUSY: a process is at it.
 */
enum moe_status moe_convert_folder_open(const struct moe_convert_model_params *p, const char *note,
					struct moe_convert_plan *plan,
					struct moe_convert_folder *f);
/* Notes a shard that is in place. */
enum moe_status moe_convert_folder_note(struct moe_convert_folder *f,
					const struct moe_convert_shard *s);
/* Gives it its name. */
enum moe_status moe_convert_folder_commit(struct moe_convert_folder *f);
/* Also after commit, or on a zeroed one with fd -1. keep false: the folder is removed. */
void moe_convert_folder_close(struct moe_convert_folder *f, bool keep);

#endif
