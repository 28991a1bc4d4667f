/* SPDX-License-Identifier: Apache-2.0 */
/* model.safetensors.index.json beside one shard, a.safetensors, that holds "x" and "y". */
#include "tests/fuzz/fuzz.h"

#include "model/readers/safetensors.h"

#include <stdio.h>
#include <string.h>

static const char header[] = "{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
			     "\"y\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[8,12]}}";

static void write_shard(void)
{
	uint8_t file[8 + sizeof header - 1 + 12] = { 0 };

	file[0] = sizeof header - 1;
	memcpy(file + 8, header, sizeof header - 1);
	fuzz_file(file, sizeof file, "a.safetensors");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static int written;
	struct moe_safetensors *st;
	char folder[160];

	if (!written++)
		write_shard();
	snprintf(folder, sizeof folder, "%s",
		 fuzz_file(data, size, "model.safetensors.index.json"));
	*strrchr(folder, '/') = 0;
	if (moe_safetensors_open(folder, &st) != MOE_OK)
		return 0;
	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		if (!moe_safetensors_find(st, moe_safetensors_at(st, i)->name))
			__builtin_trap();
	moe_safetensors_close(st);
	return 0;
}
