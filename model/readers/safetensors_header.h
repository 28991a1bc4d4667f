/* SPDX-License-Identifier: Apache-2.0 */
/* The header of one safetensors file: parsing and validation. Private to model/readers/. */
#ifndef MOE_MODEL_READERS_SAFETENSORS_HEADER_H
#define MOE_MODEL_READERS_SAFETENSORS_HEADER_H

#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors.h"

/* The reference implementation's limit. */
#define MOE_ST_HEADER_LIMIT ((uint64_t)100000000)

struct moe_st_header {
	cJSON *root;		    /* owns names, dtype texts and metadata */
	const cJSON *metadata;	    /* NULL if absent */
	struct moe_st_tensor *list; /* count tensors, names pointing into root, file = 0 */
	size_t count;
};

/*
 * Parses the header of a mapped file and checks it against the file's size: offsets, sizes, no
 * overlap. Names may still repeat. Errors are prefixed by path. On failure nothing is left in out.
 */
enum moe_status moe_st_header_parse(const char *path, const struct moe_mapping *map,
				    struct moe_st_header *out);
void moe_st_header_free(struct moe_st_header *h);

#endif
