/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading safetensors: one file, or a checkpoint directory of one file or of shards with an index; and a GGUF file
 * (gguf_tensors.c) or a folder of kt-kernel's (kt_folder.c) as if it were such a checkpoint. Files are mapped read-only
 * and trusted in nothing: every header field is checked at open. The object is immutable after open: any number of
 * threads may read it.
 */
#ifndef MOE_MODEL_READERS_SAFETENSORS_H
#define MOE_MODEL_READERS_SAFETENSORS_H

#include "engine/base.h"

#define MOE_INDEX_NAME "model.safetensors.index.json"

struct moe_safetensors;
struct moe_st_codes;

/*
 * One tensor. dtype is MOE_DTYPE_COUNT when this reader cannot interpret it (dtype_text says what
 * the file calls it) or when it has more than MOE_MAX_NDIM dimensions (shape then holds the first
 * ones); its bytes can still be copied. data may have any alignment; it lives until close.
 */
struct moe_st_tensor {
	const char *name;
	const char *dtype_text;
	enum moe_dtype dtype;
	int ndim;
	int64_t shape[MOE_MAX_NDIM];
	const void *data;
	size_t bytes;
	size_t stored; /* bytes in files, where data is a reader's own object; else 0 */
	int file; /* which file of the checkpoint: moe_safetensors_file_path */
	/* A matrix that a file quantises in a way of its own (model/quantised.h; dtype MOE_DTYPE_COUNT), or NULL. */
	const struct moe_st_codes *codes;
};

/*
 * Opens path: a file (a GGUF one too), or a directory that holds model.safetensors, else
 * model.safetensors.index.json with its shards, else exactly one *.safetensors, or model-00001.safetensors and
 * those that follow (kt-kernel writes no index).
 * With an index a name belongs to the shard that the index gives it; tensors of the shards that the
 * index omits are listed too. Errors name the file: MOE_ERR_IO (unreadable, missing shard),
 * MOE_ERR_FORMAT (malformed, truncated, a shard without a tensor of the index), MOE_ERR_NOMEM.
 */
enum moe_status moe_safetensors_open(const char *path, struct moe_safetensors **out);
/* The same; of a GGUF file only the experts, whatever else of a model it has or lacks. */
enum moe_status moe_safetensors_open_experts(const char *path, struct moe_safetensors **out);
void moe_safetensors_close(struct moe_safetensors *st);

size_t moe_safetensors_count(const struct moe_safetensors *st);
/* The i-th tensor in file order, i < count. */
const struct moe_st_tensor *moe_safetensors_at(const struct moe_safetensors *st, size_t i);
/* By name in constant time; NULL if there is none. */
const struct moe_st_tensor *moe_safetensors_find(const struct moe_safetensors *st,
						 const char *name);

/* What the tensor takes in its files. */
static inline int64_t moe_st_tensor_bytes(const struct moe_st_tensor *t)
{
	return (int64_t)(t->stored ? t->stored : t->bytes);
}

/* Files of the checkpoint, in the order of first mention. The path lives until close. */
int moe_safetensors_file_count(const struct moe_safetensors *st);
const char *moe_safetensors_file_path(const struct moe_safetensors *st, int file);
bool moe_safetensors_has_file(const struct moe_safetensors *st, const char *path);
/* The whole mapped file, header included. */
void moe_safetensors_file_data(const struct moe_safetensors *st, int file, const void **data,
			       size_t *bytes);
/*
 * Bytes from..from+bytes, which lie in the data of one of the tensors, by reading the file (moe_mapping_read): for what
 * is read once. Bytes that are in no file are copied. MOE_ERR_IO names the file and the place.
 */
enum moe_status moe_safetensors_fetch(const struct moe_safetensors *st, const void *from, size_t bytes, void *out);
/* __metadata__[key] of the first file that has it; NULL if none. Lives until close. */
const char *moe_safetensors_metadata(const struct moe_safetensors *st, const char *key);
/* The i-th entry of file's __metadata__; false past the end. */
bool moe_safetensors_metadata_at(const struct moe_safetensors *st, int file, int i,
				 const char **key, const char **value);

/*
 * The tensor name with exactly this shape (ndim <= MOE_MAX_NDIM) in a supported dtype.
 * MOE_ERR_FORMAT: absent, or another shape (the text has both). MOE_ERR_UNSUPPORTED: its dtype.
 */
enum moe_status moe_safetensors_get(const struct moe_safetensors *st, const char *name, int ndim,
				    const int64_t *shape, const struct moe_st_tensor **out);
/* The same, with its dtype fixed too: MOE_ERR_FORMAT if it differs. */
enum moe_status moe_safetensors_get_typed(const struct moe_safetensors *st, const char *name,
					  enum moe_dtype dtype, int ndim, const int64_t *shape,
					  const struct moe_st_tensor **out);
/*
 * The same, converted from F32, BF16, F16 or F64 into out, product(shape) floats, row-major.
 * MOE_ERR_UNSUPPORTED for other dtypes.
 */
enum moe_status moe_safetensors_read_f32(const struct moe_safetensors *st, const char *name,
					 int ndim, const int64_t *shape, float *out);

#endif
