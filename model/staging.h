/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A folder that appears complete or not at all: it is filled under a temporary name beside its
 * place, synced and renamed. What a killed process left is removed by the next one that makes the
 * same folder.
 */
#ifndef MOE_MODEL_STAGING_H
#define MOE_MODEL_STAGING_H

#include "engine/base.h"

struct moe_staging {
	char *final, *path; /* fill path */
};

/*
 * final must not exist, or be an empty folder (MOE_ERR_ARG otherwise); its parents are made.
 * MOE_ERR_IO naming the path.
 */
enum moe_status moe_staging_begin(const char *final, struct moe_staging *s);
/* Gives the folder its name. s is finished afterwards, also on failure (nothing remains then). */
enum moe_status moe_staging_commit(struct moe_staging *s);
/* Removes it; allowed (does nothing) on a finished or zeroed one. */
void moe_staging_abort(struct moe_staging *s);

#endif
