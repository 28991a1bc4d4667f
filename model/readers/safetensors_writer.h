/* SPDX-License-Identifier: Apache-2.0 */
/* Writing safetensors files: the old file stays whole until the new one is complete and synced. */
#ifndef MOE_MODEL_READERS_SAFETENSORS_WRITER_H
#define MOE_MODEL_READERS_SAFETENSORS_WRITER_H

#include "engine/base.h"

/*
 * One tensor to write, row-major contiguous. data is borrowed; when it is NULL and the tensor has
 * elements, fill(user, out) must write all its bytes into out (aligned as malloc gives it), so that
 * a file larger than memory can be written tensor by tensor.
 */
struct moe_st_item {
	const char *name;
	enum moe_dtype dtype;
	int ndim;
	int64_t shape[MOE_MAX_NDIM];
	const void *data;
	enum moe_status (*fill)(void *user, void *out);
	void *user;
};

struct moe_st_meta {
	const char *key, *value;
};

/*
 * The first entry of __metadata__ is a checksum of the file (safetensors_sum.h).
 * Writes path atomically (model/file.h). Tensors lie in the reference implementation's order: by
 * dtype size descending, then by name; the data starts at a multiple of 8.
 * MOE_ERR_ARG: a name or text that is empty, repeated or not UTF-8, or an invalid shape;
 * MOE_ERR_IO: path is left as it was; errors of fill are passed on.
 */
enum moe_status moe_safetensors_write(const char *path, const struct moe_st_item *items,
				      size_t n_items, const struct moe_st_meta *meta,
				      size_t n_meta);

#endif
