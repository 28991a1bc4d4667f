/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint like another one, with other values in some of its tensors. */
#ifndef MOE_MODEL_REWRITE_H
#define MOE_MODEL_REWRITE_H

#include "codelets/format.h"
#include "model/arch.h"

typedef enum moe_status moe_coded_fn(const struct moe_quantised *q, void *arg);

struct moe_rewrite {
	const char *base; /* folder of the checkpoint whose names, dtypes, shards and other files
			     are taken */
	const char *dir;  /* made; files in it that the checkpoint has too are replaced */
	/* Whether a role's tensors get new values. Experts are asked for one by one, fused tensors
	 * too. */
	bool (*replaces)(void *user, enum moe_role role);
	/* Rows first..first + n of the tensor [rows, cols] in f32; a vector is one row. Whole
	 * matrices of experts. */
	void (*rows)(void *user, enum moe_role role, int layer, int expert, int64_t first,
		     int64_t n, float *out);
	/*
	 * fn with a quantised weight as it is computed with: of an expert, also where the base has all in one tensor
	 * (gate rows, then up rows). NULL: nothing is quantised.
	 */
	enum moe_status (*coded)(void *user, enum moe_role role, int layer, int expert, moe_coded_fn *fn, void *arg);
	void *user;
};
/*
 * Files are written beside their places, synced, and renamed, config.json last: a folder without it
 * is no model. What a training leaves (logs, adapters, checkpoints, README.md) is not taken from
 * base.
 */
enum moe_status moe_rewrite_checkpoint(const struct moe_rewrite *r);

/* Adds the bytes of what it would write for a base. */
enum moe_status moe_rewrite_bytes(const char *base, int64_t *bytes);

#endif
