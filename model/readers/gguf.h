/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading GGUF (llama.cpp's files), one file or one split into NAME-00001-of-0000N.gguf: metadata,
 * and tensors where they lie in the mapped files. Nothing in a file is trusted. Immutable after
 * open: any number of threads may read. gguf_tensors.c makes a checkpoint's tensors of it,
 * gguf_config.c its config.json.
 */
#ifndef MOE_MODEL_READERS_GGUF_H
#define MOE_MODEL_READERS_GGUF_H

#include "engine/base.h"
#include "model/json.h"
#include "model/quantised.h"

#define MOE_GGUF_DIMS 4
#define MOE_GGUF_LAYERS 4096 /* at most */

/* A type of tensors: `values` weights, neighbours in a row, lie in one block of `bytes`. */
struct moe_gguf_type {
	const char *name;
	int values, bytes;
	enum moe_dtype dtype;		  /* plain, or MOE_DTYPE_COUNT: */
	const struct moe_st_codes *codes; /* how the blocks are read */
};

/* The type that files call `number`; NULL: it cannot be read. */
const struct moe_gguf_type *moe_gguf_type(uint32_t number);
/* Also of those that cannot be read; "?" */
const char *moe_gguf_type_name(uint32_t number);

struct moe_gguf_tensor {
	const char *name; /* as the file has it */
	const struct moe_gguf_type *type; /* NULL: one that cannot be read; bytes is 0 then */
	uint32_t type_number;
	int ndim;
	int64_t shape[MOE_GGUF_DIMS]; /* outermost first, as everywhere here */
	const void *data;
	size_t bytes;
	int file;
};

struct moe_gguf;

/* path names a GGUF: by its first bytes, or its name where it cannot be read. */
bool moe_gguf_is(const char *path);
/*
 * MOE_ERR_IO: unreadable, a split's file is missing. MOE_ERR_FORMAT: malformed; names the file, and
 * the tensor or key. MOE_ERR_UNSUPPORTED: version, or byte order.
 */
enum moe_status moe_gguf_open(const char *path, struct moe_gguf **out);
void moe_gguf_close(struct moe_gguf *g); /* NULL accepted */
/* MOE_ERR_UNSUPPORTED names a tensor whose type cannot be read: for the tensors that are needed. */
enum moe_status moe_gguf_check_type(const struct moe_gguf *g, const struct moe_gguf_tensor *t);

const char *moe_gguf_path(const struct moe_gguf *g); /* as given to open */
int moe_gguf_file_count(const struct moe_gguf *g);
const char *moe_gguf_file_path(const struct moe_gguf *g, int file);
/* The mapping becomes the caller's (moe_file_unmap); tensors' data stay valid as long as it. */
struct moe_mapping moe_gguf_take_file(struct moe_gguf *g, int file);

size_t moe_gguf_count(const struct moe_gguf *g);
const struct moe_gguf_tensor *moe_gguf_at(const struct moe_gguf *g, size_t i);
/* "blk.3.attn_q.weight"; NULL if there is none. */
const struct moe_gguf_tensor *moe_gguf_find(const struct moe_gguf *g, const char *name);

/*
 * Metadata of the first file. *found false and MOE_OK: no such key. MOE_ERR_FORMAT names a key of
 * another type, or out of range. int: any integer type. text: NUL-terminated, up to size - 1 bytes.
 */
enum moe_status moe_gguf_int(const struct moe_gguf *g, const char *key, int64_t *out, bool *found);
enum moe_status moe_gguf_real(const struct moe_gguf *g, const char *key, double *out, bool *found);
enum moe_status moe_gguf_text(const struct moe_gguf *g, const char *key, char *out, size_t size,
			      bool *found);

/* general.architecture as one of ours. */
struct moe_gguf_arch {
	const char *name, *model_type, *class;
	bool norm_topk;	       /* llama.cpp has no key for it */
	bool bias;	       /* of q, k and v */
	bool permuted;	       /* rows of q and k lie so that rotary pairs are neighbours */
	const char *router;    /* below model.layers.N. */
	const char *expert[3]; /* gate, up, down of an expert, "%d" */
};

/* MOE_ERR_UNSUPPORTED names an architecture that cannot be trained. */
enum moe_status moe_gguf_arch(const struct moe_gguf *g, const struct moe_gguf_arch **out);
/* arch.key as an integer in [1, max]; required unless *out is not 0 before. */
enum moe_status moe_gguf_size(const struct moe_gguf *g, const struct moe_gguf_arch *a,
			      const char *key, int64_t max, int64_t *out);
/* config.json of the model as transformers has it; cJSON_Delete. */
enum moe_status moe_gguf_config(const struct moe_gguf *g, cJSON **out);
/* The same of a file. */
enum moe_status moe_gguf_read_config(const char *path, cJSON **out);
/*
 * Fills a table with the tensors under the names of transformers; it takes g's files. experts_only: the experts that
 * there are, and nothing else of the file is looked at; else a whole model is expected.
 */
struct moe_safetensors;
enum moe_status moe_gguf_fill(struct moe_gguf *g, bool experts_only, struct moe_safetensors *st);

#endif
