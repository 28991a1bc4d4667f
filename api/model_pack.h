/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading and packing of a checkpoint's weights: collected while the tensors are looked up and
 * memory is taken, then done by all workers' cores at once, each part's share on its own NUMA node:
 * rows that belong to one part are read there, each byte once; what parts share by columns is read
 * by one thread for all of them. Sources (addresses in the tensors of st, read by
 * moe_safetensors_fetch) stay open until moe_pack_run has returned.
 */
#ifndef MOE_API_MODEL_PACK_H
#define MOE_API_MODEL_PACK_H

#include "api/model.h"
#include "model/quantised.h"

struct moe_pack;

enum moe_status moe_pack_create(struct moe_model *m, const struct moe_safetensors *st,
				struct moe_pack **out);
void moe_pack_destroy(struct moe_pack *p); /* NULL accepted */
/* Begins a tensor: the weights that follow are made from it. Values are counted with them. */
enum moe_status moe_pack_tensor(struct moe_pack *p, const struct moe_st_tensor *t);
/* The last tensor is read now: its values, good until the next call. */
enum moe_status moe_pack_read(struct moe_pack *p, const struct moe_st_tensor *t,
			      const void **values);
/* [n, k] of the last tensor, contiguous, to be packed on a part; by way of its master where it is
 * trained. */
enum moe_status moe_pack_weight(struct moe_pack *p, int part, struct moe_weight *w,
				const struct moe_trained *trained, const void *src,
				enum moe_dtype dtype, int64_t n, int64_t k);
/* An expert's matrix, contiguous, in the last tensor or in the one before it (back 1); codes where
 * the model converts. */
enum moe_status moe_pack_expert(struct moe_pack *p, int back, struct moe_experts *e,
				enum moe_expert_matrix which, int expert, const void *src,
				enum moe_dtype dtype);
/*
 * Quantised, of the last tensor: all rows of q (copied) as a dense weight, or rows n0, n0 + step,
 * ... as an expert's matrix; by way of masters where they are trained.
 */
enum moe_status moe_pack_coded(struct moe_pack *p, int part, struct moe_weight *w,
			       const struct moe_trained *trained, const struct moe_quantised *q);
/* Rows n0..n0+n of q, whose codes the last tensor holds, as BF16: for weights that are never
 * quantised here. */
enum moe_status moe_pack_decoded(struct moe_pack *p, int part, struct moe_weight *w,
				 const struct moe_quantised *q, int64_t n0, int64_t n);
enum moe_status moe_pack_expert_coded(struct moe_pack *p, struct moe_experts *e,
				      enum moe_expert_matrix which, int expert,
				      const struct moe_quantised *q, int64_t n0, int64_t step);
/*
 * Does it all: progress (in bytes) and warnings come from the calling thread, in the order of the
 * tensors. MOE_ERR_IO: a file cannot be read or was cut; it and the tensor are named.
 * MOE_ERR_FORMAT: scales that are not finite, or values that cannot be quantised; the tensor is
 * named.
 */
enum moe_status moe_pack_run(struct moe_pack *p);

#endif
