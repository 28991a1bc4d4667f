/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the loaders of weights share: the next tensor, and what can be trained. model_load.c: dense
 * weights and the order of all; model_load_experts.c: experts; model_pack.c takes what they find.
 */
#ifndef MOE_API_MODEL_LOAD_H
#define MOE_API_MODEL_LOAD_H

#include "api/model_pack.h"

struct moe_loader {
	struct moe_model *m;
	const struct moe_safetensors *st; /* NULL: shapes only, for an estimate */
	struct moe_st_tensor shape;	  /* the last tensor, where its data is not in the file */
	struct moe_pack *pack;		  /* NULL: nothing is read, on a dry engine */
};

/* What a checkpoint in bf16 would have; good until the next tensor. */
const struct moe_st_tensor *moe_load_only_shape(struct moe_loader *l, enum moe_role role,
						int layer);
/* Finds a tensor and begins it; MOE_ERR_FORMAT, MOE_ERR_UNSUPPORTED name it. */
enum moe_status moe_load_next(struct moe_loader *l, enum moe_role role, int layer, int expert,
			      const struct moe_st_tensor **out);
/* The same for one that the caller reads itself; data is NULL where nothing is read. */
enum moe_status moe_load_next_read(struct moe_loader *l, enum moe_role role, int layer,
				   const struct moe_st_tensor **out);
/* Begins a quantised weight: its tensors are done when its codes are. */
enum moe_status moe_load_begin_coded(struct moe_loader *l, const struct moe_st_quantised *t);
/* Plain weights that are their own masters are BF16. */
enum moe_status moe_load_check_trained(const struct moe_loader *l, enum moe_role role,
				       const struct moe_st_tensor *t);
/* The file that has a tensor of the checkpoint. */
const char *moe_load_file(const struct moe_loader *l, const struct moe_st_tensor *t);
/*
 * Quantised weights [n, k] that are trained can be quantised again; codes: the tensor that has them, or NULL where
 * they are made while the model is loaded.
 */
enum moe_status moe_load_check_requantise(const struct moe_loader *l, enum moe_role role, int layer,
					  const struct moe_st_tensor *codes, const struct moe_coding *c,
					  int64_t n, int64_t k);
/* model_load_experts.c: a layer's experts with their router. */
enum moe_status moe_load_experts(struct moe_loader *l, int layer, struct moe_experts *e);

#endif
