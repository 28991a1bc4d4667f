/* SPDX-License-Identifier: Apache-2.0 */
/* Token files that need no tokenizer. */
#ifndef MOE_TESTS_TOKENS_CHECK_H
#define MOE_TESTS_TOKENS_CHECK_H

#include "model/readers/safetensors_writer.h"
#include "model/tokens.h"
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>

/* n_docs documents, n_packs packs of whole documents; the path lives until the next call. */
static inline const char *write_token_file(const char *name, const int32_t *ids, const int32_t *labels,
					   const int64_t *docs, int n_docs, const int64_t *packs, int n_packs)
{
	static char path[4096];
	int64_t n = docs[n_docs];
	struct moe_st_meta meta[] = { { "format", MOE_TOKENS_FORMAT }, { "hash", "test" } };
	struct moe_st_item items[] = {
		{ .name = "input_ids", .dtype = MOE_I32, .ndim = 1, .shape = { n }, .data = ids },
		{ .name = "labels", .dtype = MOE_I32, .ndim = 1, .shape = { n }, .data = labels },
		{ .name = "doc_offsets", .dtype = MOE_I64, .ndim = 1, .shape = { n_docs + 1 }, .data = docs },
		{ .name = "pack_offsets", .dtype = MOE_I64, .ndim = 1, .shape = { n_packs + 1 }, .data = packs },
	};

	snprintf(path, sizeof path, "%s/%s", moe_test_dir(), name);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_write(path, items, 4, meta, 2), MOE_OK);
	return path;
}

/* `docs` documents of 40 to 72 random ids, one to a pack, all of it trained. */
static inline const char *random_token_file(const char *name, int docs, int vocab)
{
	int32_t *ids = calloc((size_t)docs * 72, sizeof *ids);
	int64_t *offsets = calloc((size_t)docs + 1, sizeof *offsets);
	int64_t *packs = calloc((size_t)docs + 1, sizeof *packs);
	uint64_t seed = 77;
	const char *path;
	int64_t n = 0;

	for (int d = 0; d < docs; d++) {
		for (int i = 0; i < 40 + d % 33; i++) {
			seed = seed * 6364136223846793005ull + 1442695040888963407ull;
			ids[n++] = (int32_t)(seed >> 33) % vocab;
		}
		offsets[d + 1] = n;
		packs[d + 1] = d + 1;
	}
	path = write_token_file(name, ids, ids, offsets, docs, packs, docs);
	free(ids), free(offsets), free(packs);
	return path;
}

#endif
