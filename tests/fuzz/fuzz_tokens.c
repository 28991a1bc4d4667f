/* SPDX-License-Identifier: Apache-2.0 */
/* A token file: offsets and labels of one that opens may be followed without checks. */
#include "tests/fuzz/fuzz.h"

#include "model/tokens.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct moe_tokens *t;

	if (moe_tokens_open(fuzz_file(data, size, "t.safetensors"), 0, &t) != MOE_OK)
		return 0;
	for (int64_t r = 0; r < t->n_rows; r++)
		for (int64_t d = t->pack_offsets[r]; d < t->pack_offsets[r + 1]; d++)
			for (int64_t i = t->doc_offsets[d]; i < t->doc_offsets[d + 1]; i++) {
				int32_t label = t->labels[i];

				if (t->input_ids[i] < 0 || t->input_ids[i] >= t->vocab ||
				    (label != MOE_LABEL_IGNORE && (label < 0 || label >= t->vocab)))
					__builtin_trap();
			}
	moe_tokens_close(t);
	return 0;
}
