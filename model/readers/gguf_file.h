/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the GGUF reader: what gguf.c (files and tensors) and gguf_metadata.c (keys and values)
 * share. */
#ifndef MOE_MODEL_READERS_GGUF_FILE_H
#define MOE_MODEL_READERS_GGUF_FILE_H

#include "model/file.h"
#include "model/readers/gguf.h"

/* Names point into the mapping: not terminated. */
struct gguf_entry {
	const char *key;
	size_t key_bytes;
	uint32_t type;
	const unsigned char *value; /* of a text its bytes: */
	size_t bytes;
};

struct gguf_file {
	char *path;
	struct moe_mapping map;
};

struct moe_gguf {
	char *path;
	struct gguf_file *file;
	int n_files;
	struct gguf_entry *entry; /* of the first file */
	size_t n_entries;
	struct moe_gguf_tensor *tensor;
	size_t n_tensors, room;
	const struct moe_gguf_tensor **by_name;
};

/* A place in a file that is read from its beginning. */
struct gguf_cursor {
	const char *path;
	const unsigned char *at, *begin, *end;
};

/* The error of a file that ends inside `what`. */
enum moe_status moe_gguf_cut(const struct gguf_cursor *c, const char *what);
/* The next bytes. Little-endian, as the machine is (engine/base.h). */
enum moe_status moe_gguf_take(struct gguf_cursor *c, size_t bytes, const char *what, void *out);
/* A text where it lies: *bytes of it, not terminated. */
enum moe_status moe_gguf_take_text(struct gguf_cursor *c, const char *what, const char **text,
				   size_t *bytes);

/* A key with its value. */
enum moe_status moe_gguf_take_entry(struct gguf_cursor *c, struct gguf_entry *e);
/* NULL: no such key. */
const struct gguf_entry *moe_gguf_find_entry(const struct gguf_entry *list, size_t n,
					     const char *key);
/* MOE_ERR_FORMAT names a key that is no integer, or beyond int64. */
enum moe_status moe_gguf_entry_int(const char *path, const struct gguf_entry *e, int64_t *out);

#endif
