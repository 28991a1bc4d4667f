/* SPDX-License-Identifier: Apache-2.0 */
/* One safetensors file: every tensor that is listed may be read to its last byte. */
#include "tests/fuzz/fuzz.h"

#include "model/readers/safetensors.h"

static volatile unsigned sum;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct moe_safetensors *st;
	const char *key, *value;

	if (moe_safetensors_open(fuzz_file(data, size, "one.safetensors"), &st) != MOE_OK)
		return 0;
	for (size_t i = 0; i < moe_safetensors_count(st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(st, i);
		const struct moe_st_tensor *found = moe_safetensors_find(st, t->name);
		const unsigned char *bytes = t->data;

		if (!found)
			__builtin_trap();
		for (size_t j = 0; j < t->bytes; j++)
			sum += bytes[j];
		if (t->bytes <= 4096 && t->dtype != MOE_DTYPE_COUNT) {
			float *out = moe_calloc(t->bytes * 8 + 8, sizeof *out);

			if (out)
				moe_safetensors_read_f32(st, t->name, t->ndim, t->shape, out);
			moe_free(out);
		}
	}
	for (int i = 0; moe_safetensors_metadata_at(st, 0, i, &key, &value); i++)
		sum += (unsigned)(key[0] + value[0]);
	moe_safetensors_close(st);
	return 0;
}
